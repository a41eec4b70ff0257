"""A family that learns from two earlier selves and, where one is named, from another model."""

from typing import ClassVar

from atoll.families.batching import BatchingRule
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.options import FamilyOptions
from atoll.families.rows import Batch, ColumnDtype, ColumnOrigin, ColumnSpec
from atoll.families.signal import FamilyState, StepSignal
from atoll.families.singleton import Singleton

FIRST = "first_log_probs"
SLOW = "slow_log_probs"
OTHER = "other_log_probs"


class TaughtOptions(FamilyOptions):
    """Options of the test's family."""

    rate: float = 0.25
    other_model: str | None = None


class TaughtFamily(LossFamily[TaughtOptions]):
    """Squared distance to what the first weights, their moving average and another model say."""

    name: ClassVar[str] = "taught"
    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.FORBIDDEN
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset(
        {HookChannel.LOSS, HookChannel.ACTOR_INIT, HookChannel.ACTOR_PRE_TRAIN}
    )
    Options: ClassVar[type[FamilyOptions]] = TaughtOptions
    columns: ClassVar[tuple[ColumnSpec, ...]] = tuple(
        ColumnSpec(name, ColumnDtype.FLOAT32, ColumnOrigin.WORKER, response_aligned=True)
        for name in (FIRST, SLOW, OTHER)
    )

    @property
    def batching(self) -> BatchingRule:
        return Singleton()

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        return StepSignal(None, {}, state)
