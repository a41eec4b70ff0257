"""Keeps engines of other scenarios away: what they sample must not be recorded as this scenario's."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

import structlog
from atoll.common.errors import Unavailable
from atoll.gateway.engine_pool import Engine
from atoll.gateway.version_contents import VersionContents

log = structlog.get_logger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Strangers:
    """An engine that serves an artifact of the registry has its digest in its model path: .../<digest>/files.

    Weight versions alone do not tell: every scenario has a 1:0. An engine that serves another directory is trusted.
    """

    def __init__(self, contents: VersionContents) -> None:
        self._contents = contents

    async def among(self, engines: Iterable[Engine], scenario: str) -> frozenset[str]:
        """URLs of the engines that must not answer for the scenario, as far as the registry can tell now."""
        found = set()
        for engine in engines:
            digest = _digest_in(engine.model_path or "")
            if engine.weight_version is None or digest is None:
                continue
            try:
                expected = await self._contents.digest(scenario, engine.weight_version)
            except Unavailable as error:
                log.warning("engine taken on trust", engine=engine.url, problem=error.message)
                continue
            if digest != expected:
                found.add(engine.url)
        return frozenset(found)


def _digest_in(model_path: str) -> str | None:
    return next((part for part in reversed(PurePosixPath(model_path).parts) if _DIGEST.fullmatch(part)), None)
