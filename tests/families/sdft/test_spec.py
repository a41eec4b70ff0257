"""What sdft declares: its defaults, the report it learns from, and what its teacher reads."""

from dataclasses import replace

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.batching import ReportView
from atoll.families.divergence_spec import DistillationSpec, DivergenceKind, DivergenceSpec, Estimator, ImportanceLevel
from atoll.families.samples import RowContext
from atoll.families.sdft import SdftFamily, SdftOptions
from atoll.families.sdft.spec import MAX_CONTEXT_LENGTH
from pydantic import JsonValue

from tests.fakes.tiny_actor import LetterRenderer
from tests.families.reported import reported
from tests.families.rows import make_report

FAMILY = SdftFamily(SdftOptions())


def report(**metadata: JsonValue) -> ReportView:
    return replace(make_report("r", score=None), metadata=metadata)


def test_the_defaults_are_the_papers() -> None:
    options = FAMILY.options
    assert options.distillation_spec() == DistillationSpec(
        DivergenceSpec(DivergenceKind.FORWARD), Estimator.FULL, 2.0, ImportanceLevel.SEQUENCE
    )
    assert (options.teacher.value, options.teacher_update_rate, options.skip_response_tokens) == ("self", 0.01, 0)


def test_single_reports_with_a_context_are_batches() -> None:
    rule = FAMILY.batching
    rule.validate(report(teacher_context="an example answer"))
    assert rule.form([make_report("b", at=2), make_report("a", at=1)]) == [("a",), ("b",)]
    assert SdftFamily(SdftOptions(batch_size=2)).batching.form([make_report("b"), make_report("a")]) == [("a", "b")]


@pytest.mark.parametrize("context", [None, "", 7, ["x"], "x" * (MAX_CONTEXT_LENGTH + 1)])
def test_a_report_without_a_context_is_refused(context: JsonValue) -> None:
    refuse(report() if context is None else report(teacher_context=context), "metadata.teacher_context")


def test_a_report_about_several_samples_or_none_is_refused() -> None:
    good = report(teacher_context="x")
    refuse(replace(good, receipts=()), "receipts")
    refuse(replace(good, receipts=("a", "b")), "receipts")
    refuse(replace(good, score=float("nan")), "score")


def refuse(report: ReportView, field: str) -> None:
    with pytest.raises(InvalidInput, match=field) as caught:
        FAMILY.batching.validate(report)
    assert caught.value.field == field
    assert caught.value.reason == errors_pb2.REASON_REPORT_REFUSED


def test_the_teacher_reads_the_request_with_the_context_and_the_response_word_for_word() -> None:
    item = reported("a", metadata={"teacher_context": "hint"})
    request: dict[str, JsonValue] = {"messages": [{"role": "user", "content": "q"}]}
    item = replace(item, sample=replace(item.sample, request=request))
    row = FAMILY.shape_sample_row(item, RowContext((item,), LetterRenderer(50)))
    expected = [ord(letter) % 50 for letter in "q\n\nhint"]
    assert row.columns["teacher_tokens"].tolist() == [*expected, 3, 4, 5]
    assert row.columns["sample_weight"].tolist() == [1.0]
    assert row.tokens.tolist() == [1, 2, 3, 4, 5]
