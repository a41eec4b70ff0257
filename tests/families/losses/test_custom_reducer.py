"""A family's own reducer: it takes the place of loss_aggregation, in plain floats, whatever the cut of the step."""

import math
from typing import ClassVar

import pytest
import torch
from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.families.catalog import AnyFamily, check_declaration, make_family
from atoll.families.family import HookChannel
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.policy_loss import LossResult
from atoll.families.run_settings import RunSettings
from atoll.families.tttd import TttdFamily

from tests.families.family_steps import LENGTHS, MASKS, RUN, TOKENS, FamilyStep, equal, make_step
from tests.trainer.reduced.spec import SHARE

REFERENCE = "tests.trainer.reduced.spec:ReducedFamily"
ADVANTAGES = (1.0, -1.0, 2.0, -0.5, 1.5, -2.0, 0.3, 1.0)
BOUND = 0.4
SHARES = tuple(1 / (3 * (t + 1)) for length in LENGTHS for t in range(length))
MASK = tuple(bit for bits in MASKS for bit in bits)


def reduced(**options: float | str) -> AnyFamily:
    return make_family(REFERENCE, {"bound": BOUND, **options})


def step(family: AnyFamily) -> FamilyStep:
    made = make_step(family, advantages=ADVANTAGES)
    columns = iter(family.build_rollout_data(_Batch(made), None))  # type: ignore[arg-type]
    for item in made.rows:
        item.columns.update(next(columns))  # type: ignore[attr-defined]
    return made


class _Batch:
    """As much of a batch as the family's columns need."""

    def __init__(self, made: FamilyStep) -> None:
        self.rows = [item.row for item in made.rows]


def oracle(made: FamilyStep) -> tuple[float, list[dict[int, float]]]:
    """On policy loss_t = -A_t, and its slope is the same; each share is cut off at the bound."""
    loss, slopes = 0.0, []
    for (_, target, _), advantage, share, bit in zip(made.places(), ADVANTAGES, SHARES, MASK, strict=True):
        value = -advantage * share
        loss += bit * min(max(value, -BOUND), BOUND)
        slopes.append({target: bit * value * (abs(value) < BOUND)})
    return loss, slopes


@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_the_reducer_takes_precedence_over_the_aggregation(mode: str) -> None:
    made = step(reduced(loss_aggregation=mode))
    loss, slopes = oracle(made)
    assert 0 < sum(slope == 0 and bit for of, bit in zip(slopes, MASK, strict=True) for slope in of.values()) < TOKENS
    assert equal(made.answer(), loss, made.gradient(slopes))


def test_every_cut_of_the_step_adds_up_to_the_same() -> None:
    made = step(reduced())
    loss, slopes = oracle(made)
    parts = [made.answer([number]) for number in range(3)]
    assert sum(part.loss for part in parts) == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(
        sum(part.gradient.double() for part in parts), made.gradient(slopes), rtol=1e-5, atol=1e-7
    )


def test_what_is_masked_reaches_neither_value_nor_gradient() -> None:
    made = step(reduced())
    batch = made.batch()
    spoilt = batch.columns[SHARE].masked_fill(~batch.mask, math.nan)
    poisoned = made.answer(columns={SHARE: spoilt})
    clean = made.answer()
    assert poisoned.loss == clean.loss
    assert torch.equal(poisoned.gradient, clean.gradient)
    assert poisoned.bad_rows == [False] * 3
    unmasked = batch.columns[SHARE].clone()
    unmasked[4] = math.nan
    assert made.answer(columns={SHARE: unmasked}).bad_rows == [False, True, False]


def test_a_share_is_wanted_for_every_token() -> None:
    family = reduced()
    function = LossFunction(family, RUN)
    made = step(family)

    def run(reducer: object) -> LossResult:
        object.__setattr__(function.hooks, "reducer", reducer)
        return function(made.batch(), made.columns())

    with pytest.raises(ValueError, match=f"a share for each of {TOKENS} tokens"):
        run(lambda _args, _batch, losses: losses.sum())


def test_score_centering_is_refused_with_a_reducer() -> None:
    run = RunSettings(vocab_size=100, seq_length=32, score_centering=True, score_centering_top_k=8)
    with pytest.raises(InvalidInput, match=r"scenario s: score_centering true is refused: reduced .* custom_reducer"):
        reduced().validate_specific_args(run, "scenario s")


def test_a_reducer_that_would_never_be_called_is_refused() -> None:
    class Ignored(TttdFamily):
        required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.LOSS, HookChannel.REDUCER})

    with pytest.raises(BadConfiguration, match="custom_reducer needs loss_type policy_loss"):
        check_declaration(Ignored)
