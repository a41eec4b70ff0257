"""Which artifacts stay and which go, and why: a pure function.

protected    the head, its parent, the newest checkpoint of its ancestry, version 0's model, pinned versions, what an
             open job needs, what was sealed just now: never removed
kept         what the policy wants besides: removed only to meet a bound, the least wanted first
the rest     removed
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

UNCOMMITTED_GRACE = timedelta(hours=1)
"""How long a sealed artifact waits for its commit; a trainer that comes back later seals it again."""


class Policy(StrEnum):
    """Which checkpoints are kept besides the protected ones."""

    LATEST = "latest"
    """The newest."""
    BEST_REWARD = "best_reward"
    """Those whose own samples were rewarded best, and those that were not measured."""


@dataclass(frozen=True)
class Rules:
    """What the operator wants. Example: Rules(Policy.LATEST, keep=2, max_storage=200_000_000_000, min_free=0).

    keep: checkpoints of a scenario. max_storage: bytes of all artifacts. min_free: bytes of the filesystem.
    """

    policy: Policy
    keep: int
    max_storage: int
    min_free: int


@dataclass(frozen=True)
class VersionBytes:
    """A version and what it refers to. reward: mean over samples that it produced, None when not measured.

    Example: VersionBytes("support", 3, True, "ab12...", "cd34...", utc_now(), reward=0.4)
    """

    scenario: str
    number: int
    is_durable: bool
    model_digest: str
    checkpoint_digest: str | None
    committed_at: datetime
    is_pinned: bool = False
    reward: float | None = None

    @property
    def digests(self) -> tuple[str, ...]:
        return (self.model_digest,) if self.checkpoint_digest is None else (self.model_digest, self.checkpoint_digest)

    def __str__(self) -> str:
        return f"version {self.number} of {self.scenario}"


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact whose bytes are there. Example: StoredArtifact("ab12...", 2_000_000, sealed_at=utc_now())."""

    digest: str
    total_size: int
    sealed_at: datetime


@dataclass(frozen=True)
class Facts:
    """What is there. versions: all that refer to a stored artifact, and each head. needed: digest to the reason why an
    open job needs it. free: bytes of the filesystem.

    Example: Facts(versions, artifacts, {"ab12...": "staged by job-1f of support"}, free=10**11)
    """

    versions: Sequence[VersionBytes]
    artifacts: Sequence[StoredArtifact]
    needed: Mapping[str, str]
    free: int


@dataclass(frozen=True)
class Decision:
    """What becomes of an artifact. Example: Decision(artifact, remove=False, why="head of support")."""

    artifact: StoredArtifact
    remove: bool
    why: str


@dataclass(frozen=True)
class Plan:
    """Decisions, oldest artifact first. short_of: bytes that the bounds still want when all of it is carried out."""

    decisions: tuple[Decision, ...]
    short_of: int

    @property
    def removed(self) -> tuple[str, ...]:
        """Digests to remove, sorted."""
        return tuple(sorted(decision.artifact.digest for decision in self.decisions if decision.remove))


def plan(facts: Facts, rules: Rules, now: datetime) -> Plan:
    """Decides on every artifact. What two versions share stays while either wants it."""
    chains: dict[str, list[VersionBytes]] = defaultdict(list)
    for version in sorted(facts.versions, key=lambda version: -version.number):
        chains[version.scenario].append(version)
    there = {artifact.digest for artifact in facts.artifacts}
    protected: dict[str, str] = {}
    wanted: list[_Wanted] = []
    for chain in chains.values():
        for digest, why in _protections(chain, there):
            protected.setdefault(digest, why)
        wanted += _wanted(chain, rules)
    for digest, why in facts.needed.items():
        protected.setdefault(digest, why)
    for artifact in facts.artifacts:
        if _waits_for_commit(artifact, facts.versions, now):
            protected.setdefault(artifact.digest, "sealed less than an hour ago, to be committed")
    kept = {digest: item.why for item in reversed(wanted) for digest in item.version.digests}
    removed = {
        artifact.digest: _why_not(artifact.digest, facts.versions, rules)
        for artifact in facts.artifacts
        if artifact.digest not in protected and artifact.digest not in kept
    }
    short_of = _make_room(facts, rules, protected, wanted, removed)
    decisions = tuple(
        Decision(
            artifact,
            artifact.digest in removed,
            removed.get(artifact.digest) or protected.get(artifact.digest) or kept[artifact.digest],
        )
        for artifact in sorted(facts.artifacts, key=lambda artifact: (artifact.sealed_at, artifact.digest))
    )
    return Plan(decisions, short_of)


