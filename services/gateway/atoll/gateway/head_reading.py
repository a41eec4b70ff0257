"""Works out a head from the chain: under which names its weights were served, and what a recovery lost."""

from collections.abc import Awaitable, Callable

from atoll.api.registry.v1 import version_pb2
from atoll.common.weight_version import WeightVersion
from atoll.gateway.head import Head, LostVersions

ReadVersion = Callable[[int], Awaitable[version_pb2.Version]]
"""An entry of the chain by its number."""


async def head_of(version: version_pb2.Version, known: Head | None, read: ReadVersion) -> Head:
    """The head that a version makes. known: the head before, as far as it was heard; it saves reading."""
    parent = await read(version.parent) if version.HasField("parent") else None
    lost = known.lost if known is not None else ()
    if parent is not None and version.operation == version_pb2.OPERATION_RECOVERY:
        lost += _lost_by(version, parent)
    return Head(
        number=version.number,
        weight_version=version.weight_version,
        content=await _names(version, known, read),
        parent_content=frozenset() if parent is None else await _names(parent, known, read),
        lost=lost,
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


def _lost_by(recovery: version_pb2.Version, parent: version_pb2.Version) -> tuple[LostVersions, ...]:
    """Nothing when the weights of the last version were there."""
    if recovery.model_digest == parent.model_digest or not recovery.HasField("restores"):
        return ()
    incarnation = WeightVersion.parse(parent.weight_version).incarnation
    return (LostVersions(incarnation, recovery.restores + 1, parent.number),)
