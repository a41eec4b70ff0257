"""A training backend of three numbers: fast, deterministic, and it crashes when a test says so."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from atoll.families.rows import Float32, Row
from atoll.families.steps import TrainRow, TrainStep
from atoll.trainer.backend import BackendCrashed, FamilyBinding, Loaded, StepReport
from safetensors.numpy import load_file, save_file


class FakeBackend:
    """Weights are a list of three numbers; every optimizer step adds to them what depends on rows, rate and count.

    `before` maps a method's name to hooks, one for each call to come, that run before it does anything: they may raise.
    """

    def __init__(self) -> None:
        self.weights: list[float] | None = None
        self.count = 0
        self.loads: list[Path] = []
        self.trained_jobs = 0
        self.critic_steps = 0
        self.checked_families: list[str] = []
        self.trained_families: list[str] = []
        self.before: dict[str, list[Callable[[], None]]] = {}

    def load(
        self,
        model_directory: Path,
        checkpoint_directory: Path | None,
        reference_directory: Path | None,
        *,
        weights_from_model: bool = False,
    ) -> Loaded:
        self._run_hook("load")
        self.loads.append(model_directory)
        self.weights = read_weights(model_directory)
        self.count, state = 0, None
        if checkpoint_directory is not None:
            kept = json.loads((checkpoint_directory / "optimizer.json").read_text())
            self.count = kept["count"]
            self.weights = self.weights if weights_from_model else kept["weights"]
            state = (checkpoint_directory / "driver_state").read_bytes()
        return Loaded(self.count, state)

    def log_probs(self, rows: Sequence[Row]) -> list[Float32]:
        return [np.zeros(row.response_length, dtype=np.float32) for row in rows]

    def train(self, family: FamilyBinding, steps: Sequence[TrainStep], learning_rates: Sequence[float]) -> StepReport:
        self._run_hook("train")
        self.trained_families.append(family.reference)
        metrics: list[Mapping[str, float]] = []
        for number, (step, rate) in enumerate(zip(steps, learning_rates, strict=True)):
            assert self.weights is not None, "train before load"
            self.count += 1
            push = sum(row.weights.policy * float(row.row.tokens.sum()) for row in step.rows)
            self.weights = [w + rate * push * self.count for w in self.weights]
            metrics.append({"loss": push, "grad_norm": abs(push), "learning_rate": rate})
            if number == 0:
                self._run_hook("second_step")
        self.trained_jobs += 1
        return StepReport(tuple(metrics), {"forward_backward": 0.001})

    def check_family(self, family: FamilyBinding) -> None:
        self._run_hook("check_family")
        self.checked_families.append(family.reference)

    def steps_taken(self) -> int:
        return self.count

    def compute_advantages(self, family: FamilyBinding, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        self._run_hook("compute_advantages")
        return tuple(TrainStep(tuple(map(_with_ones, step.rows))) for step in steps)

    def train_critic(self, family: FamilyBinding, steps: Sequence[TrainStep]) -> StepReport:
        self._run_hook("train_critic")
        self.critic_steps += len(steps)
        return StepReport(({"loss": 1.0},) * len(steps), {"critic": 0.001})

    def stage(self, model_directory: Path | None, checkpoint_directory: Path | None, driver_state: bytes) -> None:
        self._run_hook("stage")
        if model_directory is not None:
            write_model(model_directory, self.weights)
        if checkpoint_directory is None:
            return
        checkpoint_directory.mkdir()
        kept = {"weights": self.weights, "count": self.count}
        (checkpoint_directory / "optimizer.json").write_text(json.dumps(kept))
        (checkpoint_directory / "driver_state").write_bytes(driver_state)

    def healthy(self) -> bool:
        return self.weights is not None

    def kill(self) -> None:
        self.weights = None

    def close(self) -> None:
        self.weights = None

    def crash(self) -> None:
        """A hook: the workers die."""
        self.weights = None
        raise BackendCrashed(0, "was ended by signal SIGKILL", "")

    def _run_hook(self, method: str) -> None:
        hooks = self.before.get(method)
        if hooks:
            hooks.pop(0)()


def write_model(directory: Path, weights: list[float] | None) -> None:
    """A model directory as FakeBackend reads it and the registry imports it; weights.json is for tests to read."""
    assert weights is not None, "stage before load"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1000, "model_type": "fake"}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "weights.json").write_text(json.dumps(weights))
    save_file({"weights": np.asarray(weights, dtype=np.float64)}, directory / "model.safetensors")


def read_weights(directory: Path) -> list[float]:
    """What `write_model` wrote, also of a model that the registry imported."""
    weights: list[float] = load_file(directory / "model.safetensors")["weights"].tolist()
    return weights


def _with_ones(item: TrainRow) -> TrainRow:
    ones = np.ones(item.row.response_length, dtype=np.float32)
    return replace(item, advantages=ones, values=0 * ones, returns=ones)
