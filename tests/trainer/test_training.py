"""A family drives actor and critic through a job, and a refusal counts the steps of both."""

from pathlib import Path

import pytest
from atoll.trainer.backend import StepRefused
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.training import JobWorkers, train_steps

from tests.fakes.backend import FakeBackend, write_model
from tests.trainer.critic_support import sao_binding, sao_family, sao_rows, sao_steps


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    write_model(tmp_path / "model", [1.0, 2.0, 3.0])
    fake = FakeBackend()
    fake.load(tmp_path / "model", None, None)
    return fake


def refuse() -> None:
    raise StepRefused("not finite at sample-3", ("sample-3",), 0)


def test_the_critic_trains_as_often_as_the_family_says_and_its_metrics_keep_their_group(backend: FakeBackend) -> None:
    binding = sao_binding(critic_steps_per_actor=3)
    metrics = train_steps(backend, sao_family(binding), binding, RateSchedule(1e-3), sao_steps(sao_rows(), binding))
    assert (backend.critic_steps, backend.count) == (3, 1)
    assert metrics["critic/loss"] == 1.0
    assert "train/loss" in metrics
    assert metrics["perf/workers_critic_seconds"] == pytest.approx(0.003)


def test_a_critic_only_job_takes_no_step_of_the_actor(backend: FakeBackend) -> None:
    binding = sao_binding(num_critic_only_steps=1)
    metrics = train_steps(backend, sao_family(binding), binding, RateSchedule(1e-3), sao_steps(sao_rows(), binding))
    assert (backend.critic_steps, backend.count, backend.weights) == (2, 0, [1.0, 2.0, 3.0])
    assert "train/loss" not in metrics


def test_a_refusal_of_the_actor_counts_the_steps_that_the_critic_has_taken(backend: FakeBackend) -> None:
    binding = sao_binding()
    backend.before["train"] = [refuse]
    with pytest.raises(StepRefused, match="sample-3") as refused:
        train_steps(backend, sao_family(binding), binding, RateSchedule(1e-3), sao_steps(sao_rows(), binding))
    assert refused.value.steps_taken == 2
    backend.before["train_critic"] = [refuse]
    workers = JobWorkers(backend, binding, RateSchedule(1e-3))
    with pytest.raises(StepRefused) as refused:
        workers.train_critic(sao_steps(sao_rows(), binding))
    assert refused.value.steps_taken == 0
