"""What lifecycle hooks may do with the actor of a job, on this rank (`atoll.families.losses.actor.Actor`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.families.losses.actor import CURRENT_WEIGHTS, RolloutData, RowReader
from atoll.families.options import FamilyOptions
from atoll.families.run_settings import HookArgs
from atoll.families.steps import TrainRow
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.objective import Objective
from atoll.trainer.megatron.passes import Places, read_rows
from atoll.trainer.megatron.rank_model import RankModel
from atoll.trainer.megatron.settings import MicroBatchLimit
from atoll.trainer.megatron.weight_sets import WeightSets
from torch import Tensor


class MegatronActor:
    """Implements `Actor` for one job."""

    def __init__(
        self, model: RankModel, sets: WeightSets, objective: Objective, member: Membership, limit: MicroBatchLimit
    ) -> None:
        self._model = model
        self._sets = sets
        self._objective = objective
        self._member = member
        self._limit = limit
        self._averages: dict[str, float] = {}

    @property
    def args(self) -> HookArgs[FamilyOptions]:
        """See `Actor.args`."""
        return self._objective.args

    def has_weights(self, name: str) -> bool:
        """See `Actor.has_weights`."""
        return name in self._sets.kept

    def keep_weights(self, name: str) -> None:
        """See `Actor.keep_weights`."""
        self._sets.keep(name, self._model)

    def keep_checkpoint_weights(self, name: str, directory: str) -> None:
        """See `Actor.keep_checkpoint_weights`."""
        self._sets.keep_directory(name, Path(directory), self._model)

    def update_moving_average(self, name: str, rate: float) -> None:
        """See `Actor.update_moving_average`. Raises `ValueError` for a set that no hook has kept."""
        if name not in self._sets.kept:
            raise ValueError(f"weights {name!r}: expected one of the kept sets {sorted(self._sets.kept)}")
        self._averages[name] = rate

    def forward_rows(self, weights: str, rows: Sequence[TrainRow], read: RowReader) -> Sequence[Mapping[str, Tensor]]:
        """See `Actor.forward_rows`."""

        def read_batch(indices: Sequence[int], places: Places, logits: Tensor) -> Mapping[str, Tensor]:
            return read(self._objective.batch([rows[i] for i in indices], places), logits)

        def run() -> list[Mapping[str, Tensor]]:
            plain = [item.row for item in rows]
            return read_rows(self._model.responses, plain, read_batch, self._member, self._limit)

        if weights == CURRENT_WEIGHTS:
            return run()
        with self._sets.in_place(weights, self._model):
            return run()

    def prepare_step(self, step: Sequence[Sequence[TrainRow]]) -> Sequence[Sequence[TrainRow]]:
        """The step's micro-batches after `actor_pre_train_hook`. Raises `ValueError` when the hook loses rows."""
        self._averages = {}
        hook = self._objective.function.hooks.actor_pre_train
        if hook is None:
            return step
        data = RolloutData([item for rows in step for item in rows])
        expected = [item.row.sample_id for item in data.rows]
        hook(self, data)
        got = [item.row.sample_id for item in data.rows]
        if got != expected:
            raise ValueError(f"actor_pre_train_hook must leave the rows {expected} in place, got {got}")
        prepared = iter(data.rows)
        return [[next(prepared) for _ in rows] for rows in step]

    def step_taken(self) -> None:
        """The optimizer step that `prepare_step` prepared is in the weights: moving averages follow."""
        for name, rate in self._averages.items():
            self._sets.move_towards(name, self._model, rate)
        self._averages = {}
