"""The refusals a loss family may utter, each with the one reason that every transport carries."""

from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.common.errors import BadConfiguration, InvalidInput, NotFound


def option_refused(message: str, *, field: str) -> InvalidInput:
    """An option has a value or a type that is not allowed; `field` is the option's name."""
    return InvalidInput(message, field=field, reason=errors_pb2.REASON_INVALID_FIELD)


def option_unknown(message: str, *, field: str) -> InvalidInput:
    """An option or flag that the family does not have."""
    return InvalidInput(message, field=field, reason=errors_pb2.REASON_UNKNOWN_FIELD)


def family_unknown(message: str) -> NotFound:
    """No loss family answers to the name or reference."""
    return NotFound(message, field="family", reason=errors_pb2.REASON_FAMILY_NOT_FOUND)


def family_malformed(message: str) -> BadConfiguration:
    """A class or module that is named as a family does not fulfil the contract."""
    return BadConfiguration(message, field="family")


def report_refused(message: str, *, field: str) -> InvalidInput:
    """A report does not fulfil the family's report contract; `field` is a path such as `metadata.group`."""
    return InvalidInput(message, field=field, reason=errors_pb2.REASON_REPORT_REFUSED)


def batch_refused(message: str, *, field: str) -> InvalidInput:
    """A batch cannot be trained as it is, whichever of its samples it is."""
    return InvalidInput(message, field=field, reason=errors_pb2.REASON_BATCH_REFUSED)


def sample_refused(
    sample_id: str, problem: str, *, field: str, reason: Reason.ValueType = errors_pb2.REASON_BATCH_REFUSED
) -> InvalidInput:
    """A sample cannot be trained as it is: "sample <id>: <problem>"; whoever reports the job's end names the sample."""
    return InvalidInput(f"sample {sample_id}: {problem}", field=field, reason=reason, sample_ids=(sample_id,))
