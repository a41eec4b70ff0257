"""Settings of distillation: which estimator they mean, what contradicts itself, and what a run cannot train."""

from dataclasses import replace

import pytest
from atoll.common.errors import InvalidInput
from atoll.families.catalog import make_family
from atoll.families.distill.family import DistillFamily
from atoll.families.distill.options import DistillOptions, Teacher
from atoll.families.divergence_spec import (
    DistillationSpec,
    DivergenceKind,
    DivergenceSpec,
    Estimator,
    ImportanceLevel,
)
from atoll.families.policy_spec import PolicyGradientWeight
from atoll.families.run_settings import RunSettings
from pydantic import JsonValue

RUN = RunSettings(vocab_size=50, seq_length=64)
SAMPLED: dict[str, JsonValue] = {"divergence": "reverse", "top_k": 8, "top_k_distribution": "renormalized"}


def options(**values: JsonValue) -> DistillOptions:
    return DistillOptions.from_mapping("sdft", values)


@pytest.mark.parametrize(
    ("values", "estimator"),
    [
        ({}, Estimator.FULL),
        ({"divergence": "reverse"}, Estimator.FULL),
        ({"top_k": 5}, Estimator.RENORMALIZED),
        ({"top_k": 5, "divergence": "jsd"}, Estimator.RENORMALIZED),
        ({"top_k": 5, "divergence": "reverse"}, Estimator.SAMPLED),
        ({"top_k": 5, "divergence": "reverse", "top_k_distribution": "tail"}, Estimator.TAIL),
        ({"top_k": 5, "top_k_distribution": "tail"}, Estimator.TAIL),
    ],
)
def test_the_settings_name_an_estimator(values: dict[str, JsonValue], estimator: Estimator) -> None:
    assert options(**values).estimator is estimator


def test_only_a_divergence_over_ids_needs_the_students_forward() -> None:
    assert options(top_k=5, top_k_source="student").student_selects
    assert not options(top_k=5).student_selects
    assert not options(top_k_source="student").student_selects
    assert not options(**SAMPLED, top_k_source="student").student_selects


def test_the_loss_reads_the_settings() -> None:
    got = options(divergence="jsd", jsd_beta=0.2, importance_sampling_cap=2.0, importance_sampling_level="sequence")
    assert got.distillation_spec() == DistillationSpec(
        DivergenceSpec(DivergenceKind.JSD, 0.2), Estimator.FULL, 2.0, ImportanceLevel.SEQUENCE
    )
    assert options().distillation_spec().importance_cap is None


