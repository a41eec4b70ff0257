"""Engines of another scenario are never asked, although their weight versions have the same names."""

from pathlib import Path

import pytest
from atoll.gateway.engine_pool import Engine
from atoll.gateway.registry_reader import RegistryReader
from atoll.gateway.strangers import Strangers
from atoll.gateway.version_contents import VersionContents

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.http_gateway import SCENARIO, HttpGateway, http_gateway


async def digest_of(web: HttpGateway, scenario: str) -> str:
    versions = (await web.get(f"/atoll/scenarios/{scenario}/versions")).body["versions"]
    return str(versions[0]["model_digest"])


async def test_only_engines_that_serve_the_scenarios_own_artifact_answer(
    registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 0.3)
    async with (
        FakeEngine() as own,
        FakeEngine() as stranger,
        http_gateway(registry_address, tmp_path, (own.url, stranger.url)) as web,
    ):
        own.model_path = f"/store/artifacts/{await digest_of(web, SCENARIO)}/files"
        stranger.model_path = "/store/artifacts/" + "0" * 64 + "/files"
        await web.engines.probe()
        for _ in range(4):
            assert (await web.chat()).status == 200
        assert len(own.requests) == 4 and not stranger.requests
        own.model_path = stranger.model_path
        await web.engines.probe()
        refused = await web.chat()
        assert refused.status == 503 and "another scenario" in refused.error["message"]


async def test_a_version_that_the_chain_does_not_have_is_a_strangers(
    registry_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.gateway.engine_run.RETRY_SECONDS", 0.3)
    async with FakeEngine() as engine, http_gateway(registry_address, tmp_path, (engine.url,)) as web:
        engine.model_path = f"/store/artifacts/{await digest_of(web, SCENARIO)}/files"
        engine.weight_version = "1:7"
        await web.engines.probe()
        assert (await web.chat()).status == 503


async def test_the_registry_is_not_asked_for_every_chat_about_versions_of_another_scenario(
    web: HttpGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RegistryReader(web.gateway.registry)
    asked: list[int] = []
    ask = reader.version

    async def counted(scenario: str, number: int) -> object:
        asked.append(number)
        return await ask(scenario, number)

    monkeypatch.setattr(reader, "version", counted)
    strangers = Strangers(VersionContents(reader))
    other = Engine("http://other", True, "1:7", "/store/artifacts/" + "0" * 64 + "/files")
    for _ in range(5):
        assert await strangers.among([other], SCENARIO) == {other.url}
    assert asked == [7]
    monkeypatch.setattr("atoll.gateway.version_contents.ABSENT_SECONDS", 0.0)
    later = Strangers(VersionContents(reader))
    for _ in range(2):
        await later.among([other], SCENARIO)
    assert asked == [7, 7, 7], "it may come after a while"
