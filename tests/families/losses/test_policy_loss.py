"""The stock policy loss against the plain-float oracle, value and gradient, on every number of shards."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.policy_loss import clipped_surrogate, kl_estimate, policy_loss
from atoll.families.losses.vocab import VocabShard
from atoll.families.policy_spec import KlKind, OldPolicy, PolicyLossSpec
from torch import Tensor

from tests.families.cases import SHARDS, VOCAB, Case, case_gradient, make_case
from tests.families.oracle import Knobs, Mutant, Outcome, Token, log_prob, policy_step
from tests.families.ranks import on_shards

KNOBS: Mapping[str, Knobs] = {
    "plain": Knobs(),
    "asymmetric clip": Knobs(eps=0.1, eps_high=0.35),
    "dual clip": Knobs(dual=1.2),
    "truncated weights": Knobs(cap=1.3),
    "recorded is old": Knobs(rollout_is_old=True),
    "k1": Knobs(kl="k1", kl_coef=0.1),
    "k2": Knobs(kl="k2", kl_coef=0.1),
    "k3": Knobs(kl="k3", kl_coef=0.1),
    "low_var_kl": Knobs(kl="low_var_kl", kl_coef=0.1),
    "everything": Knobs(eps=0.15, eps_high=0.3, dual=1.2, cap=1.3, kl="k3", kl_coef=0.05, entropy_coef=0.02),
}


def spec_of(knobs: Knobs) -> PolicyLossSpec:
    return PolicyLossSpec(
        eps_clip=knobs.eps,
        eps_clip_high=knobs.eps_high,
        eps_clip_c=knobs.dual,
        tis_cap=knobs.cap,
        old_policy=OldPolicy.ROLLOUT if knobs.rollout_is_old else OldPolicy.RECOMPUTED,
        kl_coef=knobs.kl_coef,
        kl_kind=KlKind(knobs.kl),
        entropy_coef=knobs.entropy_coef,
    )


@dataclass(frozen=True)
class Answer:
    """Loss, metrics and the gradient of this rank's columns."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Tensor
    bad_rows: list[bool]


def answer(spec: PolicyLossSpec, batch: LossBatch, logits: Tensor) -> Answer:
    result = policy_loss(spec, batch, logits)
    torch.autograd.backward(result.loss)
    assert logits.grad is not None
    metrics = {name: value.item() for name, value in result.metrics.items()}
    return Answer(result.loss.item(), metrics, logits.grad, result.bad_rows.tolist())


def answer_on_one_shard(case: Case, spec: PolicyLossSpec = PolicyLossSpec(), **changes: Any) -> Answer:  # noqa: B008
    shard = VocabShard(VOCAB)
    return answer(spec, replace(case.batch(shard), **changes), case.columns(1, 0, padding=math.nan))


def all_answers(shard: VocabShard) -> dict[tuple[str, torch.dtype], Answer]:
    """Runs on each rank."""
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(dtype=dtype)
        for name, knobs in KNOBS.items():
            logits = case.columns(shard.size, shard.rank, padding=math.nan)
            answers[name, dtype] = answer(spec_of(knobs), case.batch(shard), logits)
    return answers


def assert_equal(got: Answer, gradient: Tensor, want: Outcome, case: Case, dtype: torch.dtype) -> None:
    """1e-5 relative, of the loss and of the largest gradient entry; bfloat16 gradients are rounded to 8 bits."""
    assert got.loss == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
    expected = case_gradient(case, want.gradient)
    tolerance = (2.0**-8 if dtype is torch.bfloat16 else 1e-5) * float(expected.abs().max())
    assert float((gradient[:, :VOCAB].double() - expected).abs().max()) <= tolerance


@pytest.fixture(scope="module", params=SHARDS, ids="{} shards".format)
def answers(request: pytest.FixtureRequest) -> list[dict[tuple[str, torch.dtype], Answer]]:
    return on_shards(request.param, VOCAB, all_answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KNOBS)
def test_value_and_gradient_equal_the_oracle(
    answers: list[dict[tuple[str, torch.dtype], Answer]], name: str, dtype: torch.dtype
) -> None:
    case = make_case(dtype=dtype)
    want = policy_step(case.oracle_tokens(), KNOBS[name])
    gradient = torch.cat([rank[name, dtype].gradient for rank in answers], dim=1)
    for rank in answers:
        assert_equal(rank[name, dtype], gradient, want, case, dtype)
        assert rank[name, dtype].metrics == answers[0][name, dtype].metrics
    assert bool((gradient[:, VOCAB:] == 0).all())


