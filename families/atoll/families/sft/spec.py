"""What sft declares: any report says that its samples are worth repeating; a score is read by nobody."""

from dataclasses import replace
from typing import ClassVar

from atoll.families.aggregation import Aggregation, AggregationOptions
from atoll.families.batching import BatchingRule
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.options import FamilyOptions
from atoll.families.rows import Batch, Row
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.signal import FamilyState, StepSignal
from atoll.families.singleton import Singleton
from pydantic import Field


class SftOptions(AggregationOptions):
    """Options of sft. Example: `{"batch_size": 8, "loss_aggregation": "token_mean"}`."""

    batch_size: int = Field(default=8, ge=1)
    """Reports in a batch, which is one optimizer step."""


class SftFamily(LossFamily[SftOptions]):
    """Masked cross-entropy of the recorded response."""

    name: ClassVar[str] = "sft"
    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.FORBIDDEN
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.LOSS})
    Options: ClassVar[type[FamilyOptions]] = SftOptions

    @property
    def batching(self) -> BatchingRule:
        return Singleton(batch_size=self.options.batch_size, score_required=False, max_receipts=None)

    def shape_sample_row(self, item: ReportedSample, context: RowContext) -> Row:
        """The default row; a report without a score has the reward 0, which only the log shows."""
        score = 0.0 if item.report.score is None else item.report.score
        return super().shape_sample_row(replace(item, report=replace(item.report, score=score)), context)

    def aggregation(self) -> Aggregation:
        """A report is a prompt group of its own, so `prompt_mean` is the mean over reports."""
        return self.options.aggregation(group_size=1)

    def prepare(self, batch: Batch, state: FamilyState) -> StepSignal:
        """Nothing to prepare: there are no advantages."""
        return StepSignal(None, {}, state)
