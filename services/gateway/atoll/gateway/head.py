"""The newest version of a scenario, and what follows from it: who may answer, and what can still be trained. Pure."""

from dataclasses import dataclass

from atoll.common.errors import InvalidInput
from atoll.common.weight_version import WeightVersion


@dataclass(frozen=True)
class Head:
    """Example: Head(number=3, weight_version="1:3", parent_weight_version="1:2", same_weights_since=3)"""

    number: int
    weight_version: str
    parent_weight_version: str | None
    same_weights_since: int
    """Number of the oldest version from which on the weights did not change; a job of a critic alone changes none."""


def serves_now(weight_version: str, head: Head) -> bool:
    """Whether an engine of this version may answer: it serves the head, or its parent while the head is published.

    One ahead of the head is right too: engines may hear of a version before this gateway does.
    """
    if weight_version in (head.weight_version, head.parent_weight_version):
        return True
    try:
        return WeightVersion.parse(weight_version) > WeightVersion.parse(head.weight_version)
    except InvalidInput:
        return False


def why_never_admitted(weight_version: str, head: Head, max_staleness: int) -> str | None:
    """Why the trainer will admit no sample of this version, at this head or a later one; None while it may.

    The trainer's own rule, for what is certain here: a version that this gateway has not heard of yet is left to it.
    """
    produced, newest = WeightVersion.parse(weight_version), WeightVersion.parse(head.weight_version)
    if produced.incarnation < newest.incarnation:
        return f"stale_sample: produced by {weight_version}, the head is {head.weight_version}, of another incarnation"
    too_old = newest.number - produced.number > max_staleness and produced.number < head.same_weights_since
    if too_old and produced.incarnation == newest.incarnation:
        return (
            f"stale_sample: produced by {weight_version}, the head is {head.weight_version} and max_staleness is "
            f"{max_staleness}"
        )
    return None
