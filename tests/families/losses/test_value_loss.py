"""The critic's clipped value loss against plain floats, value and gradient."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from atoll.families.catalog import make_family
from atoll.families.losses.value_loss import value_loss

from tests.families.family_steps import TOKENS, make_step

CLIP = 0.2
NEW = (0.3, 0.9, 1.5, -0.4, 0.5, 0.05, 0.72, -0.9)
OLD = (0.0, 0.9, 1.0, -0.3, 0.5, 0.0, 0.7, 0.5)
RETURNS = (1.0, 5.0, 1.0, 1.0, -1.0, 0.0, 2.0, -0.2)
"""Clipped towards and away from the return, from above and below; the second token is masked."""


@dataclass(frozen=True)
class Found:
    loss: float
    gradient: list[float]
    clipfrac: float
    bad_rows: list[bool]


def run(**poisoned: torch.Tensor) -> Found:
    values = poisoned.get("values", torch.tensor(NEW)).clone().requires_grad_()
    result = value_loss(
        replace(
            BATCH,
            old_values=poisoned.get("old_values", torch.tensor(OLD)),
            returns=poisoned.get("returns", torch.tensor(RETURNS)),
        ),
        values,
        CLIP,
    )
    torch.autograd.backward(result.loss)
    assert values.grad is not None
    return Found(
        result.loss.item(),
        values.grad.tolist(),
        result.metrics["value_clipfrac"].item(),
        result.bad_rows.tolist(),
    )


BATCH = make_step(make_family("sft", {})).batch()
WEIGHTS = BATCH.policy_weights.tolist()
MASK = BATCH.mask.tolist()


def plain(mutant: str = "") -> tuple[float, list[float]]:
    loss, gradient = 0.0, []
    for t in range(TOKENS):
        v, old, target = NEW[t], OLD[t], RETURNS[t]
        moved = min(max(v - old, -CLIP), CLIP)
        free, bounded = (v - target) ** 2, (old + moved - target) ** 2
        slope = 2 * (v - target)
        take_bounded = bounded < free if mutant == "min in place of max" else bounded > free
        if mutant == "no clip":
            take_bounded = False
        if mutant == "clip around the return":
            take_bounded, bounded = True, min(max(v - target, -CLIP), CLIP) ** 2
        value = bounded if take_bounded else free
        slope = (2 * (old + moved - target) if abs(v - old) < CLIP else 0.0) if take_bounded else slope
        weight = WEIGHTS[t] * (MASK[t] or mutant == "mask ignored") * (0.5 if mutant == "half" else 1)
        weight *= 1 / TOKENS if mutant == "mean in place of a sum" else 1
        loss += weight * value
        gradient.append(weight * slope)
    return loss, gradient


def agrees(found: Found, loss: float, gradient: list[float]) -> bool:
    near = all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(found.gradient, gradient, strict=True))
    return near and math.isclose(found.loss, loss, rel_tol=1e-5)


def test_value_and_gradient_equal_the_oracle() -> None:
    assert agrees(run(), *plain())
    assert run().bad_rows == [False] * 3


@pytest.mark.parametrize(
    "mutant",
    ["min in place of max", "no clip", "clip around the return", "mask ignored", "half", "mean in place of a sum"],
)
def test_the_comparison_finds_every_mutant(mutant: str) -> None:
    assert not agrees(run(), *plain(mutant))


def test_known_values() -> None:
    # v = 0.3 is clipped to 0.2: (0.2 - 1)^2 = 0.64 exceeds 0.49, and the loss stops pulling.
    assert run().gradient[0] == 0
    # v = 1.5 is clipped to 1.2, nearer to the return: the unclipped 0.25 counts, without a factor 1/2.
    assert run().gradient[2] == pytest.approx(WEIGHTS[2] * 2 * 0.5)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["values", "old_values", "returns"])
def test_a_masked_input_that_is_not_finite_changes_nothing_and_a_trained_one_names_its_row(
    name: str, poison: float
) -> None:
    clean = run()
    values = torch.tensor({"values": NEW, "old_values": OLD, "returns": RETURNS}[name])
    assert run(**{name: values.masked_fill(~BATCH.mask, poison)}) == clean
    assert run(**{name: values.masked_fill((BATCH.row_of_token == 1), poison)}).bad_rows == [False, True, False]


def test_what_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs old values and returns"):
        value_loss(BATCH, torch.tensor(NEW), CLIP)