MUTANT_KNOBS = Knobs(eps=0.15, eps_high=0.3, dual=1.2, cap=1.3, kl="k3", kl_coef=0.05, entropy_coef=0.02)


@pytest.mark.parametrize("mutant", Mutant)
def test_the_comparison_finds_every_mutant(mutant: Mutant) -> None:
    case = make_case(dtype=torch.float32)
    got = answer_on_one_shard(case, spec_of(MUTANT_KNOBS))
    assert_equal(got, got.gradient, policy_step(case.oracle_tokens(), MUTANT_KNOBS), case, torch.float32)
    with pytest.raises(AssertionError):
        assert_equal(got, got.gradient, policy_step(case.oracle_tokens(), MUTANT_KNOBS, mutant), case, torch.float32)


def test_without_old_log_probs_the_current_ones_are_the_old_ones() -> None:
    case = make_case(dtype=torch.float32)
    got = answer_on_one_shard(case, old_log_probs=None)
    want = policy_step([replace(token, old=None) for token in case.oracle_tokens()], Knobs())
    assert_equal(got, got.gradient, want, case, torch.float32)
    assert got.metrics["pg_clipfrac"] == 0
    assert got.metrics["ppo_kl"] == 0


def test_dual_clip_gives_the_known_values() -> None:
    ratio, advantages = torch.tensor([2.0, 2.0, 0.5]), torch.tensor([2.0, -2.0, 2.0])
    losses, clipped = clipped_surrogate(PolicyLossSpec(eps_clip_c=1.5))(-ratio.log(), ratio.log(), advantages)
    assert losses.tolist() == pytest.approx([-2.4, 3.0, -1.0])
    assert clipped.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (KlKind.K1, [3.0, -3.0]),
        (KlKind.K2, [4.5, 4.5]),
        (KlKind.K3, [math.exp(-3) + 2, math.exp(3) - 4]),
        (KlKind.LOW_VAR_KL, [math.exp(-3) + 2, 10.0]),
    ],
)
def test_kl_estimators_give_the_known_values(kind: KlKind, expected: list[float]) -> None:
    assert kl_estimate(torch.tensor([3.0, -3.0]), kind).tolist() == pytest.approx(expected, rel=1e-6)


def poisoned(values: Tensor, where: Tensor, poison: float) -> Tensor:
    return values.masked_fill(where, poison)


EVERYTHING = spec_of(KNOBS["everything"])
INPUTS = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", INPUTS)
def test_a_non_finite_input_under_the_mask_changes_neither_value_nor_gradient(name: str, poison: float) -> None:
    case = make_case(dtype=torch.float32)
    batch = case.batch(VocabShard(VOCAB))
    assert int((~batch.mask).sum()) == 2
    values: Tensor = getattr(batch, name)
    clean = answer_on_one_shard(case, EVERYTHING)
    got = answer_on_one_shard(case, EVERYTHING, **{name: poisoned(values, ~batch.mask, poison)})
    assert got.loss == clean.loss
    assert got.metrics == clean.metrics
    assert torch.equal(got.gradient, clean.gradient)
    assert not any(got.bad_rows)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_logits_under_the_mask_change_neither_value_nor_gradient(poison: float) -> None:
    case = make_case(dtype=torch.float32)
    masked = case.logit_rows[~case.batch(VocabShard(VOCAB)).mask]
    logits = case.logits.clone()
    logits[masked] = poison
    clean, got = answer_on_one_shard(case, EVERYTHING), answer_on_one_shard(replace(case, logits=logits), EVERYTHING)
    assert got.loss == clean.loss
    assert torch.equal(got.gradient, clean.gradient)
    assert not any(got.bad_rows)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", INPUTS)
def test_a_non_finite_input_of_a_trained_token_marks_its_row_and_raises_nothing(name: str, poison: float) -> None:
    case = make_case(dtype=torch.float32)
    batch = case.batch(VocabShard(VOCAB))
    place = (batch.row_of_token == 1) & batch.mask
    got = answer_on_one_shard(case, EVERYTHING, **{name: poisoned(getattr(batch, name), place, poison)})
    assert got.bad_rows == [False, True, False]


