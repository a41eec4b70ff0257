"""What sdpo declares: its defaults, its grid, and whose attempt a teacher reads."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.batching import ReportView
from atoll.families.divergence_spec import DistillationSpec, DivergenceKind, DivergenceSpec, Estimator, ImportanceLevel
from atoll.families.rows import Row
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.sdpo import SdpoFamily, SdpoOptions
from atoll.families.steps import build_train_steps
from pydantic import JsonValue

from tests.fakes.tiny_actor import LetterRenderer
from tests.families.reported import reported
from tests.families.rows import make_batch

FAMILY = SdpoFamily(SdpoOptions(groups_per_step=2, rollouts_per_group=3))
VOCAB = 5000


def cell(group: int, rollout: int) -> dict[str, JsonValue]:
    return {"step": 0, "group": group, "rollout": rollout, "groups_per_step": 2, "rollouts_per_group": 3}


def attempt(group: int, rollout: int, score: float, text: str, feedback: JsonValue = None) -> ReportedSample:
    item = reported(f"{group}-{rollout}", score=score, metadata=cell(group, rollout))
    request: dict[str, JsonValue] = {"messages": [{"role": "user", "content": f"q{group}"}]}
    sample = replace(item.sample, request=request, text=text)
    return ReportedSample(sample, replace(item.report, feedback=feedback))


def rows_of(items: Sequence[ReportedSample], family: SdpoFamily = FAMILY) -> list[Row]:
    context = RowContext(tuple(items), LetterRenderer(VOCAB))
    return [family.shape_sample_row(item, context) for item in items]


def read(row: Row) -> str:
    """What the teacher reads before the response."""
    return "".join(chr(token) for token in row.columns["teacher_tokens"][: -row.response_length].tolist())


GROUP = [
    attempt(0, 0, 0.2, "wrong"),
    attempt(0, 1, 0.5, "<think>hm</think>first"),
    attempt(0, 2, 1.0, "second"),
    attempt(1, 0, 1.0, "alone"),
    attempt(1, 1, 0.49, "close"),
    attempt(1, 2, 0.0, "no"),
]


def test_the_defaults_are_the_papers() -> None:
    options = SdpoOptions()
    assert options.distillation_spec() == DistillationSpec(
        DivergenceSpec(DivergenceKind.JSD, 0.5), Estimator.TAIL, 2.0, ImportanceLevel.TOKEN
    )
    assert (options.top_k, options.top_k_source.value, options.teacher_update_rate) == (100, "student", 0.05)
    assert options.student_selects


def test_the_teacher_reads_the_first_correct_attempt_of_another_rollout_without_its_thinking() -> None:
    rows = rows_of(GROUP)
    assert "attempt:\n\nfirst\n\n" in read(rows[0])
    assert "attempt:\n\nsecond\n\n" in read(rows[1])
    assert "attempt:\n\nfirst\n\n" in read(rows[2])
    assert read(rows[0]).startswith("q0\n\n")
    assert "alone" in read(rows[4])
    assert "alone" in read(rows[5])
    assert [row.columns["teacher_tokens"][-3:].tolist() for row in rows] == [[3, 4, 5]] * 6


def test_a_rollout_that_nobody_can_teach_weighs_nothing_and_stays_in_the_mean() -> None:
    rows = rows_of(GROUP)
    assert [row.columns["sample_weight"].tolist() for row in rows] == [[1.0]] * 3 + [[0.0], [1.0], [1.0]]
    assert rows[3].columns["teacher_tokens"].tolist() == [1, 2, 3, 4, 5]
    batch = make_batch(*rows)
    signal = FAMILY.prepare(batch, {})
    assert signal.metrics == {"taught_rate": pytest.approx(5 / 6)}
    (step,) = build_train_steps(FAMILY, batch, signal)
    assert [item.weights.policy for item in step.rows] == pytest.approx([1 / 18] * 6)


def test_an_attempt_of_nothing_but_thinking_teaches_nobody() -> None:
    rows = rows_of([attempt(0, 0, 1.0, "<think>hm"), attempt(0, 1, 1.0, "yes"), attempt(0, 2, 0.0, "no")])
    assert "attempt:\n\nyes\n\n" in read(rows[2])
    assert rows[1].columns["sample_weight"].tolist() == [0.0]


def test_the_threshold_is_inclusive_and_an_option() -> None:
    strict = SdpoFamily(SdpoOptions(groups_per_step=2, rollouts_per_group=3, success_reward_threshold=0.6))
    assert "second" in read(rows_of(GROUP, strict)[0])


def test_feedback_is_read_where_it_is_asked_for() -> None:
    items = [attempt(0, 0, 0.0, "no", feedback=" off by one "), attempt(0, 1, 0.0, "no", feedback="")]
    assert [row.columns["sample_weight"].tolist() for row in rows_of(items)] == [[0.0], [0.0]]
    heard = SdpoFamily(SdpoOptions(groups_per_step=2, rollouts_per_group=3, use_feedback=True))
    rows = rows_of(items, heard)
    assert [row.columns["sample_weight"].tolist() for row in rows] == [[1.0], [0.0]]
    assert "attempt:\n\noff by one\n\n" in read(rows[0])


def test_the_grid_is_awaited_and_its_cells_are_checked() -> None:
    reports = [item.report for item in GROUP]
    assert FAMILY.batching.form(reports[:5]) == []
    assert FAMILY.batching.form(reports) == [("0-0", "0-1", "0-2", "1-0", "1-1", "1-2")]
    FAMILY.batching.validate(reports[0])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"score": None}, "score"),
        ({"receipts": ("a", "b")}, "receipts"),
        ({"metadata": {}}, "metadata.groups_per_step"),
        ({"metadata": {**cell(0, 0), "rollout": 3}}, "metadata.rollout"),
        ({"feedback": {"text": "x"}}, "feedback"),
    ],
)
def test_bad_reports_are_refused(change: dict[str, object], field: str) -> None:
    heard = SdpoFamily(SdpoOptions(groups_per_step=2, rollouts_per_group=3, use_feedback=True))
    report: ReportView = replace(GROUP[0].report, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=field) as caught:
        heard.batching.validate(report)
    assert caught.value.field == field
    assert caught.value.reason == errors_pb2.REASON_REPORT_REFUSED


def test_feedback_that_is_not_read_may_be_anything() -> None:
    FAMILY.batching.validate(replace(GROUP[0].report, feedback={"text": "x"}))
