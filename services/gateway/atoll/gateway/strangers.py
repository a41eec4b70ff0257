"""Keeps engines of other scenarios away: what they sample must not be recorded as this scenario's."""

import re
import time
from collections.abc import Iterable
from pathlib import PurePosixPath

import structlog
from atoll.common.errors import InvalidInput, NotFound, Unavailable
from atoll.common.weight_version import WeightVersion
from atoll.gateway.engine_pool import Engine
from atoll.gateway.registry_reader import RegistryReader

log = structlog.get_logger(__name__)

ABSENT_SECONDS = 1.0
"""How long a version that the registry does not know is not asked for again: engines of other scenarios serve such
versions all the time, and a chat must not wait for the registry because of them."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Strangers:
    """An engine that serves an artifact of the registry has its digest in its model path: .../<digest>/files.

    Weight versions alone do not tell: every scenario has a 1:0. An engine that serves another directory is trusted.
    """

    def __init__(self, registry: RegistryReader) -> None:
        self._registry = registry
        self._digests: dict[tuple[str, str], str | None] = {}
        self._absent_until: dict[tuple[str, str], float] = {}

    async def among(self, engines: Iterable[Engine], scenario: str) -> frozenset[str]:
        """URLs of the engines that must not answer for the scenario, as far as the registry can tell now."""
        found = set()
        for engine in engines:
            digest = _digest_in(engine.model_path or "")
            if engine.weight_version is None or digest is None:
                continue
            try:
                expected = await self._digest(scenario, engine.weight_version)
            except Unavailable as error:
                log.warning("engine taken on trust", engine=engine.url, problem=error.message)
                continue
            if digest != expected:
                found.add(engine.url)
        return frozenset(found)

    async def _digest(self, scenario: str, weight_version: str) -> str | None:
        """The content of the scenario's version of that name, None when it has none. A version never changes."""
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


def _digest_in(model_path: str) -> str | None:
    return next((part for part in reversed(PurePosixPath(model_path).parts) if _DIGEST.fullmatch(part)), None)
