"""The masked ratio against plain floats, its strict bounds to the last bit, and advantages from the critic's values."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from atoll.families.catalog import make_family
from atoll.families.losses.actor import RolloutData
from atoll.families.losses.loss_function import LossFunction
from atoll.families.run_settings import HookArgs
from atoll.families.sao import SaoOptions
from atoll.families.sao.objective import sao_loss
from atoll.families.sao.row import ACTION_MASK
from pydantic import JsonValue
from torch import Tensor

from tests.families.family_steps import RUN, Answer, FamilyStep, equal, make_step
from tests.families.sao.test_gae import plain_gae

RATIOS = (1.0, 1.0, 0.5, 6.5, 5.9, 0.71, 0.2, 3.0)
"""Of the eight tokens; the second is masked. Bounds: 0.7 and 6.0."""
ADVANTAGES = (1.0, 5.0, -1.0, 2.0, -2.0, 1.5, 1.0, -1.0)
OPTIONS: dict[str, JsonValue] = {"eps_clip": 0.3, "eps_clip_high": 5.0}


def step(**options: JsonValue) -> FamilyStep:
    return make_step(
        make_family("sao", OPTIONS | options),
        ratios=RATIOS,
        advantages=ADVANTAGES,
        columns=lambda _number, row: {ACTION_MASK: np.ones(row.response_length, dtype=np.uint8)},
    )


def plain(of: FamilyStep, mutant: str = "") -> tuple[float, Tensor]:
    """sum_t w_t (-f(r_t) A_t l_t) and its gradient, in plain floats; mutants: how one gets it wrong."""
    weights = [item.weights.policy for item in of.rows for _ in range(item.row.response_length)]
    masks = [int(kept) for item in of.rows for kept in item.mask]
    recorded = [float(value) for item in of.rows for value in item.row.rollout_log_probs]
    loss, slopes = 0.0, []
    for t, ((_, target, _), level) in enumerate(zip(of.places(), of.levels(), strict=True)):
        ratio = math.exp(level - recorded[t])
        kept = 0.7 < ratio < 6.0
        if mutant == "upper bound left out":
            kept = ratio > 0.7
        if mutant == "lower bound left out":
            kept = ratio < 6.0
        if mutant == "upper bound off by one":
            kept = 0.7 < ratio < 5.0
        factor = ratio if kept else 0.0
        if mutant == "clamp in place of a mask":
            factor = min(max(ratio, 0.7), 6.0)
        if mutant == "no importance weight":
            factor = 1.0 if kept else 0.0
        mean = 1 / len(weights) if mutant == "mean in place of a sum" else 1.0
        slope = -weights[t] * mean * factor * ADVANTAGES[t] * (1 if mutant == "loss mask ignored" else masks[t])
        loss += slope * level
        slopes.append({target: slope})
    return loss, of.gradient(slopes)


@pytest.mark.parametrize("mode", ["sample_mean", "token_mean", "prompt_mean", "constant"])
def test_value_and_gradient_equal_the_oracle(mode: str) -> None:
    of = step(loss_aggregation=mode, loss_aggregation_divisor=7 if mode == "constant" else None)
    got = of.answer()
    assert equal(got, *plain(of))
    assert got.bad_rows == [False] * 3


@pytest.mark.parametrize(
    "mutant",
    [
        "upper bound left out",
        "lower bound left out",
        "upper bound off by one",
        "clamp in place of a mask",
        "no importance weight",
        "mean in place of a sum",
        "loss mask ignored",
    ],
)
def test_the_comparison_finds_every_mutant(mutant: str) -> None:
    of = step()
    assert not equal(of.answer(), *plain(of, mutant))


def test_the_clip_fraction_counts_trained_tokens_outside_the_bounds() -> None:
    # Of the rollouts' trained tokens: 2 of 3, 0 of 1, 1 of 3 are outside.
    assert step().answer().metrics["pg_clipfrac"] == pytest.approx((2 / 3 + 0 + 1 / 3) / 3)


def test_on_policy_nothing_is_clipped() -> None:
    of = make_step(make_family("sao", {"eps_clip": 1e-4, "eps_clip_high": 1e-4}), advantages=ADVANTAGES)
    of = replace(
        of,
        rows=tuple(
            replace(item, columns={ACTION_MASK: np.ones(item.row.response_length, dtype=np.uint8)}) for item in of.rows
        ),
    )
    assert of.answer().metrics["pg_clipfrac"] == 0


@pytest.mark.parametrize(("nudge", "clipped"), [(0.0, [1.0, 1.0]), (1e-6, [0.0, 0.0])])
def test_a_ratio_on_a_bound_is_outside(nudge: float, clipped: list[float]) -> None:
    ppo_kl = torch.tensor([0.4, -1.1])
    lower, upper = (-ppo_kl).exp().tolist()  # what the loss computes, to the last bit
    options = SaoOptions(eps_clip=1 - lower + nudge, eps_clip_high=upper - 1 + nudge)
    losses, outside = sao_loss(HookArgs(options, RUN), ppo_kl, torch.tensor([-1.0, -1.0]), torch.ones(2))
    assert outside.tolist() == clipped
    assert (losses == 0).tolist() == [flag == 1 for flag in clipped]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["rollout_log_probs", "advantages"])
def test_a_masked_input_that_is_not_finite_changes_nothing(name: str, poison: float) -> None:
    of = step()
    clean = of.answer()
    batch = of.batch()
    values = {"rollout_log_probs": batch.rollout_log_probs, "advantages": batch.advantages}[name]
    assert values is not None
    assert same(of.answer(**{name: values.masked_fill(~batch.mask, poison)}), clean)
    place = (batch.row_of_token == 2) & batch.mask
    assert of.answer(**{name: values.masked_fill(place, poison)}).bad_rows == [False, False, True]


def same(got: Answer, clean: Answer) -> bool:
    return got.loss == clean.loss and torch.equal(got.gradient, clean.gradient) and not any(got.bad_rows)


def test_a_ratio_beyond_float32_is_clipped_and_not_nan() -> None:
    of = step()
    got = of.answer(rollout_log_probs=of.batch().rollout_log_probs - 200)
    assert got.loss == 0
    assert bool((got.gradient == 0).all())
    assert got.metrics["clipped_tokens"] == got.metrics["trained_tokens"] == 7


VALUES = [[0.1, 0.2, 0.3, 0.4], [0.5], [0.6, math.nan, 0.8]]
ACTIONS = [[1, 1, 1, 1], [1], [1, 0, 1]]


def computed(**options: JsonValue) -> list[tuple[list[float], list[float]]]:
    """(advantages, returns) of each row from the hook."""
    of = step(gamma=0.9, **options)
    rows = [
        replace(item, columns={ACTION_MASK: np.asarray(actions, dtype=np.uint8)})
        for item, actions in zip(of.rows, ACTIONS, strict=True)
    ]
    data = RolloutData(rows, values=[torch.tensor(values) for values in VALUES])
    filled = LossFunction(of.family, RUN).advantages(data)
    pairs = []
    for item in filled:
        assert item.advantages is not None
        assert item.returns is not None
        assert item.values is not None
        pairs.append((item.advantages.tolist(), item.returns.tolist()))
    return pairs


def test_actor_and_critic_have_a_lambda_each() -> None:
    first, second, third = computed(gae_lambda=0.8, critic_lambda=0.5)
    assert first[0] == pytest.approx(plain_gae(VALUES[0], 1.0, 0.9, 0.8), rel=1e-6)
    of_critic = plain_gae(VALUES[0], 1.0, 0.9, 0.5)
    assert first[1] == pytest.approx([a + v for a, v in zip(of_critic, VALUES[0], strict=True)], rel=1e-6)
    assert second == ([0.5], [1.0])
    expected = plain_gae([0.6, 0.8], 1.0, 0.9, 0.8)
    assert third[0] == pytest.approx([expected[0], 0.0, expected[1]], rel=1e-6)
    assert third[1][1] == 0


def test_the_adaptive_lambda_counts_observations_and_is_never_the_critics() -> None:
    _, _, third = computed(length_adaptive_lambda=True)
    lam = 1 - 1 / (1.5 * 3)
    expected = plain_gae([0.6, 0.8], 1.0, 0.9, lam)
    assert third[0] == pytest.approx([expected[0], 0.0, expected[1]], rel=1e-6)
    assert third[1] == pytest.approx([0.9, 0.0, 1.0], rel=1e-6)


def test_without_values_there_are_no_advantages() -> None:
    of = step()
    with pytest.raises(ValueError, match="from the critic's values, and there are none"):
        LossFunction(of.family, RUN).advantages(RolloutData(of.rows))
