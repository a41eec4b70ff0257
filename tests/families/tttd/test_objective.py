"""The token sum against plain floats, and the centred KL over all ranks."""

import math
from dataclasses import replace

import pytest
import torch
from atoll.families.catalog import make_family
from atoll.families.losses.actor import RolloutData
from atoll.families.losses.loss_function import LossFunction
from torch import Tensor

from tests.families.family_steps import RUN, TOKENS, FamilyStep, equal, make_step

RATIOS = (1.0, 1.4, 0.5, 6.5, 5.9, 0.71, 0.2, 3.0)
ADVANTAGES = (1.0, 5.0, -1.0, 2.0, -2.0, 1.5, 0.0, -1.0)
"""The second token is forced: masked, and with a recorded log-prob."""
KL = 0.3
FAMILY = make_family("tttd", {"kl_coef": KL})


def step() -> FamilyStep:
    return make_step(FAMILY, ratios=RATIOS, advantages=ADVANTAGES)


def plain(of: FamilyStep, mutant: str = "") -> tuple[float, Tensor]:
    masks = [int(kept) for item in of.rows for kept in item.mask]
    recorded = [float(value) for item in of.rows for value in item.row.rollout_log_probs]
    loss, slopes = 0.0, []
    for t, ((_, target, _), level) in enumerate(zip(of.places(), of.levels(), strict=True)):
        ratio = math.exp(level - recorded[t])
        if mutant == "clipped":
            ratio = min(ratio, 1.2)
        value = -ratio * ADVANTAGES[t]
        if mutant == "loss mask gates the loss":
            value *= masks[t]
        if mutant == "mean in place of a sum":
            value /= TOKENS
        if mutant == "sample mean":
            value *= of.batch().metric_weights[t].item()
        loss += value
        slopes.append({target: 0.0 if mutant == "clipped" and ratio == 1.2 else value})
    return loss, of.gradient(slopes)


def test_value_and_gradient_equal_the_oracle() -> None:
    assert equal(step().answer(), *plain(step()))


@pytest.mark.parametrize("mutant", ["clipped", "loss mask gates the loss", "mean in place of a sum", "sample mean"])
def test_the_comparison_finds_every_mutant(mutant: str) -> None:
    assert not equal(step().answer(), *plain(step(), mutant))


def test_micro_batches_add_up_to_the_step() -> None:
    whole = step().answer()
    parts = [step().answer(rows) for rows in ([0], [1], [2])]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-9)
    torch.testing.assert_close(sum(part.gradient for part in parts), whole.gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_recorded_log_prob_is_no_part_of_the_loss(poison: float) -> None:
    of = step()
    second = torch.arange(TOKENS) == 1
    batch = of.batch()
    assert batch.advantages is not None
    got = of.answer(rollout_log_probs=batch.rollout_log_probs.masked_fill(second, poison))
    without = of.answer(advantages=batch.advantages.masked_fill(second, 0))
    assert got.loss == without.loss != of.answer().loss
    assert torch.equal(got.gradient, without.gradient)
    assert not any(got.bad_rows)


@pytest.mark.parametrize("name", ["rollout_log_probs", "advantages"])
def test_a_trained_token_that_is_not_finite_names_its_row(name: str) -> None:
    of = step()
    batch = of.batch()
    values = {"rollout_log_probs": batch.rollout_log_probs, "advantages": batch.advantages}[name]
    assert values is not None
    got = of.answer(**{name: values.masked_fill(batch.row_of_token == 1, math.nan)})
    assert got.bad_rows == [False, True, False]


def test_a_ratio_beyond_float32_names_its_row() -> None:
    of = step()
    shift = (of.batch().row_of_token == 0) * 200.0
    assert of.answer(rollout_log_probs=of.batch().rollout_log_probs - shift).bad_rows == [True, False, False]


def test_without_advantages_there_is_no_loss() -> None:
    with pytest.raises(ValueError, match="tttd needs advantages"):
        step().answer(advantages=None)


def centred(of: FamilyStep, mutant: str = "") -> list[list[float]]:
    """A_t + kl m (mean d - d_t), the mean over the trained tokens of all rows."""
    every, kept = [], []
    for item, base in zip(of.rows, of.reference, strict=True):
        differences = [float(lq) - float(lb) for lq, lb in zip(item.row.rollout_log_probs, base.tolist(), strict=True)]
        every.append(differences)
        kept += [d for d, m in zip(differences, item.mask.tolist(), strict=True) if m]
    mean = math.fsum(kept) / (TOKENS if mutant == "mean over all tokens" else len(kept))
    result = []
    for item, differences in zip(of.rows, every, strict=True):
        assert item.advantages is not None
        mask = [1] * len(differences) if mutant == "mask ignored" else item.mask.tolist()
        if mutant == "mean of the row":
            own = [d for d, m in zip(differences, mask, strict=True) if m]
            mean = math.fsum(own) / len(own)
        sign = -1 if mutant == "sign" else 1
        result.append(
            [
                float(a) + sign * KL * m * ((0 if mutant == "not centred" else mean) - d)
                for a, m, d in zip(item.advantages, mask, differences, strict=True)
            ]
        )
    return result


def hook(of: FamilyStep, rows: list[int], others: Tensor | None = None) -> tuple[list[list[float]], list[Tensor]]:
    """Advantages of some rows on a rank whose peers add `others` to its sums; and the sums it offered."""
    offered: list[Tensor] = []

    def add_up(sums: Tensor) -> Tensor:
        offered.append(sums.clone())
        return sums if others is None else sums + others

    data = RolloutData([of.rows[i] for i in rows], ref_log_probs=[of.reference[i] for i in rows], sum_over_ranks=add_up)
    filled = LossFunction(FAMILY, RUN).advantages(data)
    return [item.advantages.tolist() for item in filled if item.advantages is not None], offered


def close(got: list[list[float]], expected: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, rel=1e-6, abs=1e-7) for a, b in zip(got, expected, strict=True))


def test_the_kl_is_centred_over_the_trained_tokens_of_the_whole_batch() -> None:
    assert close(hook(step(), [0, 1, 2])[0], centred(step()))


@pytest.mark.parametrize("mutant", ["mean over all tokens", "mask ignored", "mean of the row", "not centred", "sign"])
def test_the_comparison_finds_every_mutant_of_the_kl(mutant: str) -> None:
    assert not close(hook(step(), [0, 1, 2])[0], centred(step(), mutant))


def test_ranks_share_their_sums_once_each_also_one_without_rows() -> None:
    _, (of_first,) = hook(step(), [0])
    _, (of_others,) = hook(step(), [1, 2])
    nothing, (of_none,) = hook(step(), [], of_first + of_others)
    assert nothing == []
    assert of_none.tolist() == [0.0, 0.0]
    first, _ = hook(step(), [0], of_others)
    others, _ = hook(step(), [1, 2], of_first)
    assert close([*first, *others], centred(step()))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_base_that_is_not_finite_under_the_mask_changes_nothing(poison: float) -> None:
    of = step()
    assert of.rows[0].mask.tolist()[1] == 0
    bases = list(of.reference)
    bases[0] = bases[0].clone()
    bases[0][1] = poison
    assert close(hook(replace(of, reference=tuple(bases)), [0, 1, 2])[0], centred(of))


def test_without_the_base_there_is_no_kl() -> None:
    with pytest.raises(ValueError, match=r"kl_coef 0\.3 needs log-probs of the base"):
        LossFunction(FAMILY, RUN).advantages(RolloutData(step().rows))
