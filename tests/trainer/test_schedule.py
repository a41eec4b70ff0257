"""The learning rate of every step against the formulas in plain floats, its refusals, and that a reload goes on."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import BadConfiguration
from atoll.families.catalog import make_family
from atoll.trainer.preflight import refuse_settings
from atoll.trainer.schedule import RateCurve, RateSchedule, rate_schedule
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.training import train_steps

from tests.trainer.critic_support import sao_binding, sao_family, sao_rows, sao_steps
from tests.trainer.megatron_support import ModelKind, Pool, grpo_binding, grpo_steps, make_rows
from tests.trainer.world import pair, until, world

PEAK, FLOOR, WARMUP, END = 1e-3, 1e-4, 4, 20


def settings(**changes: object) -> TrainerSettings:
    fields = {"scenario": "chat", "registry": "127.0.0.1:1", "gateway": "127.0.0.1:1", "run_dir": Path("run")}
    return TrainerSettings.model_validate({**fields, "engines": ("http://e",), "learning_rate": PEAK, **changes})


def oracle(curve: str, step: int) -> float:
    """The rate of step 1, 2, ... as the page of the schedules says it."""
    if step <= WARMUP:
        return PEAK * step / WARMUP
    if curve == "constant":
        return PEAK
    x = 1.0 if step >= END else (step - WARMUP) / (END - WARMUP)
    if curve == "linear":
        return PEAK + x * (FLOOR - PEAK)
    return FLOOR + 0.5 * (PEAK - FLOOR) * (1.0 + math.cos(x * math.pi))


@pytest.mark.parametrize("curve", ["constant", "linear", "cosine"])
def test_every_step_has_the_rate_of_the_formula(curve: str) -> None:
    decay = {} if curve == "constant" else {"lr_decay_steps": END, "lr_minimum": FLOOR}
    schedule = rate_schedule(settings(lr_schedule=curve, lr_warmup_steps=WARMUP, **decay))
    expected = [oracle(curve, step) for step in range(1, 31)]
    assert schedule.rates(0, 30) == pytest.approx(expected, rel=1e-12)
    # Cut anywhere, the pieces are the same curve.
    assert [*schedule.rates(0, 7), *schedule.rates(7, 23)] == schedule.rates(0, 30)
    assert min(schedule.rates(0, 30)) > 0
    assert schedule.rate(WARMUP - 1) == PEAK
    if curve != "constant":
        assert schedule.rate(END - 2) > schedule.rate(END - 1) == FLOOR == schedule.rate(10**9)


def test_without_a_schedule_every_step_has_the_same_rate() -> None:
    assert rate_schedule(settings()).rates(5, 3) == [PEAK] * 3
    assert rate_schedule(settings(lr_schedule="linear", lr_decay_steps=2)).rates(0, 3) == [PEAK / 2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr_schedule": "cosine"}, "LR_DECAY_STEPS is not set: cosine needs it"),
        (
            {"lr_schedule": "linear", "lr_decay_steps": 4, "lr_warmup_steps": 4},
            "LR_DECAY_STEPS is 4: .* than the 4",
        ),
        ({"lr_decay_steps": 10}, "LR_DECAY_STEPS is 10: a constant rate has no decay"),
        ({"lr_minimum": 1e-4}, "LR_MINIMUM is 0.0001: a constant rate has no decay"),
        ({"lr_schedule": "linear", "lr_decay_steps": 9, "lr_minimum": 0.1}, "LR_MINIMUM is 0.1: .* at most the 0.001"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused_by_name(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BadConfiguration, match=f"ATOLL_TRAINER_{says}"):
        refuse_settings(settings(**changes))


async def test_a_trainer_that_restarts_goes_on_with_the_curve(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        curve = {"lr_schedule": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 6, "lr_minimum": 1e-4}
        here.settings = here.settings.model_copy(update=curve)
        for number in range(4):
            stub = await here.start()
            await stub.SubmitJob(here.job(f"job-{number}", pair(f"s{number}", versions=(f"1:{number}",))))
            assert (await until(stub, f"job-{number}")).state == job_pb2.JOB_STATE_SERVED
        found = [version.metrics["train/learning_rate"] for version in (await here.registry.versions())[1:5]]
    assert found == pytest.approx([5e-4, 1e-3, 7.75e-4, 5.5e-4], rel=1e-12)


def test_the_position_comes_back_with_a_checkpoint(
    megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path], tmp_path: Path
) -> None:
    schedule = RateSchedule(1e-2, RateCurve.COSINE, warmup_steps=2, decay_steps=8, floor=1e-3)
    binding = grpo_binding(use_rollout_log_probs=True)
    grpo = make_family(binding.reference, binding.options)
    backend = megatron_pool.backend(1, 1)
    source = tiny_model(ModelKind("qwen3"))
    backend.load(source, None, None)
    steps = grpo_steps(make_rows(), binding)
    rates = [train_steps(backend, grpo, binding, schedule, steps)["train/learning_rate"] for _ in range(3)]
    backend.stage(None, tmp_path / "checkpoint", b"")
    rates += [train_steps(backend, grpo, binding, schedule, steps)["train/learning_rate"] for _ in range(2)]
    assert rates == pytest.approx(schedule.rates(0, 5), rel=1e-12)
    backend.load(source, tmp_path / "checkpoint", None)  # a rollback to the third step
    assert backend.steps_taken() == 3
    again = [train_steps(backend, grpo, binding, schedule, steps)["train/learning_rate"] for _ in range(2)]
    assert again == rates[3:]


def test_steps_of_the_critic_do_not_move_the_actors_position(
    megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path]
) -> None:
    schedule = RateSchedule(1e-2, RateCurve.LINEAR, decay_steps=10)
    binding = sao_binding(critic_steps_per_actor=3)
    backend = megatron_pool.backend(1, 1)
    source = tiny_model(ModelKind("qwen3"))
    backend.load(source, None, source)
    steps = sao_steps(sao_rows(), binding)
    found = [train_steps(backend, sao_family(binding), binding, schedule, steps) for _ in range(2)]
    assert [each["train/learning_rate"] for each in found] == pytest.approx([9e-3, 8e-3], rel=1e-12)
