"""What sft declares: any report will do, and each of the four aggregations."""

import math

import pytest
from atoll.common.errors import InvalidInput
from atoll.families.aggregation import AggregationMode
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import RowContext
from atoll.families.sft import SftFamily, SftOptions
from atoll.families.steps import build_train_steps

from tests.families.reported import reported
from tests.families.rows import make_batch, make_report

FAMILY = SftFamily(SftOptions(batch_size=2))


def test_reports_without_a_score_and_of_several_receipts_are_taken() -> None:
    rule = FAMILY.batching
    rule.validate(make_report("a", score=None))
    rule.validate(make_report("b", receipts=("x", "y")))
    assert rule.form([make_report("b", at=1), make_report("a"), make_report("c", at=2)]) == [("a", "b")]


@pytest.mark.parametrize(
    ("score", "receipts", "field"), [(math.nan, ("a",), "score"), (math.inf, ("a",), "score"), (None, (), "receipts")]
)
def test_bad_reports_are_refused(score: float | None, receipts: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        FAMILY.batching.validate(make_report("a", score=score, receipts=receipts))
    assert caught.value.field == field


def test_a_report_without_a_score_becomes_a_row_of_reward_zero() -> None:
    items = (reported("a", score=None), reported("b", score=0.5))
    rows = [FAMILY.shape_sample_row(item, RowContext(items)) for item in items]
    assert [row.reward for row in rows] == [0.0, 0.5]
    batch = make_batch(*rows)
    (step,) = build_train_steps(FAMILY, batch, FAMILY.prepare(batch, {"kept": 1}))
    assert [item.advantages for item in step.rows] == [None, None]
    assert FAMILY.prepare(batch, {"kept": 1}).new_state == {"kept": 1}


def test_nothing_but_the_model_is_needed() -> None:
    assert FAMILY.configure_backend(RunSettings(10, 16)) == BackendNeeds()
    assert not FAMILY.requires_rollout_log_probs


def test_a_report_is_a_prompt_group_of_its_own() -> None:
    family = SftFamily(SftOptions(loss_aggregation=AggregationMode.PROMPT_MEAN))
    assert family.aggregation().group_size == 1
    with pytest.raises(InvalidInput, match="sft has no option eps_clip"):
        SftFamily.from_options({"eps_clip": 0.1})
