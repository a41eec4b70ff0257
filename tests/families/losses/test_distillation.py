"""The distillation loss against dense float64 autograd: every estimator, every weight, every cut, on every layout."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from atoll.families.divergence_spec import (
    DistillationSpec,
    DivergenceKind,
    DivergenceSpec,
    Estimator,
    ImportanceLevel,
    TeacherColumn,
)
from atoll.families.losses.batch import LossBatch, build_loss_batch
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.vocab import VocabShard
from atoll.families.policy_spec import PolicyGradientWeight
from torch import Tensor

from tests.families.cases import SHARDS, VOCAB, make_case
from tests.families.losses.conftest import AnswersOf
from tests.families.losses.dense import Mutant, centering_term, dense_divergence, over_ids
from tests.families.losses.kernel_cases import (
    BETA,
    CAP,
    CENTERED,
    DISTILLATIONS,
    DTYPES,
    SAMPLE_WEIGHTS,
    WEIGHTS,
    Answer,
    K,
    batch_of_case,
    distillation_answer,
    joined_gradient,
    log_policy,
    make_inputs,
    teacher_batch,
    top_ids,
)


def dense_loss(
    spec: DistillationSpec, dtype: torch.dtype, mutant: Mutant | None = None, *, centered: str | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient [S, V]."""
    case = make_case(dtype=dtype)
    if mutant is Mutant.TEMPERATURE_LEFT_OUT:
        case = replace(case, rows=tuple(replace(r, row=replace(r.row, temperature=1.0)) for r in case.rows))
    inputs, batch = make_inputs(make_case(dtype=dtype)), case.batch(VocabShard(VOCAB))
    logits, student = log_policy(case, requires_grad=True)
    own = student.gather(1, batch.tokens[:, None])[:, 0]
    taught = inputs.teacher.gather(1, batch.tokens[:, None])[:, 0]
    kind, ids = spec.divergence.kind.value, top_ids(inputs.teacher)
    if mutant is Mutant.DIRECTION_SWAPPED:
        kind = {"forward": "reverse", "reverse": "forward"}[kind]
    beta = 1 - BETA if mutant is Mutant.BETA_SWAPPED else BETA
    if spec.estimator is Estimator.SAMPLED and mutant is not Mutant.RESTRICTED_IN_PLACE_OF_SAMPLED:
        gap = (own - taught).detach()
        values = (own - taught) if mutant is Mutant.SAMPLED_WITHOUT_SCORE else gap + gap * (own - own.detach())
    elif spec.estimator is Estimator.FULL:
        values = dense_divergence(student, torch.log_softmax(inputs.teacher_rows.double(), -1), kind, beta)
    else:
        name = "renormalized" if spec.estimator is Estimator.SAMPLED else spec.estimator.value
        restricted, teacher = (over_ids(rows, ids, name, mutant) for rows in (student, inputs.teacher))
        values = dense_divergence(restricted, teacher, kind, beta)
    weights = dense_importance(spec, batch, own, mutant)
    per_row = torch.tensor(SAMPLE_WEIGHTS, dtype=torch.float64)[batch.row_of_token]
    if mutant is Mutant.SAMPLE_WEIGHT_LEFT_OUT:
        per_row = torch.ones_like(per_row)
    total = values * weights * per_row
    if centered is not None:
        head_ids, head_log_q = inputs.engine_head
        advantages = (per_row * (taught - own)).detach()
        total = total + centering_term(student, head_ids, head_log_q.double(), advantages, centered, upper=CAP)
    if mutant is not Mutant.LOSS_MASK_IGNORED:
        total = total * batch.mask
    loss = (total * batch.policy_weights).sum()
    if mutant is Mutant.MEAN_IN_PLACE_OF_SUM:
        loss = loss / len(total)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    return loss.item(), logits.grad


def dense_importance(spec: DistillationSpec, batch: LossBatch, own: Tensor, mutant: Mutant | None) -> Tensor:
    if spec.importance_cap is None:
        return torch.ones_like(own)
    own = own if mutant is Mutant.WEIGHT_NOT_DETACHED else own.detach()
    ratios = (own - batch.rollout_log_probs.double()).exp()
    cap = {Mutant.CAP_LEFT_OUT: math.inf, Mutant.CAP_OFF: 1.05 * CAP}.get(mutant, CAP) if mutant else CAP
    weights = ratios.clamp(max=cap)
    if spec.importance_level is ImportanceLevel.TOKEN or mutant is Mutant.TOKEN_IN_PLACE_OF_SEQUENCE:
        return weights
    pieces = [weights[(batch.row_of_token == row) & batch.mask] for row in range(len(batch.sample_ids))]
    return torch.stack([piece.mean() for piece in pieces])[batch.row_of_token]


