"""Works out a head from the chain: under which names its weights were served, and what a recovery lost."""

from collections.abc import Awaitable, Callable

from atoll.api.registry.v1 import version_pb2
from atoll.common.weight_version import WeightVersion
from atoll.gateway.head import Head, LostVersions

INCARNATIONS_BACK = 8
"""Samples of earlier ones are stale, whether or not a recovery lost their weights as well."""

ReadVersion = Callable[[int], Awaitable[version_pb2.Version]]
"""An entry of the chain by its number."""


async def head_of(version: version_pb2.Version, known: Head | None, read: ReadVersion) -> Head:
    """The head that a version makes. known: the head before, as far as it was heard; it saves reading."""
    parent = await read(version.parent) if version.HasField("parent") else None
    return Head(
        number=version.number,
        weight_version=version.weight_version,
        content=await _names(version, known, read),
        parent_content=frozenset() if parent is None else await _names(parent, known, read),
        lost=(() if known is None else known.lost) + await _lost_since(known, version, read),
    )


async def _names(version: version_pb2.Version, known: Head | None, read: ReadVersion) -> frozenset[str]:
    """Every weight version with the same weights that is reached without a change of weights or a rollback."""
    names: set[str] = set()
    waiting = [version]
    while waiting:
        entry = waiting.pop()
        if known is not None and entry.number == known.number:
            names |= known.content
            continue
        names.add(entry.weight_version)
        if entry.operation == version_pb2.OPERATION_ROLLBACK:
            continue
        before = {entry.parent} if entry.HasField("parent") else set()
        if entry.operation == version_pb2.OPERATION_RECOVERY and entry.HasField("restores"):
            before.add(entry.restores)
        for number in before:
            earlier = await read(number)
            if earlier.model_digest == entry.model_digest and earlier.weight_version not in names:
                waiting.append(earlier)
    return frozenset(names)


async def _lost_since(known: Head | None, version: version_pb2.Version, read: ReadVersion) -> tuple[LostVersions, ...]:
    """What recoveries lost after the known head, up to a version: also those that were not heard of."""
    since = WeightVersion(1, 0) if known is None else WeightVersion.parse(known.weight_version)
    lost: tuple[LostVersions, ...] = ()
    for _ in range(INCARNATIONS_BACK):
        if _incarnation(version) <= since.incarnation:
            break
        first = await _first_of_incarnation(version, since.number, read)
        before = await read(first.parent)
        if first.operation == version_pb2.OPERATION_RECOVERY:
            lost += _lost_by(first, before)
        version = before
    return lost


async def _first_of_incarnation(version: version_pb2.Version, earlier: int, read: ReadVersion) -> version_pb2.Version:
    """The first version of a version's incarnation. earlier: the number of one of an incarnation before."""
    # Numbers and incarnations grow together.
    while version.number - earlier > 1:
        middle = await read((earlier + version.number) // 2)
        if _incarnation(middle) == _incarnation(version):
            version = middle
        else:
            earlier = middle.number
    return version


def _incarnation(version: version_pb2.Version) -> int:
    return WeightVersion.parse(version.weight_version).incarnation


def _lost_by(recovery: version_pb2.Version, parent: version_pb2.Version) -> tuple[LostVersions, ...]:
    """Nothing when the weights of the last version were there."""
    if recovery.model_digest == parent.model_digest or not recovery.HasField("restores"):
        return ()
    return (LostVersions(_incarnation(parent), recovery.restores + 1, parent.number),)
