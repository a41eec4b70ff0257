"""The one exception tree. Every refusal names its reason once; the edges translate it to gRPC or HTTP.

Example:
    raise InvalidInput("temperature is -1, expected a number in 0..2", field="temperature")
"""

from dataclasses import dataclass

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason

REASON_PREFIX = "REASON_"


class AtollError(Exception):
    """A refusal that a caller can act on.

    reason: the stable word for programs. message: what, where, expected, got, what to do. field: dotted path of the
    offending input, or "". retry_after_s: seconds after which the same call may succeed, or None. sample_ids: the
    samples that it blames.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason.ValueType,
        field: str = "",
        retry_after_s: float | None = None,
        sample_ids: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.sample_ids = sample_ids

    @property
    def code(self) -> str:
        """The reason as HTTP clients see it, e.g. "invalid_field"."""
        return Reason.Name(self.reason).removeprefix(REASON_PREFIX).lower()


class InvalidInput(AtollError):
    """Raised when a value that the caller chose is not allowed."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        reason: Reason.ValueType = errors_pb2.REASON_INVALID_FIELD,
        sample_ids: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, reason=reason, field=field, sample_ids=sample_ids)


class NotFound(AtollError):
    """Raised when the thing that the caller names does not exist."""


class Conflict(AtollError):
    """Raised when the call is well-formed and the present state forbids it."""


class Unavailable(AtollError):
    """Raised when the same call may succeed later."""

    def __init__(
        self,
        message: str,
        *,
        reason: Reason.ValueType = errors_pb2.REASON_SERVICE_UNAVAILABLE,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)


class BadConfiguration(AtollError):
    """Raised at start-up when the settings cannot work; the process prints it and exits with 2."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message, reason=errors_pb2.REASON_BAD_CONFIGURATION, field=field)


class InternalError(AtollError):
    """Raised for a defect of ours, or another service's answer that makes no sense."""

    def __init__(self, message: str, *, reason: Reason.ValueType = errors_pb2.REASON_INTERNAL) -> None:
        super().__init__(message, reason=reason)


@dataclass(frozen=True)
class Status:
    """How a reason travels. Example: Status(grpc.StatusCode.NOT_FOUND, 404)."""

    grpc: grpc.StatusCode
    http: int


_CODE = grpc.StatusCode
STATUS_OF_REASON: dict[Reason.ValueType, Status] = {
    errors_pb2.REASON_INVALID_FIELD: Status(_CODE.INVALID_ARGUMENT, 400),
    errors_pb2.REASON_UNKNOWN_FIELD: Status(_CODE.INVALID_ARGUMENT, 400),
    errors_pb2.REASON_INVALID_JSON: Status(_CODE.INVALID_ARGUMENT, 400),
    errors_pb2.REASON_BODY_TOO_LARGE: Status(_CODE.RESOURCE_EXHAUSTED, 413),
    errors_pb2.REASON_UNSUPPORTED: Status(_CODE.UNIMPLEMENTED, 400),
    errors_pb2.REASON_UNAUTHENTICATED: Status(_CODE.UNAUTHENTICATED, 401),
    errors_pb2.REASON_PERMISSION_DENIED: Status(_CODE.PERMISSION_DENIED, 403),
    errors_pb2.REASON_REQUEST_ID_REUSED: Status(_CODE.ALREADY_EXISTS, 409),
    errors_pb2.REASON_REQUEST_TIMEOUT: Status(_CODE.DEADLINE_EXCEEDED, 408),
    errors_pb2.REASON_TOO_MANY_REQUESTS: Status(_CODE.RESOURCE_EXHAUSTED, 429),
    errors_pb2.REASON_SCENARIO_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_SCENARIO_EXISTS: Status(_CODE.ALREADY_EXISTS, 409),
    errors_pb2.REASON_FAMILY_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_BASE_MODEL_UNUSABLE: Status(_CODE.FAILED_PRECONDITION, 412),
    errors_pb2.REASON_VERSION_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_PARENT_NOT_HEAD: Status(_CODE.ABORTED, 409),
    errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY: Status(_CODE.ALREADY_EXISTS, 409),
    errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED: Status(_CODE.ABORTED, 409),
    errors_pb2.REASON_REVISION_COMPACTED: Status(_CODE.OUT_OF_RANGE, 410),
    errors_pb2.REASON_VERSION_NOT_SERVED: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_FENCED: Status(_CODE.ABORTED, 409),
    errors_pb2.REASON_NOT_RESTORABLE: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_LEASE_LOST: Status(_CODE.ABORTED, 409),
    errors_pb2.REASON_ARTIFACT_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_ARTIFACT_MISMATCH: Status(_CODE.FAILED_PRECONDITION, 412),
    errors_pb2.REASON_STAGING_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_STORAGE_FULL: Status(_CODE.RESOURCE_EXHAUSTED, 507),
    errors_pb2.REASON_RECEIPT_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_RECEIPT_NOT_RECORDED: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_ALREADY_CONSUMED: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_SAMPLE_NOT_EXACT: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_REPORT_REFUSED: Status(_CODE.INVALID_ARGUMENT, 400),
    errors_pb2.REASON_SAMPLE_CORRUPT: Status(_CODE.DATA_LOSS, 500),
    errors_pb2.REASON_JOB_NOT_FOUND: Status(_CODE.NOT_FOUND, 404),
    errors_pb2.REASON_JOB_ID_REUSED: Status(_CODE.ALREADY_EXISTS, 409),
    errors_pb2.REASON_JOB_NOT_CANCELLABLE: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_JOB_CANCELLED: Status(_CODE.ABORTED, 409),
    errors_pb2.REASON_STALE_SAMPLE: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_NOT_TRAINED_HERE: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_BATCH_REFUSED: Status(_CODE.INVALID_ARGUMENT, 400),
    errors_pb2.REASON_TRAINING_CRASHED: Status(_CODE.INTERNAL, 500),
    errors_pb2.REASON_NOT_LEASE_HOLDER: Status(_CODE.UNAVAILABLE, 503),
    errors_pb2.REASON_LOST_VERSION: Status(_CODE.FAILED_PRECONDITION, 409),
    errors_pb2.REASON_ENGINE_UNAVAILABLE: Status(_CODE.UNAVAILABLE, 503),
    errors_pb2.REASON_ENGINE_REFUSED: Status(_CODE.FAILED_PRECONDITION, 502),
    errors_pb2.REASON_ENGINE_PROTOCOL: Status(_CODE.INTERNAL, 502),
    errors_pb2.REASON_SEQUENCE_TOO_LONG: Status(_CODE.INVALID_ARGUMENT, 400),
    errors_pb2.REASON_SERVICE_UNAVAILABLE: Status(_CODE.UNAVAILABLE, 503),
    errors_pb2.REASON_NOT_READY: Status(_CODE.UNAVAILABLE, 503),
    errors_pb2.REASON_BAD_CONFIGURATION: Status(_CODE.FAILED_PRECONDITION, 500),
    errors_pb2.REASON_INTERNAL: Status(_CODE.INTERNAL, 500),
}
"""Complete by a test: a reason without a status cannot be added."""
