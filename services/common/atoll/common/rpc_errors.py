"""Errors on gRPC: an AtollError becomes a status with google.rpc details, and back."""

from typing import Any, NoReturn

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.common.errors import (
    REASON_PREFIX,
    STATUS_OF_REASON,
    AtollError,
    Conflict,
    InternalError,
    InvalidInput,
    NotFound,
    Unavailable,
)
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "atoll"
ASK_ELSEWHERE = frozenset({errors_pb2.REASON_NOT_LEASE_HOLDER})
"""Reasons for which another server has to be asked."""
SAMPLE_IDS = "sample_ids"
"""Key of the samples, divided by spaces, in ErrorInfo's metadata."""
SAMPLES_SENT = 20
"""Details travel as a header, of which a peer takes 8 KiB."""
MESSAGE_START, MESSAGE_END = 800, 300
"""Bytes that travel of a longer message, which is in a reply up to three times: what came first, and what to do."""
_REASON_NAMES = frozenset(Reason.keys())


def to_status(error: AtollError) -> status_pb2.Status:
    """The rich status of an error: ErrorInfo always, BadRequest for a field, RetryInfo when a retry may help. A message
    that is too long to travel is cut in the middle."""
    words = _that_travels(error.message)
    details: list[any_pb2.Any] = []

    def add(
        message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
    ) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    reason = Reason.Name(error.reason).removeprefix(REASON_PREFIX)
    samples = {SAMPLE_IDS: " ".join(error.sample_ids[:SAMPLES_SENT])} if error.sample_ids else {}
    add(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=samples))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:MESSAGE_END], description=words)
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    code = STATUS_OF_REASON[error.reason].grpc
    return status_pb2.Status(code=code_pb2.Code.Value(code.name), message=words, details=details)


def _that_travels(message: str) -> str:
    raw = message.encode(errors="replace")
    if len(raw) <= MESSAGE_START + MESSAGE_END:
        return message
    return f"{raw[:MESSAGE_START].decode(errors='ignore')} [...] {raw[-MESSAGE_END:].decode(errors='ignore')}"


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: AtollError) -> NoReturn:
    """Ends a call with the error's status."""
    status = rpc_status.to_status(to_status(error))
    metadata = status.trailing_metadata
    if error.reason in ASK_ELSEWHERE:
        # The channel would ask the same server again for a second and a half before it told its caller.
        metadata = (*metadata, ("grpc-retry-pushback-ms", "-1"))
    await context.abort(status.code, status.details, metadata)
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.RpcError) -> AtollError:
    """The AtollError that a failed call stands for; a transport failure becomes Unavailable."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError(f"gRPC call failed: {error}")
    code = error.code()
    message = error.details() or ""
    reason, field, retry_after_s = errors_pb2.REASON_UNSPECIFIED, "", None
    samples: tuple[str, ...] = ()
    for detail in _details_of(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            if info.domain == ERROR_DOMAIN and REASON_PREFIX + info.reason in _REASON_NAMES:
                reason = Reason.Value(REASON_PREFIX + info.reason)
                samples = tuple(info.metadata[SAMPLE_IDS].split()) if SAMPLE_IDS in info.metadata else ()
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else ""
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    transient = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    if reason == errors_pb2.REASON_UNSPECIFIED:
        if transient:
            return Unavailable(f"{code.name}: {message}")
        return InternalError(f"{code.name}: {message}")
    if transient:
        return Unavailable(message, reason=reason, retry_after_s=retry_after_s or 1.0)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidInput(message, field=field, reason=reason, sample_ids=samples)
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFound(message, reason=reason, field=field, sample_ids=samples)
    if code in (
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    ):
        return Conflict(message, reason=reason, field=field, sample_ids=samples)
    return AtollError(message, reason=reason, field=field, retry_after_s=retry_after_s, sample_ids=samples)


def _details_of(error: grpc.Call | grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            return list(status_pb2.Status.FromString(value).details)
    return []
