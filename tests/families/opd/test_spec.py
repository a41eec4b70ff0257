"""What opd declares: its defaults, that the teacher reads what the student read, and the refusal of stale samples."""

from dataclasses import replace

import pytest
from atoll.common.errors import InvalidInput
from atoll.families.divergence_spec import DistillationSpec, DivergenceKind, DivergenceSpec, Estimator
from atoll.families.opd import OpdFamily, OpdOptions
from atoll.families.policy_spec import PolicyGradientWeight
from atoll.families.run_settings import RunSettings
from atoll.families.samples import RowContext

from tests.families.reported import reported
from tests.families.rows import make_report

RUN = RunSettings(vocab_size=50, seq_length=64)
FAMILY = OpdFamily(OpdOptions())


def test_the_defaults_are_the_sampled_reverse_kl_to_a_separate_teacher() -> None:
    options = FAMILY.options
    assert options.distillation_spec() == DistillationSpec(DivergenceSpec(DivergenceKind.REVERSE), Estimator.SAMPLED)
    assert (options.teacher.value, options.top_k, options.teacher_update_rate) == ("separate", 1, 0.0)
    assert FAMILY.policy_gradient_weight(RUN) == PolicyGradientWeight.none()
    assert not FAMILY.needs_prompt_renderer


def test_the_teacher_reads_the_students_own_sequence() -> None:
    item = reported("a", score=None)
    row = FAMILY.shape_sample_row(item, RowContext((item,)))
    assert row.columns["teacher_tokens"].tolist() == row.tokens.tolist()


def test_reports_need_no_score_and_are_taken_oldest_first() -> None:
    rule = OpdFamily(OpdOptions(batch_size=2)).batching
    rule.validate(make_report("a", score=None))
    assert rule.form([make_report("b", at=2), make_report("a", at=1), make_report("c", at=3)]) == [("a", "b")]
    with pytest.raises(InvalidInput, match="receipts: at most 1 expected, got 2"):
        rule.validate(make_report("a", receipts=("x", "y")))
    with pytest.raises(InvalidInput, match="receipts: at least one expected"):
        rule.validate(make_report("a", receipts=()))


def test_stale_samples_without_importance_weights_are_refused() -> None:
    stale = replace(RUN, max_staleness=1)
    with pytest.raises(InvalidInput, match=r"run: opd: importance_sampling_cap 0 is refused with max_staleness 1"):
        FAMILY.validate_specific_args(stale, "run")
    OpdFamily(OpdOptions(importance_sampling_cap=2.0)).validate_specific_args(stale, "run")
    FAMILY.validate_specific_args(RUN, "run")
