"""Fixtures of the gateway's HTTP tests: the real registry, a fake engine, a gateway between them."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from atoll.common.names import new_id

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.desk import Desk
from tests.gateway.http_gateway import SCENARIO, HttpGateway, http_gateway
from tests.gateway.processes import free_port, service
from tests.gateway.store_world import URL_FILE
from tests.postgres import PostgresServer

TOKEN = "s3cret"
GRPO = ("grpo", {"groups_per_step": 2, "n_samples_per_prompt": 2})
FAMILY_TOP_K = 5
SCENARIOS = {
    SCENARIO: GRPO,
    "other": GRPO,
    # Its family learns from what is recorded beside the sampled tokens.
    "judged": ("openclawrl", {"top_k": FAMILY_TOP_K}),
    # A report on it is a batch, of as many turns as it names.
    "tuned": ("sft", {"batch_size": 1}),
}


@pytest.fixture(scope="session")
def registry_address(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry process with scenarios of the tiny model, at version 0."""
    directory = tmp_path_factory.mktemp("registry")
    port = free_port()
    scenarios = [
        {
            "scenario_id": scenario,
            "family": family,
            "options": options,
            "base_model": str(tiny_models / "student"),
        }
        for scenario, (family, options) in SCENARIOS.items()
    ]
    settings = {
        "ATOLL_REGISTRY_PORT": str(port),
        "ATOLL_REGISTRY_STORE": str(directory / "store"),
        "ATOLL_REGISTRY_SCENARIOS": json.dumps(scenarios),
    }
    with service("atoll.registry", settings, directory / "log", port):
        yield f"127.0.0.1:{port}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def both_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """What a test opens at `url_of(tmp_path)` is on both kinds of database, on PostgreSQL in the slow lane."""
    if request.param == "sqlite":
        yield
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = new_id()
    (tmp_path / URL_FILE).write_text(server.create(name))
    yield
    server.drop(name)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as running:
        yield running


@pytest.fixture
async def web(registry_address: str, engine: FakeEngine, tmp_path: Path) -> AsyncIterator[HttpGateway]:
    """A gateway without a token before the fake engine."""
    async with http_gateway(registry_address, tmp_path, (engine.url,)) as running:
        yield running


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    await desk.writer.stop()
    desk.database.close()
