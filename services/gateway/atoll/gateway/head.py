"""The newest version of a scenario, and what follows from it: who may answer, and what can still be trained. Pure."""

from dataclasses import dataclass

from atoll.common.errors import InvalidInput
from atoll.common.weight_version import WeightVersion
from atoll.gateway.records import Settlement


@dataclass(frozen=True)
class LostVersions:
    """Versions whose weights a recovery could not bring back. Example: LostVersions(1, first=6, last=7)"""

    incarnation: int
    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return (
            isinstance(version, WeightVersion)
            and version.incarnation == self.incarnation
            and self.first <= version.number <= self.last
        )


@dataclass(frozen=True)
class Head:
    """Example: Head(4, "1:4", content=frozenset({"1:4", "1:3"}), parent_content=frozenset({"1:4", "1:3"}))"""

    number: int
    weight_version: str
    content: frozenset[str]
    """Every name of the head's weights, its own included: a job of a critic alone changes none, and a recovery may
    bring the weights of the incarnation before back."""
    parent_content: frozenset[str] = frozenset()
    """Every name of the weights that engines serve until the head is published."""
    lost: tuple[LostVersions, ...] = ()


def serves_now(weight_version: str, head: Head) -> bool:
    """Whether an engine of this version may answer: it serves the head, or its parent while the head is published.

    One ahead of the head is right too: engines may hear of a version before this gateway does.
    """
    if weight_version in head.content or weight_version in head.parent_content:
        return True
    try:
        return WeightVersion.parse(weight_version) > WeightVersion.parse(head.weight_version)
    except InvalidInput:
        return False


def why_never_admitted(weight_version: str, head: Head, max_staleness: int) -> Settlement | None:
    """Why the trainer will admit no sample of this version, at this head or a later one; None while it may.

    The trainer's own rule, for what is certain here: a version that this gateway has not heard of yet is left to it.
    """
    if weight_version in head.content:
        return None
    produced, newest = WeightVersion.parse(weight_version), WeightVersion.parse(head.weight_version)
    seen = f"produced by {weight_version}, the head is {head.weight_version}"
    if any(produced in lost for lost in head.lost):
        return Settlement("lost_version", f"{seen}, and the weights of {weight_version} are lost")
    if produced.incarnation < newest.incarnation:
        return Settlement("stale_sample", f"{seen}, of another incarnation")
    if produced.incarnation == newest.incarnation and newest.number - produced.number > max_staleness:
        return Settlement("stale_sample", f"{seen} and max_staleness is {max_staleness}")
    return None
