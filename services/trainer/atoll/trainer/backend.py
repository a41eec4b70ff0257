"""What the driver asks of a training backend, whichever framework computes.

```
load -> log_probs | train* -> stage -> (driver commits) -> train* ...
          any failure: BackendCrashed, the workers are gone -> load starts them again
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, InvalidInput
from atoll.families.rows import Float32, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import TrainStep
from pydantic import JsonValue


class BackendCrashed(AtollError):
    """Raised when a worker died, raised, or was late. No worker is left; weights in memory are lost."""

    def __init__(self, rank: int, what: str, log_tail: str) -> None:
        tail = f"; its last log lines:\n{log_tail}" if log_tail else "; it logged nothing"
        super().__init__(f"trainer worker rank {rank} {what}{tail}", reason=errors_pb2.REASON_TRAINING_CRASHED)
        self.rank = rank
        self.what = what
        self.log_tail = log_tail


class StepRefused(InvalidInput):
    """Raised when a step's numbers are not finite: nothing was applied in that step and the workers live on.

    ``steps_taken`` optimizer steps of the job came before it and are in the weights: reload unless it is 0.
    """

    def __init__(self, message: str, sample_ids: tuple[str, ...], steps_taken: int) -> None:
        super().__init__(message, field="rows", reason=errors_pb2.REASON_BATCH_REFUSED, sample_ids=sample_ids)
        self.steps_taken = steps_taken


@dataclass(frozen=True)
class FamilyBinding:
    """The family of a job, as every worker resolves it for itself.

    Example: ``FamilyBinding("atoll.families.grpo.spec:Grpo", {"eps_clip": 0.2}, RunSettings(1100, 4096))``
    """

    reference: str
    options: Mapping[str, JsonValue]
    run: RunSettings


@dataclass(frozen=True)
class Loaded:
    """What a `TrainingBackend.load` found.

    Example: ``Loaded(steps_taken=12, driver_state=b'{"family": {}}')``
    """

    steps_taken: int
    """Optimizer steps behind the loaded optimizer state; 0 when only weights were loaded."""
    driver_state: bytes | None
    """What the driver gave to `TrainingBackend.stage`; None when only weights were loaded."""


@dataclass(frozen=True)
class StepReport:
    """A job's training.

    Example: ``StepReport(({"loss": 0.1, "grad_norm": 0.7},), {"train": 1.4, "old_log_probs": 0.0})``
    """

    metrics: tuple[Mapping[str, float], ...]
    """For each optimizer step."""
    seconds: Mapping[str, float]
    """Wall time of each phase, of the slowest rank."""


class TrainingBackend(Protocol):
    """The actor's weights and optimizer, on however many workers. One call at a time; `kill` from any thread.

    Every method may raise `BackendCrashed`.
    """

    def load(
        self,
        model_directory: Path,
        checkpoint_directory: Path | None,
        reference_directory: Path | None,
        *,
        weights_from_model: bool = False,
    ) -> Loaded:
        """Take weights from a model directory, then all that a checkpoint holds, starting the workers when needed.

        With a checkpoint its weights replace those of ``model_directory``, which still gives config and tokenizer;
        with ``weights_from_model`` the actor keeps the directory's weights and takes the rest, moments included, from
        the checkpoint of an earlier version. ``reference_directory`` holds the frozen reference model, read when a job
        first needs it. Raises `InvalidInput` naming what the backend does not support.
        """
        ...

    def check_family(self, family: FamilyBinding) -> None:
        """Resolve a family with its hooks in every worker, before the first job that brings it.

        Raises `InvalidInput` naming what is missing; nothing is lost.
        """
        ...

    def log_probs(self, rows: Sequence[Row]) -> list[Float32]:
        """Per row, float32 [R]: log softmax(logits / T) of the response tokens at the row's temperature T."""
        ...

    def train(self, family: FamilyBinding, steps: Sequence[TrainStep], learning_rates: Sequence[float]) -> StepReport:
        """Take one optimizer step for each entry of ``steps``, at its learning rate.

        Raises `StepRefused` when a loss or gradient is not finite, naming the samples.
        """
        ...

    def steps_taken(self) -> int:
        """Optimizer steps of the actor behind its present weights: those of the checkpoint and all since."""
        ...

    def compute_advantages(self, family: FamilyBinding, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        """The same steps with what the family's `custom_advantage_function` makes of all their rows at once.

        Where the family has a critic, rows also get its ``values`` and their ``returns``. No weight moves. Raises
        `InvalidInput` for what the family refuses.
        """
        ...

    def train_critic(self, family: FamilyBinding, steps: Sequence[TrainStep]) -> StepReport:
        """Take one optimizer step of the critic for each entry of ``steps``, as the family's `CriticSpec` says.

        The critic starts from the reference model with the first job that needs one, and is part of every later
        checkpoint. Raises `StepRefused`; its ``steps_taken`` are the critic's.
        """
        ...

    def stage(self, model_directory: Path | None, checkpoint_directory: Path | None, driver_state: bytes) -> None:
        """Write a model export, a checkpoint, or both; a directory that is named must not exist.

        Equal weights give equal bytes. The checkpoint holds weights, optimizer, critic, weights that the family keeps,
        random-number states and ``driver_state`` as it is given. Files are complete but not synced when this returns.
        Raises `OSError` (ENOSPC where the disk is full, before or while it writes): nothing was written, the weights in
        memory are as they were, and staging may be tried again.
        """
        ...

    def healthy(self) -> bool:
        """Whether the workers run and have a model."""
        ...

    def kill(self) -> None:
        """Kill the workers now; a call in progress raises `BackendCrashed`."""
        ...

    def close(self) -> None:
        """Stop the workers for good. Idempotent."""
        ...