@dataclass(frozen=True)
class _Wanted:
    """A version that the policy keeps. The least `order` goes first when a bound asks for room."""

    version: VersionBytes
    why: str
    order: tuple[int, float]


def _protections(newest_first: Sequence[VersionBytes], there: set[str]) -> Iterator[tuple[str, str]]:
    head = newest_first[0]
    name = head.scenario
    for version in newest_first:
        if version.number >= head.number - 1:
            role = "head" if version is head else "parent of the head"
            yield from ((digest, f"{role} of {name}") for digest in version.digests)
        if version.number == 0:
            yield version.model_digest, f"base model of {name}"
        if version.is_pinned:
            yield from ((digest, f"{version} is pinned") for digest in version.digests)
    # A recovery takes the newest checkpoint that is there, and its model when the head's is lost.
    with_checkpoint = (v for v in newest_first if v.is_durable and (v.checkpoint_digest or v.model_digest) in there)
    complete = (v for v in newest_first if v.is_durable and there.issuperset(v.digests))
    for found in (next(with_checkpoint, None), next(complete, None)):
        if found is not None:
            yield from ((digest, f"newest checkpoint of {name}") for digest in found.digests)


def _wanted(newest_first: Sequence[VersionBytes], rules: Rules) -> list[_Wanted]:
    durable = _newest_of_each(newest_first)
    name = newest_first[0].scenario
    if rules.policy is Policy.LATEST:
        return [
            _Wanted(version, f"among the {rules.keep} newest checkpoints of {name}", (0, _age(version)))
            for version in durable[: rules.keep]
        ]
    measured = sorted(
        ((version.reward, version.number, version) for version in durable if version.reward is not None), reverse=True
    )
    best = [
        # Rewards of different scenarios do not compare, their ranks do.
        _Wanted(version, f"among the {rules.keep} best rewarded checkpoints of {name}", (0, float(-rank)))
        for rank, (_, _, version) in enumerate(measured[: rules.keep])
    ]
    unmeasured = [
        _Wanted(version, f"the reward of {version} was not measured", (1, _age(version)))
        for version in durable
        if version.reward is None
    ]
    return [*best, *unmeasured]


def _newest_of_each(newest_first: Sequence[VersionBytes]) -> list[VersionBytes]:
    """Checkpoints with bytes of their own: a rollback brings an earlier version's back, and takes nobody's place."""
    seen = {version.digests for version in newest_first if version.number == 0}
    found = []
    for version in newest_first:
        if version.is_durable and version.digests not in seen:
            seen.add(version.digests)
            found.append(version)
    return found


def _age(version: VersionBytes) -> float:
    return version.committed_at.timestamp()


def _waits_for_commit(artifact: StoredArtifact, versions: Sequence[VersionBytes], now: datetime) -> bool:
    if now - artifact.sealed_at >= UNCOMMITTED_GRACE:
        return False
    # Content of an old version may have been sealed again for a version to come.
    return all(v.committed_at < artifact.sealed_at for v in versions if artifact.digest in v.digests)


def _why_not(digest: str, versions: Sequence[VersionBytes], rules: Rules) -> str:
    users = [version for version in versions if digest in version.digests]
    if not users:
        return "sealed more than an hour ago and committed by nobody"
    newest = max(users, key=_age)
    if not newest.is_durable:
        return f"{newest} is live and its successor has one"
    kind = "newest" if rules.policy is Policy.LATEST else "best rewarded"
    return f"{newest} is not among the {rules.keep} {kind} checkpoints"


def _make_room(
    facts: Facts, rules: Rules, protected: Mapping[str, str], wanted: Sequence[_Wanted], removed: dict[str, str]
) -> int:
    """Adds to `removed` until the bounds are met; returns the bytes that are still missing."""
    sizes = {artifact.digest: artifact.total_size for artifact in facts.artifacts}
    freed = sum(sizes[digest] for digest in removed)
    over = sum(sizes.values()) - rules.max_storage
    bound = "max_storage" if over > rules.min_free - facts.free else "min_free_space"
    needed = max(over, rules.min_free - facts.free)
    left = sorted(wanted, key=lambda item: item.order)
    while freed < needed and left:
        item = left.pop(0)
        shared = {digest for other in left for digest in other.version.digests}
        for digest in item.version.digests:
            if digest in sizes and not {digest} & (protected.keys() | shared | removed.keys()):
                removed[digest] = f"{item.version} makes room: {bound}"
                freed += sizes[digest]
    return max(0, needed - freed)
