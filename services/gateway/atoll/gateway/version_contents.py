"""Which weights a weight version names: digests from the registry, kept, since a version never changes."""

import time
from dataclasses import dataclass

from atoll.common.errors import InvalidInput, NotFound
from atoll.common.weight_version import WeightVersion
from atoll.gateway.registry_reader import RegistryReader

ABSENT_SECONDS = 1.0
"""How long a version that the registry does not know is not asked for again: engines of other scenarios serve such
versions all the time, and a chat must not wait for the registry because of them."""


def is_weight_version(text: str) -> bool:
    """An engine that nobody has published to reports a word of its own."""
    try:
        WeightVersion.parse(text)
    except InvalidInput:
        return False
    return True


class VersionContents:
    """Asks the registry once per version."""

    def __init__(self, registry: RegistryReader) -> None:
        self._registry = registry
        self._digests: dict[tuple[str, str], str | None] = {}
        self._absent_until: dict[tuple[str, str], float] = {}

    async def digest(self, scenario: str, weight_version: str) -> str | None:
        """The content of the scenario's version of that name, None when it has none. Raises Unavailable."""
        key = (scenario, weight_version)
        if key in self._digests:
            return self._digests[key]
        if time.monotonic() < self._absent_until.get(key, 0.0):
            return None
        try:
            entry = await self._registry.version(scenario, WeightVersion.parse(weight_version).number)
        except (NotFound, InvalidInput):
            # Not for long: the version may be on its way.
            self._absent_until[key] = time.monotonic() + ABSENT_SECONDS
            return None
        self._absent_until.pop(key, None)
        self._digests[key] = entry.model_digest if entry.weight_version == weight_version else None
        return self._digests[key]


@dataclass(frozen=True)
class Pin:
    """The version that a request insists on: answered by its weights under any name of the incarnation, and by no
    others. Example: Pin("math", "1:3", "9f2c...", frozenset({"1:3", "1:4"}), contents)"""

    scenario: str
    weight_version: str
    digest: str
    served: frozenset[str]
    """Names of these weights that engines report now."""
    contents: VersionContents

    async def allows(self, weight_version: str) -> bool:
        """Whether these are the weights. Raises Unavailable."""
        if weight_version in self.served:
            return True
        if WeightVersion.parse(weight_version).incarnation != WeightVersion.parse(self.weight_version).incarnation:
            return False
        return await self.contents.digest(self.scenario, weight_version) == self.digest
