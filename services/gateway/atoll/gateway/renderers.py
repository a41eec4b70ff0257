"""One renderer per scenario, made from the registry's files when the scenario is first asked for."""

import asyncio

from atoll.common.renderer import Renderer
from atoll.gateway.registry_reader import RegistryReader


class Renderers:
    """Kept in memory: a gateway has no files of its own besides its database."""

    def __init__(self, registry: RegistryReader) -> None:
        self._registry = registry
        self._ready: dict[str, Renderer] = {}
        self._loading = asyncio.Lock()

    async def get(self, scenario: str) -> Renderer:
        """Raises NotFound, Unavailable while the registry does not answer, InternalError for broken model files."""
        found = self._ready.get(scenario)
        if found is not None:
            return found
        async with self._loading:
            if scenario not in self._ready:
                files = await self._registry.tokenizer_files(scenario)
                # A large vocabulary takes a second to read.
                self._ready[scenario] = await asyncio.to_thread(Renderer.from_files, files)
        return self._ready[scenario]