def test_only_the_sampled_reverse_kl_declares_a_weight() -> None:
    assert options(**SAMPLED).policy_gradient_weight() == PolicyGradientWeight.none()
    capped = options(**SAMPLED, importance_sampling_cap=2.0)
    assert capped.policy_gradient_weight() == PolicyGradientWeight.truncated(2.0)
    sequence = options(**SAMPLED, importance_sampling_cap=2.0, importance_sampling_level="sequence")
    assert sequence.policy_gradient_weight() is None
    for other in ({}, {"top_k": 5}, {**SAMPLED, "top_k_distribution": "tail"}, {"divergence": "jsd"}):
        assert options(**other).policy_gradient_weight() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": -1}, "top_k"),
        ({"jsd_beta": 0}, "jsd_beta"),
        ({"jsd_beta": 1}, "jsd_beta"),
        ({"teacher_update_rate": 1.1}, "teacher_update_rate"),
        ({"teacher_update_rate": -0.1}, "teacher_update_rate"),
        ({"importance_sampling_cap": -1}, "importance_sampling_cap"),
        ({"skip_response_tokens": -1}, "skip_response_tokens"),
        ({"divergence": "kl"}, "'forward', 'reverse' or 'jsd'"),
        ({"top_k_distribution": "tail"}, "tail needs top_k above 0"),
        ({"teacher_checkpoint": "/models/t"}, "teacher_checkpoint is for teacher separate"),
        ({"teacher": "separate", "teacher_update_rate": 0.1, "top_k": 5}, "a separate one is frozen"),
        ({"teacher": "separate"}, "top_k 0 needs the teacher's whole distribution"),
        ({"teacher": "separate", "top_k": 5, "top_k_source": "student"}, "which an engine does not give"),
        ({"loss_aggregation": "token_mean"}, "has no option loss_aggregation"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(values: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        options(**values)


def test_a_separate_teacher_is_a_checkpoint_or_an_engine() -> None:
    assert options(teacher="separate", top_k=5).from_engine
    assert not options(teacher="separate", teacher_checkpoint="/models/t").from_engine
    assert options(**SAMPLED, teacher="separate", top_k_source="student").teacher is Teacher.SEPARATE


@pytest.mark.parametrize(
    ("values", "run", "message"),
    [
        ({"top_k": 51}, RUN, "stack.yaml: sdft: top_k must be at most 50"),
        ({"top_k": 50, "top_k_distribution": "tail"}, RUN, "top_k must be at most 49"),
        ({"top_k": 5, "top_k_source": "student"}, replace(RUN, dropout=0.1), r"needs dropout 0, got 0\.1"),
        ({}, replace(RUN, score_centering=True), "must use the sampled reverse KL .* got divergence forward, top_k 0"),
        (
            {**SAMPLED, "importance_sampling_level": "sequence"},
            replace(RUN, score_centering=True),
            "importance_sampling_level sequence",
        ),
        (
            {**SAMPLED, "importance_sampling_cap": 0},
            replace(RUN, score_centering=True, score_centering_top_k=51),
            r"score_centering_top_k must be in \[1, 50\]",
        ),
    ],
)
def test_a_run_that_cannot_train_the_settings_is_refused(
    values: dict[str, JsonValue], run: RunSettings, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_family("sdft", values).validate_specific_args(run, "stack.yaml")


def test_runs_that_can_are_not() -> None:
    make_family("sdft", {"top_k": 50}).validate_specific_args(replace(RUN, dropout=0.1), "stack.yaml")
    make_family("sdft", {"top_k": 49, "top_k_distribution": "tail"}).validate_specific_args(RUN, "stack.yaml")
    centered = make_family("sdft", {**SAMPLED, "importance_sampling_level": "token"})
    centered.validate_specific_args(replace(RUN, score_centering=True, score_centering_top_k=8), "stack.yaml")


def test_the_student_selecting_ids_asks_for_zero_dropout() -> None:
    student = make_family("sdft", {"top_k": 5, "top_k_source": "student"})
    assert student.configure_backend(RUN).zero_dropout
    assert not make_family("sdft", {}).configure_backend(RUN).zero_dropout


def test_recorded_log_probs_are_required_exactly_with_importance_weights() -> None:
    assert make_family("sdft", {}).requires_rollout_log_probs
    assert not make_family("sdft", {"importance_sampling_cap": 0}).requires_rollout_log_probs


def test_columns_follow_the_estimator_and_heads_the_correction() -> None:
    def names(values: dict[str, JsonValue], run: RunSettings = RUN) -> list[str]:
        return [spec.name for spec in make_family("sdft", values).run_columns(run)]

    own = ["teacher_tokens", "sample_weight"]
    assert names({}) == [*own, "teacher_rows"]
    assert names({"top_k": 5}) == [*own, "distill_teacher_topk_ids", "distill_teacher_topk_log_probs"]
    assert names(SAMPLED) == [*own, "distill_teacher_sampled_log_probs"]
    heads = ["sampler_topk_ids", "sampler_topk_log_probs"]
    assert names(SAMPLED, replace(RUN, score_centering=True)) == [*own, *heads, "distill_teacher_sampled_log_probs"]


def test_the_base_itself_is_no_family() -> None:
    assert "name" not in vars(DistillFamily)
