"""Both terms of openclawrl against plain floats, value and gradient."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from atoll.families.catalog import make_family
from atoll.families.openclawrl.spec import (
    HINT_LENGTHS,
    HINT_OVERLAP,
    HINT_TOKENS,
    SAMPLER_IDS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
)
from atoll.families.rows import Column, Row
from pydantic import JsonValue
from torch import Tensor

from tests.families import oracle
from tests.families.family_steps import TOKENS, FamilyStep, equal, make_step

ADVANTAGES = (1.0, 1.0, 1.0, 1.0, -1.0, 0.0, 0.0, 0.0)
SUBSETS = ((1, 4, 9), (2, 3, 5), (10, -1, 0), (-1, -1, -1), (6, 7, 8), (0, 1, -1), (3, -1, 4), (5, 6, 10))
"""Of the eight tokens: a whole one, a masked one, with gaps, and an empty one that still counts in the mean."""
TEACHER = tuple(tuple(-0.4 * (k + 1) - 0.3 * (t % 3) for k in range(3)) for t in range(TOKENS))


def columns(number: int, row: Row) -> dict[str, Column]:
    start = (0, 4, 5)[number]
    cut = slice(start, start + row.response_length)
    return {
        SAMPLER_IDS: np.zeros((row.response_length, 3), dtype=np.int32),
        HINT_TOKENS: np.zeros(0, dtype=np.int32),
        HINT_LENGTHS: np.zeros(0, dtype=np.int32),
        TEACHER_IDS: np.asarray(SUBSETS[cut], dtype=np.int32),
        TEACHER_LOG_PROBS: np.asarray(TEACHER[cut], dtype=np.float32),
        HINT_OVERLAP: np.full(row.response_length, 0.5, dtype=np.float32),
    }


def step(**options: JsonValue) -> FamilyStep:
    return make_step(make_family("openclawrl", {"top_k": 3, **options}), advantages=ADVANTAGES, columns=columns)


def plain(
    of: FamilyStep, *, w_rl: float = 1.0, w_opd: float = 1.0, clip: float = 1.0, mutant: str = ""
) -> tuple[float, Tensor]:
    """The on-policy step: ratios are 1, so each surrogate is -A with the slope -A."""
    weights = [item.weights.policy for item in of.rows for _ in range(item.row.response_length)]
    masks = [int(kept) for item in of.rows for kept in item.mask]
    loss, slopes = 0.0, []
    for t, (logits, target, temperature) in enumerate(of.places()):
        weight = weights[t] * (1 if mutant == "mask ignored" else masks[t])
        slope = {target: -w_rl * weight * ADVANTAGES[t]}
        loss -= w_rl * weight * ADVANTAGES[t]
        ids = [v for v in SUBSETS[t] if v >= 0]
        old = {v: oracle.log_prob(logits, v, temperature) for v in ids}
        total = math.fsum(math.exp(old[v]) for v in ids)
        for v in ids:
            share = math.exp(old[v]) / (1.0 if mutant == "not renormalized" else total)
            gap = TEACHER[t][SUBSETS[t].index(v)] - old[v]
            if clip and mutant != "gap not clipped":
                gap = min(max(gap, -clip), clip)
            advantage = gap * share
            if mutant == "mean over the subset":
                advantage /= len(ids)
            if mutant == "reversed":
                advantage = -advantage
            loss -= w_opd * weight * advantage
            if mutant != "value only":
                slope[v] = slope.get(v, 0.0) - w_opd * weight * advantage
        slopes.append(slope)
    return loss, of.gradient(slopes)


def test_value_and_gradient_equal_the_oracle() -> None:
    assert equal(step().answer(), *plain(step()))


@pytest.mark.parametrize(("w_rl", "w_opd", "clip"), [(0.0, 1.0, 1.0), (2.0, 0.5, 0.1), (1.0, 1.0, 0.0)])
def test_weights_and_clip_do_what_they_say(w_rl: float, w_opd: float, clip: float) -> None:
    of = step(w_rl=w_rl, w_opd=w_opd, adv_diff_clip=clip)
    assert equal(of.answer(), *plain(of, w_rl=w_rl, w_opd=w_opd, clip=clip))


@pytest.mark.parametrize("mode", ["token_mean", "prompt_mean", "constant"])
def test_every_aggregation_it_accepts_equals_the_oracle(mode: str) -> None:
    of = step(loss_aggregation=mode, loss_aggregation_divisor=7 if mode == "constant" else None)
    assert equal(of.answer(), *plain(of))


@pytest.mark.parametrize(
    "mutant",
    ["mask ignored", "not renormalized", "gap not clipped", "mean over the subset", "reversed", "value only"],
)
def test_the_comparison_finds_every_mutant(mutant: str) -> None:
    assert not equal(step().answer(), *plain(step(), mutant=mutant))


def test_the_reward_term_is_clipped_against_the_old_actor() -> None:
    of = step(w_opd=0.0, eps_clip=0.2, eps_clip_high=0.3)
    ratios = [1.5, 1.0, 0.5, 1.25, 0.5, 1.0, 1.0, 1.0]
    old = torch.tensor([level - math.log(ratio) for level, ratio in zip(of.levels(), ratios, strict=True)])
    weights = [item.weights.policy for item in of.rows for _ in range(item.row.response_length)]
    masks = [int(kept) for item in of.rows for kept in item.mask]
    loss, slopes = 0.0, []
    for t, (_, target, _) in enumerate(of.places()):
        free, bounded = -ADVANTAGES[t] * ratios[t], -ADVANTAGES[t] * min(max(ratios[t], 0.8), 1.3)
        loss += weights[t] * masks[t] * max(free, bounded)
        slopes.append({target: 0.0 if bounded > free else weights[t] * masks[t] * free})
    assert equal(of.answer(old_log_probs=old), loss, of.gradient(slopes))


def test_entropy_and_reference_terms_are_added_with_their_own_weights() -> None:
    plain_loss, plain_gradient = plain(step())
    of = step(entropy_coef=0.1, kl_loss_coef=0.2, kl_loss_type="k2")
    got = of.answer()
    batch = of.batch()
    assert batch.ref_log_probs is not None
    weights = (batch.regularizer_weights * batch.mask).tolist()
    loss = plain_loss
    extra = torch.zeros_like(plain_gradient)
    for t, (logits, _, temperature) in enumerate(of.places()):
        spread = oracle.entropy(logits, temperature)
        gap = of.levels()[t] - batch.ref_log_probs[t].item()
        loss += weights[t] * (0.2 * gap * gap / 2 - 0.1 * spread)
        p = oracle.softmax(logits, temperature)[1]
        extra[of.logit_rows[t]] = torch.tensor(
            [0.1 * weights[t] * q * (math.log(q) + spread) / temperature for q in p], dtype=torch.float64
        )
    slopes = [
        {target: 0.2 * weights[t] * (of.levels()[t] - batch.ref_log_probs[t].item())}
        for t, (_, target, _) in enumerate(of.places())
    ]
    assert equal(got, loss, plain_gradient + extra + of.gradient(slopes))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [TEACHER_LOG_PROBS, HINT_OVERLAP, "advantages"])
def test_a_masked_input_that_is_not_finite_changes_nothing(name: str, poison: float) -> None:
    of = step()
    clean, batch = of.answer(), of.batch()
    masked = ~batch.mask

    def poisoned(where: Tensor) -> dict[str, object]:
        if name == "advantages":
            assert batch.advantages is not None
            return {"advantages": batch.advantages.masked_fill(where, poison)}
        values = batch.columns[name]
        where = where.view(-1, *[1] * (values.ndim - 1))
        return {"columns": {**batch.columns, name: values.masked_fill(where, poison)}}

    got = of.answer(**poisoned(masked))
    assert got.loss == clean.loss
    assert torch.equal(got.gradient, clean.gradient)
    assert not any(got.bad_rows)
    if name != HINT_OVERLAP:
        assert of.answer(**poisoned(batch.row_of_token == 1)).bad_rows == [False, True, False]


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_place_without_an_id_is_never_read(poison: float) -> None:
    of = step()
    batch = of.batch()
    values = batch.columns[TEACHER_LOG_PROBS].masked_fill(batch.columns[TEACHER_IDS] < 0, poison)
    got = of.answer(columns={**batch.columns, TEACHER_LOG_PROBS: values})
    assert got.loss == of.answer().loss
    assert torch.equal(got.gradient, of.answer().gradient)
    assert not any(got.bad_rows)


def test_a_batch_without_rows_has_loss_zero_and_the_same_metrics() -> None:
    got = step().answer([])
    assert got.loss == 0
    assert got.metrics.keys() == step().answer().metrics.keys()


def test_a_missing_lesson_or_advantage_is_an_error() -> None:
    of = step()
    with pytest.raises(ValueError, match="needs the column teacher_subset_ids, which its pre-train hook"):
        of.answer(columns={})
    with pytest.raises(ValueError, match="openclawrl needs advantages"):
        of.answer(advantages=None)
    with pytest.raises(ValueError, match=r"kl_loss_coef 0\.1 needs reference log-probs"):
        replace(step(kl_loss_coef=0.1)).answer(ref_log_probs=None)
