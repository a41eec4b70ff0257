"""An endpoint that serves something else than it is said to serve is refused, with what is different."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atoll.common.engine_client import EngineClient
from atoll.common.errors import BadConfiguration
from atoll.teacher.model_facts import read_model_facts
from atoll.teacher.proof import Prover

from tests.fakes.scoring_server import VOCABULARY, ScoringServer, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[ScoringServer]:
    async with ScoringServer(model) as server:
        yield server


async def refusal(server: ScoringServer, prover: Prover) -> str:
    async with EngineClient(server.url, prover.facts.vocabulary_size) as client:
        with pytest.raises(BadConfiguration) as refused:
            await prover.prove(client)
    return refused.value.message


def prover_of(model: Path) -> Prover:
    return Prover(read_model_facts(model), 0.1)


async def test_the_right_engine_is_proven_and_its_weights_are_named(server: ScoringServer, model: Path) -> None:
    async with EngineClient(server.url, VOCABULARY) as client:
        assert await prover_of(model).prove(client) == "0:0"


async def test_a_link_to_the_directory_is_the_directory(server: ScoringServer, model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    server.model = tmp_path / "link"
    async with EngineClient(server.url, VOCABULARY) as client:
        assert await prover_of(model).prove(client) == "0:0"


async def test_another_directory_is_refused(server: ScoringServer, model: Path, tmp_path: Path) -> None:
    server.model = write_model(tmp_path / "other")
    message = await refusal(server, prover_of(model))
    assert f"serves {tmp_path / 'other'}, the teacher is {model}" in message


async def test_a_directory_that_cannot_be_looked_at_is_one_that_cannot_be_seen(
    server: ScoringServer, model: Path
) -> None:
    server.model = Path("/") / ("x" * 5_000)  # like one without permission, also for root
    async with EngineClient(server.url, VOCABULARY) as client:
        assert await prover_of(model).prove(client) == "0:0"


async def test_another_architecture_is_refused(server: ScoringServer, model: Path) -> None:
    server.architecture = "LlamaForCausalLM"
    message = await refusal(server, prover_of(model))
    assert "serves the architecture LlamaForCausalLM" in message and "is Fake" in message


async def test_ids_that_the_model_does_not_have_are_refused(server: ScoringServer, model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace(str(VOCABULARY), "60"))
    message = await refusal(server, prover_of(model))
    assert "has other than 60 ids" in message and "outside the vocabulary of 60" in message


async def test_a_vocabulary_that_is_not_all_of_it_is_refused(server: ScoringServer, model: Path) -> None:
    server.lost_nats = 0.7
    assert "have the probability 0.4966 together, expected 1" in await refusal(server, prover_of(model))


async def test_other_weights_than_before_are_refused(server: ScoringServer, model: Path) -> None:
    prover = prover_of(model)
    async with EngineClient(server.url, VOCABULARY) as client:
        await prover.prove(client)
    server.seed = 1
    assert "nats from what it did before" in await refusal(server, prover)


async def test_where_the_path_cannot_be_seen_the_weights_are_compared_all_the_same(
    server: ScoringServer, model: Path
) -> None:
    prover = prover_of(model)
    server.model = Path("/on/another/machine")
    async with EngineClient(server.url, VOCABULARY) as client:
        await prover.prove(client)
        # A vocabulary is not asked for as a whole there.
        assert max(map(len, server.scored)) == 33 and len(server.scored) == 1
    server.seed = 1
    assert "its weights are others" in await refusal(server, prover)
