"""What is refused before a worker starts, and that the refusal names the setting and the fix."""

import json
from functools import partial
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, InternalError
from atoll.trainer.backends import layout_of
from atoll.trainer.chain import ScenarioFacts
from atoll.trainer.head_loader import TAKE_OVER_TRIES
from atoll.trainer.preflight import refuse_settings, resolve_bound_family, run_settings, vocabulary_size
from atoll.trainer.settings import TrainerSettings
from pydantic import JsonValue

from tests.trainer.world import OPTIONS, world


def settings(directory: Path, **changes: object) -> TrainerSettings:
    fields = {
        "scenario": "chat",
        "registry": "127.0.0.1:1",
        "gateway": "127.0.0.1:1",
        "engines": ("http://127.0.0.1:2",),
        "run_dir": directory / "run",
        **changes,
    }
    return TrainerSettings.model_validate(fields)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"engines": ()}, "ATOLL_TRAINER_ENGINES is empty"),
        ({"engines": ("http://e", "http://e")}, "ATOLL_TRAINER_ENGINES names an engine twice"),
        ({"min_engines": 2}, "ATOLL_TRAINER_MIN_ENGINES is 2, expected at most the 1"),
        ({"run_dir": Path("/dev/null/run")}, "ATOLL_TRAINER_RUN_DIR"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(tmp_path: Path, changes: dict[str, object], names: str) -> None:
    with pytest.raises(BadConfiguration, match=names):
        refuse_settings(settings(tmp_path, **changes))


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("nonesuch", {}, "nonesuch.*known: .*grpo"),
        ("grpo", {"eps_clipp": 0.1}, "scenario chat: .*eps_clip"),
        ("grpo", {"eps_clip": 3}, "scenario chat: .*eps_clip"),
        ("no_such_package.losses:Family", {}, "no_such_package"),
    ],
)
def test_a_scenario_whose_family_cannot_be_trained_is_refused(
    tmp_path: Path, family: str, options: dict[str, JsonValue], says: str
) -> None:
    facts = ScenarioFacts("chat", family, options, 0)
    with pytest.raises(BadConfiguration, match=says):
        resolve_bound_family(facts, run_settings(settings(tmp_path), facts, 1000))


@pytest.mark.parametrize("config", [None, {}, {"vocab_size": "many"}, {"vocab_size": 0}])
def test_a_model_that_does_not_tell_its_vocabulary_is_refused(tmp_path: Path, config: dict[str, object] | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfiguration, match=r"config\.json"):
        vocabulary_size(tmp_path)


async def test_a_scenario_that_the_registry_does_not_have_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.settings = here.settings.model_copy(update={"scenario": "other"})
        with pytest.raises(BadConfiguration, match="ATOLL_TRAINER_SCENARIO is 'other'"):
            await here.start()


async def test_workers_that_are_killed_while_they_load_at_boot_load_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.backend.before["load"] = [here.backend.crash] * (TAKE_OVER_TRIES - 1)
        await here.boot()
        assert here.backend.weights is not None


async def test_a_head_that_crashes_the_workers_at_every_try_of_the_boot_ends_the_process(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.backend.before["load"] = [here.backend.crash] * TAKE_OVER_TRIES
        with pytest.raises(BadConfiguration, match=r"version 0 cannot be loaded: .*SIGKILL"):
            await here.boot()


@pytest.mark.parametrize("method", ["GetScenario", "GetVersion"])
async def test_a_registry_that_refuses_the_token_while_a_trainer_boots_ends_it_with_a_refusal(
    tmp_path: Path, method: str
) -> None:
    async with world(tmp_path) as here:
        refused = [AtollError("the token is another one", reason=errors_pb2.REASON_UNAUTHENTICATED)] * 20
        if method == "GetScenario":
            here.registry.refusals[method] = refused
        else:
            here.registry.after["AcquireLease"] = partial(here.registry.refusals.update, {method: refused})
        with pytest.raises(BadConfiguration, match=r"does not let this trainer in: .*another one.*ATOLL_TOKEN"):
            await here.boot()


async def test_a_registry_that_fails_while_the_head_is_taken_over_is_asked_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        failures = [InternalError("the database is locked") for _ in range(5)]
        here.registry.after["AcquireLease"] = partial(here.registry.refusals.update, GetVersion=failures)
        await here.boot()
        assert here.backend.weights is not None and failures == []


def test_the_options_of_the_fakes_are_those_of_a_real_family(tmp_path: Path) -> None:
    facts = ScenarioFacts("chat", "grpo", OPTIONS, 3)
    laid_out = settings(tmp_path, tensor_parallel=2, pipeline_parallel=4, context_parallel=3)
    run = run_settings(laid_out, facts, 1000)
    assert (run.max_staleness, run.tensor_parallel, run.vocab_size) == (3, 2, 1000)
    assert (run.pipeline_parallel, run.context_parallel) == (4, 3)
    assert layout_of(laid_out) == "tp2 pp4 cp3 dp1"
    assert resolve_bound_family(facts, run).name == "grpo"


def test_score_centering_reaches_the_family_which_refuses_it_or_not(tmp_path: Path) -> None:
    centered = settings(tmp_path, score_centering=True, score_centering_top_k=64, score_centering_min_tail_mass=1e-4)
    facts = ScenarioFacts("chat", "grpo", {}, 0)
    run = run_settings(centered, facts, 1000)
    assert (run.score_centering, run.score_centering_top_k, run.score_centering_min_tail_mass) == (True, 64, 1e-4)
    with pytest.raises(BadConfiguration, match="scenario chat: score_centering true is refused: grpo declares no"):
        resolve_bound_family(facts, run)
    opd = ScenarioFacts("chat", "opd", {}, 0)
    assert resolve_bound_family(opd, run).name == "opd"
