"""One rank of the Megatron backend: the object that a worker process serves. Every method is a collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.common.errors import AtollError, InvalidInput
from atoll.families.rows import Float32, Row
from atoll.families.steps import TrainRow
from atoll.trainer.backend import FamilyBinding, Loaded, StepReport
from atoll.trainer.megatron import jobs
from atoll.trainer.megatron.actor import MegatronActor
from atoll.trainer.megatron.architecture import read_architecture
from atoll.trainer.megatron.checkpoint import (
    CheckpointParts,
    load_checkpoint,
    read_contents,
    save_checkpoint,
    warm_up_saving,
)
from atoll.trainer.megatron.critic import train_critic
from atoll.trainer.megatron.groups import join_groups
from atoll.trainer.megatron.hf_files import read_companions, write_export
from atoll.trainer.megatron.objective import Objective
from atoll.trainer.megatron.parameters import gather_weights
from atoll.trainer.megatron.passes import response_log_probs
from atoll.trainer.megatron.rank_model import RankModel
from atoll.trainer.megatron.refusals import FamilyRefused
from atoll.trainer.megatron.settings import MegatronSettings
from atoll.trainer.megatron.training import MicroBatches, PhaseClock
from atoll.trainer.megatron.weight_sets import WeightSets
from atoll.trainer.megatron.writing import Writing
from atoll.trainer.workers.group import WorkerPlace

_STATE_COPIES = 3
"""Numbers that a checkpoint holds for each weight of a trained model: itself and two moments."""


class MegatronRank:
    """Holds this rank's shard of the weights and of the optimizer, and of the critic's where a family has one.

    Built by a worker process from its place and the settings; see `atoll.trainer.backend.TrainingBackend` for what
    the methods do together.
    """

    def __init__(self, place: WorkerPlace, settings: MegatronSettings, collective_timeout_s: float) -> None:
        self._place = place
        self._settings = settings
        self._member = join_groups(place, settings, collective_timeout_s)
        self._model: RankModel | None = None
        self._critic: RankModel | None = None
        self._critic_in_use = False
        """A critic that is not starts afresh from the base weights with the next job that needs it."""
        self._sets = WeightSets()
        self._companions: dict[str, bytes] = {}
        self._base_directory: Path | None = None
        """Weights that a new critic starts from."""
        self._initialized: set[str] = set()
        """Families that have trained since the load, whose `actor_init_hook` has run."""
        warm_up_saving(place.scratch)

    def load(
        self,
        model_directory: Path,
        checkpoint_directory: Path | None,
        base_directory: Path | None,
        weights_from_model: bool = False,
    ) -> Loaded:
        """Weights and a fresh optimizer, or everything from a checkpoint; a new critic starts from the base's."""
        architecture = read_architecture(model_directory)
        if self._model is None or self._model.architecture != architecture:
            self._model = RankModel.build(architecture, self._settings, self._member)
            self._critic, self._sets = None, WeightSets()
        self._companions = read_companions(model_directory)
        self._base_directory = base_directory or model_directory
        self._critic_in_use, self._initialized = False, set()
        # The directories of a family's teachers are read again: another family may give their names to others.
        self._sets.read = {name: each for name, each in self._sets.read.items() if name == jobs.REFERENCE}
        if checkpoint_directory is None:
            self._sets.kept = {}
            self._model.start_from(model_directory)
            return Loaded(0, None)
        contents = read_contents(checkpoint_directory)
        self._sets.allocate(contents.weights, self._model)
        if contents.critic is not None:
            self._critic = self._critic or RankModel.build(architecture, self._settings, self._member, contents.critic)
            self._critic_in_use = True
        driver_state = load_checkpoint(checkpoint_directory, self._parts(self._model))
        if weights_from_model:
            self._model.take_weights(model_directory)
        return Loaded(self._model.optimizer.steps_taken(), driver_state)

    def check_family(self, binding: FamilyBinding) -> None:
        """Resolves a family and its hooks. Raises `FamilyRefused`: every rank has the same packages."""
        try:
            self._objective(binding)
        except AtollError as error:
            raise FamilyRefused(error.message, "family") from error

    def steps_taken(self) -> int:
        """Steps that the actor's optimizer has counted; every rank counts the same."""
        return self._loaded().optimizer.steps_taken()

    def log_probs(self, rows: Sequence[Row]) -> list[Float32]:
        """float32 [R] of this rank's rows, in their order; empty on all but one rank of a copy of the model."""
        model = self._loaded()
        limit = self._settings.micro_batch
        found = response_log_probs(model.responses, rows, model.shard, self._member, limit)
        return [each.numpy() for each in found] if self._member.speaks else []

    def compute_advantages(self, binding: FamilyBinding, rows: Sequence[TrainRow]) -> list[jobs.Computed]:
        """What the family computes of this rank's rows, in their order; empty on all but one rank of a copy."""
        model = self._loaded()
        objective = self._objective(binding)
        critic = self._critic_of(model, objective)
        self._read_reference(model, objective)
        limit = self._settings.micro_batch
        with _refusals_told():
            found = jobs.compute_advantages(model, critic, self._sets, objective, rows, self._member, limit)
        return found if self._member.speaks else []

    def train(
        self, binding: FamilyBinding, steps: Sequence[MicroBatches], learning_rates: Sequence[float]
    ) -> StepReport:
        """Take the optimizer steps of a job on this rank's rows.

        Raises `NotFinite` and `FamilyRefused` on every rank.
        """
        model = self._loaded()
        objective = self._objective(binding)
        limit, clock = self._settings.micro_batch, PhaseClock()
        actor = MegatronActor(model, self._sets, objective, self._member, limit)
        with _refusals_told(), self._sets.kept_if_trained():
            init = objective.function.hooks.actor_init
            if init is not None and objective.name not in self._initialized:
                init(actor)
            self._read_reference(model, objective)
            metrics = jobs.train_actor(
                model, self._sets, objective, actor, steps, learning_rates, self._member, limit, clock
            )
            self._initialized.add(objective.name)
        return StepReport(tuple(metrics), clock.seconds)

    def train_critic(self, binding: FamilyBinding, steps: Sequence[MicroBatches]) -> StepReport:
        """Take optimizer steps of the critic on this rank's rows. Raises `NotFinite` on every rank."""
        objective, clock = self._objective(binding), PhaseClock()
        critic = self._critic_of(self._loaded(), objective)
        if critic is None or objective.needs.critic is None:
            raise ValueError(f"loss family {objective.name} asks for no critic")
        metrics = train_critic(critic, objective, objective.needs.critic, steps, self._member, clock)
        return StepReport(tuple(metrics), clock.seconds)

    def stage(self, model_directory: Path | None, checkpoint_directory: Path | None, driver_state: bytes) -> None:
        """Write an export, a checkpoint, or both. Raises `WriteFailed` on every rank."""
        model = self._loaded()
        if model_directory is not None:
            weights, writing = gather_weights(model.module, model.architecture), Writing()
            if self._place.rank == 0:
                with writing.attempt(model_directory):  # all gathers are over before it writes
                    write_export(self._companions, model_directory, weights)
            else:
                for _ in weights:  # takes part in the gathers
                    pass
            writing.agree()
        if checkpoint_directory is not None:
            save_checkpoint(checkpoint_directory, self._parts(model), driver_state)

    def checkpoint_copies(self) -> int:
        """How many times the weights a checkpoint would hold."""
        return _STATE_COPIES * (2 if self._critic_in_use else 1) + len(self._sets.kept)

    def _parts(self, model: RankModel) -> CheckpointParts:
        return CheckpointParts(model, self._critic if self._critic_in_use else None, self._sets)

    def _objective(self, binding: FamilyBinding) -> Objective:
        return Objective(binding, self._loaded().shard, self._member)

    def _critic_of(self, model: RankModel, objective: Objective) -> RankModel | None:
        spec = objective.needs.critic
        if spec is None:
            return None
        if self._critic is None:
            self._critic = RankModel.build(model.architecture, self._settings, self._member, spec)
        if not self._critic_in_use:
            if self._base_directory is None:
                raise RuntimeError("no model is loaded; call load first")
            self._critic.start_from(self._base_directory)
            self._critic_in_use = True
        return self._critic

    def _read_reference(self, model: RankModel, objective: Objective) -> None:
        if objective.needs.reference_log_probs:
            if self._base_directory is None:
                raise RuntimeError("no reference model was given to load")
            self._sets.keep_directory(jobs.REFERENCE, self._base_directory, model)

    def _loaded(self) -> RankModel:
        if self._model is None:
            raise RuntimeError("no model is loaded; call load first")
        return self._model


@contextmanager
def _refusals_told() -> Iterator[None]:
    """What a hook refuses is refused on every rank: hooks decide by what all ranks have."""
    try:
        yield
    except InvalidInput as refusal:
        raise FamilyRefused(refusal.message, refusal.field) from refusal
