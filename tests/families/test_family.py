"""The defaults of the contract: what a family gets without saying anything, and the views of its columns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.aggregation import Aggregation
from atoll.families.driver import JobContext
from atoll.families.family import HookChannel, LossFamily, LossType
from atoll.families.grpo import GrpoFamily, GrpoOptions
from atoll.families.policy_spec import PolicyGradientWeight, WeightForm
from atoll.families.rows import ColumnDtype, ColumnOrigin, ColumnSpec, VersionSpan
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import ReportedSample, RowContext, SampleView
from atoll.families.steps import TrainStep

from tests.families.rows import make_batch, make_report, make_row

RUN = RunSettings(vocab_size=10, seq_length=16)
BATCH = make_batch(make_row("a"), make_row("b"))


class Wide(GrpoFamily):
    """grpo with extra columns; its name is grpo's, so it is never registered."""

    columns: ClassVar[tuple[ColumnSpec, ...]] = (
        ColumnSpec("action_mask", ColumnDtype.UINT8, response_aligned=True),
        ColumnSpec("teacher_tokens", ColumnDtype.INT32, in_loss_batch=False),
        ColumnSpec("age", ColumnDtype.FLOAT32, ColumnOrigin.DRIVER, logged=True),
    )


class Custom(GrpoFamily):
    loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS


class Plain(GrpoFamily):
    """Takes back what grpo says, to see the defaults."""

    policy_loss_spec = LossFamily.policy_loss_spec
    aggregation = LossFamily.aggregation
    schedule_steps = LossFamily.schedule_steps


def test_the_key_lists_are_views_of_the_columns() -> None:
    assert Wide.rollout_data_keys() == ("action_mask", "teacher_tokens", "age")
    assert Wide.rollout_tensor_dtypes() == {"action_mask": "uint8", "teacher_tokens": "int32", "age": "float32"}
    assert Wide.response_aligned_keys() == ("action_mask",)
    assert Wide.external_batch_keys() == ("action_mask", "age")
    assert Wide.rollout_log_skip_keys() == ("action_mask", "teacher_tokens")


def test_a_family_that_says_nothing_trains_one_actor_step_by_sample_mean() -> None:
    family = Plain(GrpoOptions(groups_per_optimizer_step=1))
    assert family.schedule_steps(BATCH).steps == ((0, 1),)
    assert family.aggregation() == Aggregation()
    assert family.effective_mask(BATCH.rows[0]) is BATCH.rows[0].loss_mask
    assert family.bind(RUN) is family
    context = JobContext("1:3", datetime(2026, 1, 1, tzinfo=UTC))
    assert family.prepare_rollout(BATCH, context) is BATCH
    assert family.rollout_metrics(BATCH, context) == {}
    assert family.policy_gradient_weight(RUN) is None
    family.validate_specific_args(RUN, "stack.yaml")


def test_a_custom_loss_asks_the_backend_for_nothing_by_default() -> None:
    family = Custom(GrpoOptions(kl_loss_coef=1.0, use_tis=True))
    assert family.configure_backend(RUN) == BackendNeeds()
    assert family.requires_rollout_log_probs is False


class Recording:
    """Worker groups that note what they were asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def train_actor(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        self.calls.append(("actor", len(steps)))
        return [{"loss": 0.5} for _ in steps]

    def train_critic(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        raise AssertionError("no critic here")

    def compute_advantages(self, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        raise AssertionError("prepare gave the advantages")


def test_the_default_orchestration_is_the_actor_alone() -> None:
    workers = Recording()
    assert GrpoFamily(GrpoOptions()).train(workers, [TrainStep(()), TrainStep(())]) == [{"loss": 0.5}] * 2
    assert workers.calls == [("actor", 2)]


class Adjusted(GrpoFamily):
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.ADVANTAGE})


def test_advantages_that_a_hook_changes_are_computed_before_the_actor_trains() -> None:
    class Computing(Recording):
        def compute_advantages(self, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
            self.calls.append(("advantages", len(steps)))
            return tuple(steps[:1])

    workers = Computing()
    assert Adjusted(GrpoOptions()).train(workers, [TrainStep(()), TrainStep(())]) == [{"loss": 0.5}]
    assert workers.calls == [("advantages", 2), ("actor", 1)]


def test_weights_of_the_sampled_token_name_their_form() -> None:
    assert PolicyGradientWeight.none() == PolicyGradientWeight(WeightForm.NONE)
    assert PolicyGradientWeight.truncated(2.0) == PolicyGradientWeight(WeightForm.TRUNCATED, None, 2.0)
    assert PolicyGradientWeight.masked(0.7, 6.0) == PolicyGradientWeight(WeightForm.MASKED, 0.7, 6.0)


def test_a_report_without_a_score_cannot_become_a_row() -> None:
    sample = SampleView(
        sample_id="s1",
        tokens=np.asarray([5, 6, 7], dtype=np.int32),
        prompt_length=2,
        loss_mask=np.ones(1, dtype=np.uint8),
        log_probs=np.zeros(1, dtype=np.float32),
        temperature=1.0,
        exact=True,
        versions=(VersionSpan(0, 1, "1:0"),),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    item = ReportedSample(sample, replace(make_report("r1"), score=None))
    with pytest.raises(InvalidInput, match="report r1: grpo needs a score") as caught:
        GrpoFamily(GrpoOptions()).shape_sample_row(item, RowContext((item,)))
    assert caught.value.field == "score"
