"""Families of another package, as jobs bring them to a run."""

from typing import ClassVar

import numpy as np
from atoll.common.errors import InternalError
from atoll.families.batching import BatchingRule
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.options import FamilyOptions
from atoll.families.rows import Batch, ColumnDtype, ColumnSpec
from atoll.families.sao.row import ACTION_MASK
from atoll.families.signal import FamilyState, StepSignal
from atoll.families.singleton import Singleton


class CountingOptions(FamilyOptions):
    """Options of the test's families."""

    batch_size: int = 2


class CountingFamily(LossFamily[CountingOptions]):
    """The stock policy loss with the score as the advantage; remembers how many jobs it had."""

    name: ClassVar[str] = "counting"
    loss_type: ClassVar[LossType] = LossType.POLICY_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.REQUIRED
    Options: ClassVar[type[FamilyOptions]] = CountingOptions

    @property
    def batching(self) -> BatchingRule:
        return Singleton(batch_size=self.options.batch_size)

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        jobs = state.get("jobs", 0)
        assert isinstance(jobs, int)
        advantages = tuple(np.full(row.response_length, row.reward, dtype=np.float32) for row in batch.rows)
        return StepSignal(advantages, {"jobs": float(jobs)}, {"jobs": jobs + 1})


class ClashingFamily(CountingFamily):
    """Declares a wire key of sao with another element type."""

    name: ClassVar[str] = "clashing"
    columns: ClassVar[tuple[ColumnSpec, ...]] = (ColumnSpec(ACTION_MASK, ColumnDtype.FLOAT32, response_aligned=True),)


class BrokenFamily(CountingFamily):
    """Its own defect, told with a sample's id in it."""

    name: ClassVar[str] = "broken"

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        raise InternalError(f"no answer for sample {batch.rows[0].sample_id}")


class HooklessFamily(CountingFamily):
    """Declares a hook that its module does not have."""

    name: ClassVar[str] = "bareone"
    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.LOSS})
    objective_module: ClassVar[str | None] = "tests.trainer.worker_support"