def assert_equal(got: Answer, gradient: Tensor, want: tuple[float, Tensor], dtype: torch.dtype) -> None:
    assert got.values.item() == pytest.approx(want[0], rel=1e-5)
    scale = float(want[1].abs().max())
    tolerance = (2.0**-8 if dtype is torch.bfloat16 else 1e-5) * scale
    assert float((gradient - want[1]).abs().max()) <= tolerance


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DISTILLATIONS)
def test_value_and_gradient_equal_the_dense_ones(
    answers_of: AnswersOf, shards: int, dtype: torch.dtype, name: str
) -> None:
    ranks, key = answers_of(shards), f"loss {name} {dtype}"
    want = dense_loss(DISTILLATIONS[name], dtype)
    for rank in ranks:
        assert_equal(rank[key], joined_gradient(ranks, key), want, dtype)
        assert rank[key].metrics == ranks[0][key].metrics


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CENTERED)
def test_the_centered_loss_equals_the_dense_one(
    answers_of: AnswersOf, shards: int, dtype: torch.dtype, name: str
) -> None:
    ranks, key = answers_of(shards), f"centered {name} {dtype}"
    want = dense_loss(DISTILLATIONS[name], dtype, centered=CENTERED[name])
    for rank in ranks:
        assert_equal(rank[key], joined_gradient(ranks, key), want, dtype)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (Mutant.MEAN_IN_PLACE_OF_SUM, "sampled"),
        (Mutant.TEMPERATURE_LEFT_OUT, "tail reverse"),
        (Mutant.DIRECTION_SWAPPED, "full reverse"),
        (Mutant.BETA_SWAPPED, "full jsd, token"),
        (Mutant.TAIL_LEFT_OUT, "tail reverse"),
        (Mutant.NOT_RENORMALIZED, "renormalized forward, sequence"),
        (Mutant.RESTRICTED_IN_PLACE_OF_SAMPLED, "sampled"),
        (Mutant.SAMPLED_WITHOUT_SCORE, "sampled"),
        (Mutant.CAP_LEFT_OUT, "sampled, token"),
        (Mutant.CAP_OFF, "tail jsd, token"),
        (Mutant.WEIGHT_NOT_DETACHED, "full forward, sequence"),
        (Mutant.TOKEN_IN_PLACE_OF_SEQUENCE, "full forward, sequence"),
        (Mutant.SAMPLE_WEIGHT_LEFT_OUT, "full forward, sequence"),
        (Mutant.LOSS_MASK_IGNORED, "sampled"),
    ],
)
def test_the_comparison_finds_every_mutant(answers_of: AnswersOf, mutant: Mutant, name: str) -> None:
    ranks, key = answers_of(1), f"loss {name} torch.float32"
    want = dense_loss(DISTILLATIONS[name], torch.float32, mutant)
    with pytest.raises(AssertionError):
        assert_equal(ranks[0][key], joined_gradient(ranks, key), want, torch.float32)


def one_shard(name: str, changes: Mapping[str, Tensor] | None = None, **fields: Tensor) -> tuple[Answer, list[bool]]:
    """The answer on one shard with some columns or fields of the batch changed."""
    case = make_case(dtype=torch.float32)
    logits = case.columns(1, 0, padding=math.nan)
    batch = teacher_batch(case, make_inputs(case), VocabShard(VOCAB), logits.shape[1])
    batch = replace(batch, columns={**batch.columns, **(changes or {})}, **fields)  # type: ignore[arg-type]
    centering = ScoreCentering(WEIGHTS[CENTERED[name]], K) if name in CENTERED else None
    return distillation_answer(DISTILLATIONS[name], batch, logits, centering)