def test_recorded_log_probs_that_the_loss_does_not_read_mark_nothing() -> None:
    case = make_case(dtype=torch.float32)
    batch = case.batch(VocabShard(VOCAB))
    got = answer_on_one_shard(case, rollout_log_probs=torch.full_like(batch.rollout_log_probs, math.nan))
    assert not any(got.bad_rows)
    assert math.isfinite(got.loss)


def test_a_huge_ratio_has_a_finite_gradient() -> None:
    case = make_case(dtype=torch.float32)
    batch = case.batch(VocabShard(VOCAB))
    assert batch.old_log_probs is not None
    got = answer_on_one_shard(case, old_log_probs=batch.old_log_probs - 200)
    assert math.isfinite(got.loss)
    assert bool(got.gradient.isfinite().all())


def test_a_batch_without_rows_has_loss_zero_and_the_same_metrics() -> None:
    case = make_case(dtype=torch.float32)
    shard = VocabShard(VOCAB)
    empty = replace(case.batch(shard, rows=[0]), **_no_tokens())
    got = answer(spec_of(Knobs(cap=1.3)), empty, case.columns(1, 0, padding=0.0))
    assert got.loss == 0
    assert bool((got.gradient == 0).all())
    assert got.metrics.keys() == answer_on_one_shard(case, spec_of(Knobs(cap=1.3))).metrics.keys()
    assert set(got.metrics.values()) == {0.0}


def _no_tokens() -> dict[str, Any]:
    case = make_case(dtype=torch.float32)
    batch = case.batch(VocabShard(VOCAB))
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value[:0] for name, value in values.items() if isinstance(value, Tensor)}


def test_a_fully_masked_batch_has_loss_zero_and_gradient_zero() -> None:
    case = make_case(dtype=torch.float32)
    mask = torch.zeros(len(case.logit_rows), dtype=torch.bool)
    got = answer_on_one_shard(case, EVERYTHING, mask=mask)
    assert got.loss == 0
    assert bool((got.gradient == 0).all())


def test_everything_clipped_is_told_by_the_counts() -> None:
    case = make_case(dtype=torch.float32)
    batch = case.batch(VocabShard(VOCAB))
    assert batch.old_log_probs is not None
    got = answer_on_one_shard(case, old_log_probs=batch.old_log_probs - 5, advantages=torch.ones(len(case.logit_rows)))
    assert got.metrics["clipped_tokens"] == got.metrics["trained_tokens"] == 16
    assert bool((got.gradient == 0).all())


@pytest.mark.parametrize("cut", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]]])
def test_micro_batches_add_up_to_the_step(cut: list[list[int]]) -> None:
    case = make_case(dtype=torch.float32)
    whole = answer_on_one_shard(case, EVERYTHING)
    logits = case.columns(1, 0, padding=math.nan)
    loss, metrics = 0.0, dict.fromkeys(whole.metrics, 0.0)
    for rows in cut:
        result = policy_loss(EVERYTHING, case.batch(VocabShard(VOCAB), rows), logits)
        torch.autograd.backward(result.loss)
        loss += result.loss.item()
        metrics = {name: metrics[name] + value.item() for name, value in result.metrics.items()}
    assert loss == pytest.approx(whole.loss, rel=1e-9)
    assert metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(logits.grad, whole.gradient, rtol=1e-5, atol=1e-8)


def test_a_missing_input_is_refused() -> None:
    case = make_case(dtype=torch.float32)
    with pytest.raises(ValueError, match="needs advantages"):
        answer_on_one_shard(case, advantages=None)
    with pytest.raises(ValueError, match=r"kl_coef 0\.05 needs reference log-probs"):
        answer_on_one_shard(case, EVERYTHING, ref_log_probs=None)


def test_the_case_has_ratios_on_every_side_of_the_clip_for_both_signs() -> None:
    tokens: list[Token] = [token for token in make_case(dtype=torch.float32).oracle_tokens() if token.mask]
    sides = set()
    for token in tokens:
        assert token.old is not None
        ratio = math.exp(log_prob(token.logits, token.target, token.temperature) - token.old)
        sides.add((token.advantage > 0, "below" if ratio < 0.8 else "above" if ratio > 1.2 else "inside"))
    assert sides == {(sign, side) for sign in (True, False) for side in ("below", "inside", "above")}
