"""The registry as the commands ask it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from atoll.common import rpc_errors
from atoll.common.channels import open_channel
from atoll.common.errors import Unavailable


@asynccontextmanager
async def registry_channel(registry: str, token: str | None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to host:port. A call that fails inside raises the registry's refusal, or Unavailable naming it."""
    async with open_channel(registry, token) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            refusal = rpc_errors.from_rpc_error(error)
            if isinstance(refusal, Unavailable):
                raise Unavailable(f"the registry does not answer at {registry}: {refusal.message}") from None
            raise refusal from None
