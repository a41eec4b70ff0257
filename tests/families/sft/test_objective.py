"""Masked cross-entropy against plain floats."""

import math

import pytest
import torch
from atoll.families.catalog import make_family
from torch import Tensor

from tests.families.family_steps import FamilyStep, equal, make_step


def step(mode: str = "sample_mean") -> FamilyStep:
    divisor = 7 if mode == "constant" else None
    return make_step(make_family("sft", {"loss_aggregation": mode, "loss_aggregation_divisor": divisor}))


def plain(of: FamilyStep, mutant: str = "") -> tuple[float, Tensor]:
    loss, slopes = 0.0, []
    weights = [item.weights.policy for item in of.rows for _ in range(item.row.response_length)]
    masks = [int(kept) for item in of.rows for kept in item.mask]
    for t, ((_, target, _), level) in enumerate(zip(of.places(), of.levels(), strict=True)):
        weight = weights[t] * (1 if mutant == "mask ignored" else masks[t])
        weight = weight / len(weights) if mutant == "mean in place of a sum" else weight
        loss -= weight * level
        slopes.append({target: -weight})
    return loss, of.gradient(slopes)


@pytest.mark.parametrize("mode", ["sample_mean", "token_mean", "prompt_mean", "constant"])
def test_value_and_gradient_equal_the_oracle(mode: str) -> None:
    assert equal(step(mode).answer(), *plain(step(mode)))


@pytest.mark.parametrize("mutant", ["mask ignored", "mean in place of a sum"])
def test_the_comparison_finds_every_mutant(mutant: str) -> None:
    assert not equal(step().answer(), *plain(step(), mutant))


def test_what_was_recorded_is_not_read() -> None:
    of = step()
    got = of.answer(rollout_log_probs=of.batch().rollout_log_probs * math.nan)
    assert (got.loss, got.bad_rows) == (of.answer().loss, [False] * 3)
    assert got.metrics["nll"] == pytest.approx(of.answer().loss)


def test_logits_that_are_not_finite_under_the_mask_change_nothing_and_name_their_row_elsewhere() -> None:
    of = step()
    clean = of.answer()
    masked = of.logit_rows[~of.batch().mask]
    logits = of.logits.clone()
    logits[masked] = math.nan
    got = FamilyStep(of.family, of.rows, logits, of.logit_rows, of.reference).answer()
    assert got.loss == clean.loss
    assert torch.equal(got.gradient, clean.gradient)
    logits[of.logit_rows[4]] = math.nan  # the only token of the second row
    assert FamilyStep(of.family, of.rows, logits, of.logit_rows, of.reference).answer().bad_rows == [False, True, False]
