"""Score centering against dense float64 autograd: its term, its zeros, its full head, and the losses it corrects."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from atoll.families.catalog import AnyFamily, make_family
from atoll.families.losses.batch import LossBatch, build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.policy_loss import policy_loss
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.top_k import log_probs_at_top_ids
from atoll.families.losses.vocab import VocabShard
from atoll.families.policy_spec import PolicyGradientWeight, PolicyLossSpec
from atoll.families.run_settings import RunSettings
from atoll.families.sampler_heads import HEAD_IDS, HEAD_LOG_PROBS
from torch import Tensor

from tests.families.cases import SHARDS, VOCAB, make_case
from tests.families.external import external_package
from tests.families.losses.conftest import AnswersOf
from tests.families.losses.dense import Mutant, centering_term, weight_of
from tests.families.losses.kernel_cases import (
    CAP,
    DTYPES,
    WEIGHTS,
    Answer,
    K,
    assert_gradient,
    centering_answer,
    joined_gradient,
    log_policy,
    make_inputs,
    teacher_batch,
)

BOUNDS = {"none": (0.0, math.inf), "truncated": (0.0, CAP), "masked": (0.6, 1.7)}


def dense_term(form: str, dtype: torch.dtype, mutant: Mutant | None = None) -> tuple[float, Tensor]:
    case = make_case(dtype=dtype)
    batch = case.batch(VocabShard(VOCAB))
    assert batch.advantages is not None
    logits, log_p = log_policy(case, requires_grad=True)
    ids, log_q = make_inputs(case).engine_head
    lower, upper = BOUNDS[form]
    values = centering_term(
        log_p, ids, log_q.double(), batch.advantages.double(), form, lower=lower, upper=upper, mutant=mutant
    )
    term = (values * (batch.mask * batch.policy_weights)).sum()
    torch.autograd.backward(term)
    assert logits.grad is not None
    return term.item(), logits.grad


def assert_equal(got: Answer, gradient: Tensor, want: tuple[float, Tensor], dtype: torch.dtype) -> None:
    assert got.values.item() == pytest.approx(want[0], rel=1e-5)
    scale = float(want[1].abs().max())
    # Coefficients are differences of probabilities: float32 holds them to 1e-5 of the largest gradient entry.
    tolerance = (2.0**-8 if dtype is torch.bfloat16 else 1e-5) * scale
    assert float((gradient - want[1]).abs().max()) <= tolerance


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", WEIGHTS)
def test_term_and_gradient_equal_the_dense_ones(
    answers_of: AnswersOf, shards: int, dtype: torch.dtype, form: str
) -> None:
    ranks, key = answers_of(shards), f"centering {form} {dtype}"
    for rank in ranks:
        assert_equal(rank[key], joined_gradient(ranks, key), dense_term(form, dtype), dtype)
        assert rank[key].metrics == ranks[0][key].metrics


@pytest.mark.parametrize(
    ("mutant", "form"),
    [
        (Mutant.TAIL_RATIO_LEFT_OUT, "none"),
        (Mutant.COEFFICIENT_NOT_DETACHED, "none"),
        (Mutant.UPPER_BOUND_LEFT_OUT, "truncated"),
        (Mutant.UPPER_BOUND_LEFT_OUT, "masked"),
        (Mutant.CLAMP_IN_PLACE_OF_MASK, "masked"),
    ],
)
def test_the_comparison_finds_every_mutant(answers_of: AnswersOf, mutant: Mutant, form: str) -> None:
    ranks, key = answers_of(1), f"centering {form} torch.float32"
    with pytest.raises(AssertionError):
        assert_equal(ranks[0][key], joined_gradient(ranks, key), dense_term(form, torch.float32, mutant), torch.float32)


V = 40


def batch_of(advantages: Tensor, *, temperature: float, ids: Tensor, log_probs: Tensor) -> LossBatch:
    """One row of T trained tokens, each of policy weight 1/4, with a head."""
    n = len(advantages)
    return LossBatch(
        sample_ids=("s",),
        row_lengths=(n,),
        row_of_token=torch.zeros(n, dtype=torch.int64),
        tokens=torch.zeros(n, dtype=torch.int64),
        mask=torch.ones(n, dtype=torch.bool),
        temperatures=torch.full((n,), temperature),
        policy_weights=torch.full((n,), 0.25, dtype=torch.float64),
        regularizer_weights=torch.zeros(n, dtype=torch.float64),
        metric_weights=torch.full((n,), 1 / n, dtype=torch.float64),
        rollout_log_probs=torch.zeros(n),
        shard=VocabShard(V),
        advantages=advantages,
        columns={HEAD_IDS: ids.int(), HEAD_LOG_PROBS: log_probs},
    )


def small(
    engine_noise: float, form: str, k: int, *, weight: PolicyGradientWeight | None = None
) -> tuple[Answer, Tensor, Tensor]:
    """The term for 6 tokens of V ids and an engine that differs by noise; with log q and the advantages."""
    generator = torch.Generator().manual_seed(17)
    logits = torch.randn(6, 48, generator=generator)
    temperature = 0.7
    z = logits[:, :V].double() / temperature
    log_q = torch.log_softmax(z + engine_noise * torch.randn(6, V, generator=generator, dtype=torch.float64), -1)
    top = log_q.topk(k)
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.3, 1.5])
    batch = batch_of(advantages, temperature=temperature, ids=top.indices, log_probs=top.values.float())
    answer = centering_answer(ScoreCentering(weight or WEIGHTS[form], k), batch, logits.requires_grad_())
    return answer, log_q, advantages


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("k", [8, V])
def test_the_gradient_is_zero_when_the_engine_is_the_policy(form: str, k: int) -> None:
    answer, _, _ = small(0.0, form, k)
    assert float(answer.gradient.abs().max()) < 1e-6
    assert answer.metrics["score_centering_tail_ratio"] == pytest.approx(1, abs=1e-4)
    assert answer.metrics["score_centering_correction_l1"] < 1e-5
    perturbed, _, _ = small(0.5, form, k)
    assert float(perturbed.gradient.abs().max()) > 1e-2


@pytest.mark.parametrize("form", WEIGHTS)
def test_a_head_of_the_whole_vocabulary_gives_the_full_correction(form: str) -> None:
    """The expected score of the weighted loss under q, which the correction takes out: sum_v q f(p/q) grad log p."""
    answer, log_q, advantages = small(0.5, form, V)
    generator = torch.Generator().manual_seed(17)
    logits = torch.randn(6, 48, generator=generator).double().requires_grad_()
    log_p = torch.log_softmax(logits[:, :V] / 0.7, -1)
    weights = weight_of((log_p.detach() - log_q).exp(), form, *BOUNDS[form]) * log_q.exp()
    torch.autograd.backward((0.25 * advantages.double()[:, None] * weights * log_p).sum())
    assert logits.grad is not None
    assert_gradient(answer.gradient[:, :V].double(), logits.grad[:, :V], torch.float32)
    assert answer.metrics["score_centering_sampler_head_mass"] == pytest.approx(1, abs=1e-6)
    assert answer.metrics["score_centering_tail_clipped"] == pytest.approx(1)


@pytest.mark.parametrize(("shift", "lower", "upper"), [(-0.5, 1.0, 3.0), (0.5, 0.3, 1.0)])
def test_the_weight_is_strictly_inside_its_bounds(shift: float, lower: float, upper: float) -> None:
    """All but one entry of the head have a ratio of exactly 1, which is a bound: they weigh 0, and so does the tail."""
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(17))
    ids, ones = torch.arange(5)[None], torch.ones(1)
    log_p = log_probs_at_top_ids(logits, ids, ones, VocabShard(V))
    log_q = log_p.clone()
    log_q[0, 4] += shift
    batch = batch_of(torch.ones(1), temperature=1.0, ids=ids, log_probs=log_q)
    centering = ScoreCentering(PolicyGradientWeight.masked(lower, upper), 5)
    answer = centering_answer(centering, batch, logits.requires_grad_())
    assert answer.metrics["score_centering_correction_l1"] == pytest.approx(log_p[0, 4].exp().item(), rel=1e-5)


def test_metrics_say_how_much_of_both_distributions_the_head_holds() -> None:
    answer, log_q, _ = small(0.5, "none", 8)
    mass = log_q.topk(8).values.exp().sum(-1).mean().item()
    assert answer.metrics["score_centering_sampler_head_mass"] == pytest.approx(mass, rel=1e-5)
    assert answer.metrics["score_centering_term"] == answer.values.item()
    assert 0 < answer.metrics["score_centering_trainer_head_mass"] < 1
    assert answer.metrics["score_centering_tail_clipped"] == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_head_under_the_mask_changes_nothing_and_at_a_trained_token_marks_its_row(poison: float) -> None:
    case = make_case(dtype=torch.float32)
    logits = case.columns(1, 0, padding=math.nan)
    batch = teacher_batch(case, make_inputs(case), VocabShard(VOCAB), logits.shape[1])
    centering = ScoreCentering(WEIGHTS["masked"], K)
    clean = centering_answer(centering, batch, logits)

    def poisoned(where: Tensor) -> LossBatch:
        heads = batch.columns[HEAD_LOG_PROBS].masked_fill(where[:, None], poison)
        ids = batch.columns[HEAD_IDS].masked_fill((where & ~batch.mask)[:, None], -1)
        return replace(batch, columns={HEAD_IDS: ids, HEAD_LOG_PROBS: heads})

    got = centering_answer(centering, poisoned(~batch.mask), logits)
    assert torch.equal(got.gradient, clean.gradient)
    assert got.metrics == clean.metrics
    reduce = Reducer(poisoned(batch.mask & (batch.row_of_token == 0)))
    bad = poisoned(batch.mask & (batch.row_of_token == 0))
    assert bad.advantages is not None
    centering(bad, logits, reduce.neutral(bad.advantages), reduce)
    assert reduce.bad_rows.tolist() == [True, False, False]


def test_a_batch_without_heads_is_refused_and_one_without_rows_is_not() -> None:
    case = make_case(dtype=torch.float32)
    centering, logits = ScoreCentering(WEIGHTS["none"], K), case.columns(1, 0, padding=0.0)
    with pytest.raises(ValueError, match="needs the columns sampler_topk_ids"):
        centering_answer(centering, case.batch(VocabShard(VOCAB)), logits)
    empty = build_loss_batch([], shard=VocabShard(VOCAB), logit_rows=torch.zeros(0, dtype=torch.int64))
    empty = replace(empty, columns={HEAD_IDS: torch.zeros(0), HEAD_LOG_PROBS: torch.zeros(0)})
    got = centering_answer(centering, empty, logits)
    assert got.values.item() == 0
    assert bool((got.gradient == 0).all())


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyFamily]:
    """A family of another package on the pg-primitive lane, which declares the masked weight."""
    with external_package(Path(tmp_path_factory.mktemp("centered")), "centered") as reference:
        yield make_family(reference, {"lower": 0.6, "upper": 1.7})


def test_a_pg_primitive_family_is_corrected_inside_the_stock_loss(masked: AnyFamily) -> None:
    case = make_case(dtype=torch.float32)
    logits = case.columns(1, 0, padding=math.nan)
    batch = teacher_batch(case, make_inputs(case), VocabShard(VOCAB), logits.shape[1])
    run = RunSettings(vocab_size=VOCAB, seq_length=32)
    plain = LossFunction(masked, run)(batch, logits)
    result = LossFunction(masked, replace(run, score_centering=True, score_centering_top_k=K))(batch, logits)
    term = dense_term("masked", torch.float32)[0]
    assert (result.loss - plain.loss).item() == pytest.approx(term, rel=1e-5)
    assert result.metrics["loss"].item() == result.loss.item()
    assert result.metrics["score_centering_term"].item() == pytest.approx(term, rel=1e-5)


def test_the_stock_loss_takes_the_correction_too() -> None:
    case = make_case(dtype=torch.float32)
    logits = case.columns(1, 0, padding=math.nan)
    batch = teacher_batch(case, make_inputs(case), VocabShard(VOCAB), logits.shape[1])
    plain = policy_loss(PolicyLossSpec(), batch, logits)
    got = policy_loss(PolicyLossSpec(), batch, logits, centering=ScoreCentering(WEIGHTS["truncated"], K))
    assert (got.loss - plain.loss).item() == pytest.approx(dense_term("truncated", torch.float32)[0], rel=1e-5)


def test_a_run_without_the_correction_makes_none_and_one_with_it_needs_a_weight() -> None:
    run = RunSettings(vocab_size=VOCAB, seq_length=32)
    assert ScoreCentering.of_run(run, None) is None
    on = replace(run, score_centering=True, score_centering_top_k=7, score_centering_min_tail_mass=1e-4)
    weight = PolicyGradientWeight.none()
    assert ScoreCentering.of_run(on, weight) == ScoreCentering(weight, 7, 1e-4)
    with pytest.raises(ValueError, match="declares its policy-gradient weight"):
        ScoreCentering.of_run(on, None)