READS = {
    "full forward, sequence": (TeacherColumn.ROWS,),
    "tail jsd, token": (TeacherColumn.TOP_K_LOG_PROBS,),
    "sampled, token": (TeacherColumn.SAMPLED, "sampler_topk_log_probs"),
}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", READS)
def test_a_non_finite_input_under_the_mask_changes_neither_value_nor_gradient(name: str, poison: float) -> None:
    batch = batch_of_case()
    masked = ~batch.mask
    changes = {
        column: batch.columns[column].masked_fill(masked.view(-1, *[1] * (batch.columns[column].ndim - 1)), poison)
        for column in READS[name]
    }
    changes[TeacherColumn.TOP_K_IDS] = batch.columns[TeacherColumn.TOP_K_IDS].masked_fill(masked[:, None], -1)
    changes["sampler_topk_ids"] = batch.columns["sampler_topk_ids"].masked_fill(masked[:, None], -1)
    recorded = batch.rollout_log_probs.masked_fill(masked, poison)
    clean, _ = one_shard(name)
    got, bad = one_shard(name, changes, rollout_log_probs=recorded)
    assert torch.equal(got.values, clean.values)
    assert torch.equal(got.gradient, clean.gradient)
    assert got.metrics == clean.metrics
    assert not any(bad)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", READS)
def test_a_non_finite_input_of_a_trained_token_marks_its_row(name: str, poison: float) -> None:
    batch = batch_of_case()
    place = (batch.row_of_token == 1) & batch.mask
    for column in READS[name]:
        shape = place.view(-1, *[1] * (batch.columns[column].ndim - 1))
        assert one_shard(name, {column: batch.columns[column].masked_fill(shape, poison)})[1] == [False, True, False]
    recorded = batch.rollout_log_probs.masked_fill(place, poison)
    assert one_shard(name, rollout_log_probs=recorded)[1] == [False, True, False]


def test_recorded_log_probs_are_not_read_without_importance_weights() -> None:
    recorded = torch.full_like(batch_of_case().rollout_log_probs, math.nan)
    assert not any(one_shard("full reverse", rollout_log_probs=recorded)[1])


def test_a_row_without_trained_tokens_adds_nothing_and_keeps_its_gradient_finite() -> None:
    batch = batch_of_case()
    mask = batch.mask & (batch.row_of_token != 2)
    got, bad = one_shard("full forward, sequence", mask=mask, row_trained_tokens=torch.tensor([8, 1, 0]))
    assert math.isfinite(got.values.item())
    assert not any(bad)
    case = make_case(dtype=torch.float32)
    assert bool((got.gradient[case.logit_rows[batch.row_of_token == 2]] == 0).all())


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_a_batch_without_rows_has_loss_zero_and_the_same_metrics(name: str) -> None:
    logits = torch.randn(1, 1152, requires_grad=True)
    batch = build_loss_batch([], shard=VocabShard(VOCAB), logit_rows=torch.zeros(0, dtype=torch.int64))
    batch = replace(batch, columns={"sampler_topk_ids": torch.zeros(0), "sampler_topk_log_probs": torch.zeros(0)})
    centering = ScoreCentering(PolicyGradientWeight.none(), K) if name in CENTERED else None
    got, _ = distillation_answer(DISTILLATIONS[name], batch, logits, centering)
    assert got.values.item() == 0
    assert bool((got.gradient == 0).all())
    assert got.metrics.keys() == one_shard(name)[0].metrics.keys()
    assert set(got.metrics.values()) == {0.0}


def test_a_column_that_the_teacher_did_not_fill_is_named() -> None:
    case = make_case(dtype=torch.float32)
    with pytest.raises(ValueError, match="needs the column teacher_rows"):
        distillation_answer(
            DISTILLATIONS["full reverse"], case.batch(VocabShard(VOCAB)), case.columns(1, 0, padding=0.0)
        )


def test_the_cap_bounds_every_weight_and_huge_ratios_stay_finite() -> None:
    recorded = batch_of_case().rollout_log_probs - 300
    got, _ = one_shard("tail jsd, token", rollout_log_probs=recorded)
    assert got.metrics["importance_clipfrac"] == pytest.approx(0.25 * 16)
    assert got.metrics["importance_weight"] == pytest.approx(0.25 * 16 * CAP, rel=1e-6)
    assert bool(got.gradient.isfinite().all())


def test_a_student_step_along_the_gradient_lowers_the_divergence() -> None:
    case = make_case(dtype=torch.float32)
    inputs = make_inputs(case)
    logits = case.columns(1, 0, padding=0.0)
    spec = DistillationSpec(DivergenceSpec(DivergenceKind.FORWARD), Estimator.FULL)
    batch = teacher_batch(case, inputs, VocabShard(VOCAB), logits.shape[1])
    found = []
    for _ in range(20):
        answer, _ = distillation_answer(spec, batch, logits)
        found.append(answer.metrics["divergence"])
        with torch.no_grad():
            logits -= 5 * answer.gradient
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]
