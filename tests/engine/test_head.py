"""Booting from the head that a real registry names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration
from atoll.engine.head import scenario_head
from atoll.registry.app import Registry, RegistryServer
from atoll.registry.settings import BootScenario, RegistrySettings

from tests.engines import free_port


@asynccontextmanager
async def registry(store: Path, port: int, base_model: Path) -> AsyncIterator[None]:
    """A registry with the scenario "support" at version 0."""
    scenario = BootScenario(scenario_id="support", family="grpo", base_model=str(base_model))
    settings = RegistrySettings(port=port, store=store, scenarios=(scenario,))
    opened = Registry(settings)
    server = RegistryServer(opened, settings)
    await server.start()
    try:
        yield
    finally:
        await server.stop()
        opened.close()


async def test_the_head_is_the_directory_and_name_of_the_newest_weights(tiny_models: Path, tmp_path: Path) -> None:
    port = free_port()
    async with registry(tmp_path, port, tiny_models / "student"):
        weights = await scenario_head(f"127.0.0.1:{port}", "support", None, timeout_s=10)
    assert weights.weight_version == "1:0"
    served = (weights.model_path / "model.safetensors").read_bytes()
    assert served == (tiny_models / "student" / "model.safetensors").read_bytes()


async def test_a_registry_that_starts_later_is_waited_for(tiny_models: Path, tmp_path: Path) -> None:
    port = free_port()
    waiting = asyncio.create_task(scenario_head(f"127.0.0.1:{port}", "support", None, timeout_s=60))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    async with registry(tmp_path, port, tiny_models / "student"):
        assert (await waiting).weight_version == "1:0"


async def test_a_scenario_that_never_comes_is_refused_by_name(tiny_models: Path, tmp_path: Path) -> None:
    port = free_port()
    async with registry(tmp_path, port, tiny_models / "student"):
        with pytest.raises(BadConfiguration, match=r"'absent'.*scenario_not_found"):
            await scenario_head(f"127.0.0.1:{port}", "absent", None, timeout_s=1)


async def test_a_registry_that_never_comes_is_refused_by_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(BadConfiguration, match=f"{address}.*service_unavailable"):
        await scenario_head(address, "support", None, timeout_s=1)
