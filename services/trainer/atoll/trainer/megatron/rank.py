"""One rank of the Megatron backend: the object that a worker process serves. Every method is a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Float32, Row
from atoll.trainer.backend import FamilyBinding, Loaded, StepReport
from atoll.trainer.megatron.architecture import Architecture, read_architecture
from atoll.trainer.megatron.checkpoint import load_checkpoint, save_checkpoint, warm_up_saving
from atoll.trainer.megatron.forward import ResponseModel
from atoll.trainer.megatron.groups import join_groups
from atoll.trainer.megatron.hf_files import HfWeights, read_companions, write_export
from atoll.trainer.megatron.model import build_model, padded_vocabulary
from atoll.trainer.megatron.objective import Objective
from atoll.trainer.megatron.optimizer import StepOptimizer, wrap_for_data_parallel
from atoll.trainer.megatron.parameters import gather_weights, load_weights
from atoll.trainer.megatron.reference import FrozenWeights
from atoll.trainer.megatron.settings import MegatronSettings
from atoll.trainer.megatron.training import MicroBatches, PhaseClock, StepInputs, forward_log_probs, take_step
from atoll.trainer.workers.group import WorkerPlace
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

LogProbs = list[list[list[Tensor]]]
"""By optimizer step, micro-batch and row."""


@dataclass
class _Model:
    """What `MegatronRank.load` builds once and later loads overwrite."""

    architecture: Architecture
    padded_vocab: int
    shard: VocabShard
    module: GPTModel
    wrapped: DistributedDataParallel
    responses: ResponseModel
    optimizer: StepOptimizer
    companions: dict[str, bytes]


class MegatronRank:
    """Holds this rank's shard of the weights and of the optimizer.

    Built by a worker process from its place and the settings; see `atoll.trainer.backend.TrainingBackend` for what
    the methods do together.
    """

    def __init__(self, place: WorkerPlace, settings: MegatronSettings, collective_timeout_s: float) -> None:
        self._place = place
        self._settings = settings
        self._device = join_groups(place, settings, collective_timeout_s)
        self._model: _Model | None = None
        self._reference_directory: Path | None = None
        self._reference: FrozenWeights | None = None
        warm_up_saving()

    def load(self, model_directory: Path, checkpoint_directory: Path | None) -> Loaded:
        """Weights and a fresh optimizer, or everything from a checkpoint."""
        architecture = read_architecture(model_directory)
        if self._model is None or self._model.architecture != architecture:
            self._model, self._reference = self._build(architecture), None
        model = self._model
        model.companions = read_companions(model_directory)
        if checkpoint_directory is not None:
            driver_state = load_checkpoint(checkpoint_directory, model.module, model.optimizer)
            return Loaded(model.optimizer.steps_taken(), driver_state)
        load_weights(model.module, architecture, model.padded_vocab, HfWeights(model_directory).read)
        model.optimizer.reset()
        return Loaded(0, None)

    def set_reference(self, directory: Path | None) -> None:
        """Where the frozen reference weights are; they are read when a job first needs them."""
        if directory != self._reference_directory:
            self._reference_directory, self._reference = directory, None

    def log_probs(self, micro_batches: Sequence[Sequence[Row]]) -> list[Float32]:
        """float32 [R] of this rank's rows, in their order; empty on all but one rank of a copy of the model."""
        model = self._loaded()
        found = forward_log_probs(model.responses, micro_batches, model.shard, self._device)
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return []
        return [log_probs.float().cpu().numpy() for rows in found for log_probs in rows]

    def train(
        self, binding: FamilyBinding, steps: Sequence[MicroBatches], learning_rates: Sequence[float]
    ) -> StepReport:
        """Take the optimizer steps of a job on this rank's rows. Raises `NotFinite` on every rank."""
        model = self._loaded()
        objective = Objective(binding, model.shard, self._device)
        clock = PhaseClock()
        old: LogProbs | None = None
        ref: LogProbs | None = None
        # Before a job's only step the current log-probs are the old ones: the loss takes them from its own forward.
        if objective.needs.old_log_probs and len(steps) > 1:
            with clock.phase("old_log_probs"):
                old = [self._log_probs_of(model, step) for step in steps]
        if objective.needs.reference_log_probs:
            with clock.phase("reference_log_probs"), self._frozen_reference(model).in_place_of(model.module):
                ref = [self._log_probs_of(model, step) for step in steps]
        metrics = []
        for number, (step, rate) in enumerate(zip(steps, learning_rates, strict=True)):
            inputs = StepInputs(step, _of_step(old, number), _of_step(ref, number), rate)
            metrics.append(take_step(model.responses, model.optimizer, objective, inputs, number, clock, self._device))
        return StepReport(tuple(metrics), clock.seconds)

    def stage(self, model_directory: Path | None, checkpoint_directory: Path | None, driver_state: bytes) -> None:
        """Write an export, a checkpoint, or both."""
        model = self._loaded()
        if model_directory is not None:
            weights = gather_weights(model.module, model.architecture)
            if self._place.rank == 0:
                write_export(model.companions, model_directory, weights)
            else:
                for _ in weights:  # takes part in the gathers
                    pass
        if checkpoint_directory is not None:
            save_checkpoint(checkpoint_directory, model.module, model.optimizer, driver_state)

    def _build(self, architecture: Architecture) -> _Model:
        module = build_model(architecture, self._settings, self._device)
        wrapped = wrap_for_data_parallel(module)
        return _Model(
            architecture=architecture,
            padded_vocab=padded_vocabulary(architecture, self._settings),
            shard=self._shard(architecture.vocab_size),
            module=module,
            wrapped=wrapped,
            responses=ResponseModel(wrapped),
            optimizer=StepOptimizer(wrapped, self._settings.optimizer),
            companions={},
        )

    def _shard(self, vocab_size: int) -> VocabShard:
        if self._settings.layout.tensor == 1:
            return VocabShard(vocab_size)
        return VocabShard(
            vocab_size,
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_rank(),
            self._settings.layout.tensor,
        )

    def _log_probs_of(self, model: _Model, step: MicroBatches) -> list[list[Tensor]]:
        rows = [[item.row for item in micro_batch] for micro_batch in step]
        return forward_log_probs(model.responses, rows, model.shard, self._device)

    def _frozen_reference(self, model: _Model) -> FrozenWeights:
        if self._reference is None:
            if self._reference_directory is None:
                raise RuntimeError("no reference model was given to load")
            self._reference = FrozenWeights(self._reference_directory, model.architecture, model.padded_vocab)
        return self._reference

    def _loaded(self) -> _Model:
        if self._model is None:
            raise RuntimeError("no model is loaded; call load first")
        return self._model


def _of_step(log_probs: LogProbs | None, number: int) -> list[list[Tensor]] | None:
    return None if log_probs is None else log_probs[number]
