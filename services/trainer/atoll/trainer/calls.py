"""Calls to other services: their answer, or the AtollError that their failure stands for."""

from collections.abc import Awaitable
from typing import TypeVar

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.common.rpc_errors import from_rpc_error
from grpc_status import rpc_status

T = TypeVar("T")

NOT_LET_IN = frozenset({errors_pb2.REASON_UNAUTHENTICATED, errors_pb2.REASON_PERMISSION_DENIED})
"""Reasons that are nobody's batch's fault: a token is wrong on one side, until somebody sets it right."""

_OF_TRANSPORT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


async def answer_of(call: Awaitable[T]) -> T:
    """The answer of a call. Raises what `failure_of` makes of its failure."""
    try:
        return await call
    except grpc.RpcError as error:
        raise failure_of(error) from None


def failure_of(error: grpc.RpcError) -> AtollError:
    """The AtollError of a failed call.

    A service that stops cuts its calls with CANCELLED, a connection that breaks with INTERNAL or UNKNOWN. An error that
    a service of Atoll chose carries details; without them the call is worth asking again.
    """
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in _OF_TRANSPORT:
        metadata = error.trailing_metadata() or ()
        if all(key != rpc_status.GRPC_DETAILS_METADATA_KEY for key, _ in metadata):
            return Unavailable(f"{error.code().name}: {error.details()}")
    return from_rpc_error(error)


def not_let_in(error: AtollError) -> BadConfiguration:
    """What a refused token is to a trainer that has never worked."""
    return BadConfiguration(
        f"the registry does not let this trainer in: {error.message}; give both the same ATOLL_TOKEN",
        field="ATOLL_TOKEN",
    )
