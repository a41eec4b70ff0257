"""Which artifacts may go: the `latest` policy, as a pure function."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

UNCOMMITTED_GRACE = timedelta(hours=1)
"""How long a sealed artifact waits for its commit; a trainer that comes back later seals it again."""


@dataclass(frozen=True)
class VersionBytes:
    """A version and what it refers to. Example: VersionBytes("support", 3, 2, "ab12...", "cd34...", utc_now())."""

    scenario: str
    number: int
    parent: int | None
    model_digest: str
    checkpoint_digest: str | None
    committed_at: datetime


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact whose bytes are there. Example: StoredArtifact("ab12...", sealed_at=utc_now())."""

    digest: str
    sealed_at: datetime


def plan(
    versions: Iterable[VersionBytes], artifacts: Iterable[StoredArtifact], now: datetime, keep: int
) -> tuple[str, ...]:
    """Digests to remove, sorted.

    versions: every version of every scenario that refers to one of the artifacts, and each head. keep: how many of a
    scenario's newest versions keep their bytes, 1 or more.

    Kept besides them: the head's parent, the newest checkpoint in the head's ancestry, the model of version 0, and what
    was sealed less than an hour ago and not committed since. A digest that any kept version shares stays.
    """
    chains: dict[str, list[VersionBytes]] = defaultdict(list)
    for version in versions:
        chains[version.scenario].append(version)
    committed_at: dict[str, datetime] = {}
    kept: set[str] = set()
    for chain in chains.values():
        for version in chain:
            for digest in _digests(version):
                committed_at[digest] = max(version.committed_at, committed_at.get(digest, version.committed_at))
        kept |= _kept(sorted(chain, key=lambda version: version.number, reverse=True), keep)

    def waits_for_commit(artifact: StoredArtifact) -> bool:
        # Content of an old version may have been sealed again for a version to come.
        last = committed_at.get(artifact.digest)
        return (last is None or last < artifact.sealed_at) and now - artifact.sealed_at < UNCOMMITTED_GRACE

    return tuple(
        sorted(
            artifact.digest for artifact in artifacts if artifact.digest not in kept and not waits_for_commit(artifact)
        )
    )


def _kept(newest_first: Sequence[VersionBytes], keep: int) -> set[str]:
    head = newest_first[0]
    numbers = {version.number for version in newest_first[:keep]} | {head.parent}
    kept = {digest for version in newest_first if version.number in numbers for digest in _digests(version)}
    kept |= {version.model_digest for version in newest_first if version.number == 0}
    by_number = {version.number: version for version in newest_first}
    ancestor: VersionBytes | None = head
    while ancestor is not None and ancestor.checkpoint_digest is None:
        ancestor = None if ancestor.parent is None else by_number.get(ancestor.parent)
    if ancestor is not None:
        kept |= set(_digests(ancestor))
    return kept


def _digests(version: VersionBytes) -> tuple[str, ...]:
    return (version.model_digest, *(() if version.checkpoint_digest is None else (version.checkpoint_digest,)))
