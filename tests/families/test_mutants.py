"""Plausible mistakes in the real code, one at a time: the comparison with an oracle must notice each of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from atoll.families.aggregation import AggregationMode

from tests.families import test_aggregation
from tests.families.cases import VOCAB, make_case
from tests.families.family_steps import equal
from tests.families.losses import (
    test_distillation,
    test_policy_loss,
    test_value_loss,
)
from tests.families.losses import test_score_centering as centering
from tests.families.losses.kernel_cases import CENTERED, DISTILLATIONS
from tests.families.mutation import mutated
from tests.families.openclawrl import test_objective as openclawrl
from tests.families.oracle import policy_step
from tests.families.sao import test_gae
from tests.families.sao import test_objective as sao
from tests.families.tttd import test_entropic
from tests.families.tttd import test_objective as tttd


def policy() -> None:
    case, knobs = make_case(dtype=torch.float32), test_policy_loss.MUTANT_KNOBS
    got = test_policy_loss.answer_on_one_shard(case, test_policy_loss.spec_of(knobs))
    want = policy_step(case.oracle_tokens(), knobs)
    test_policy_loss.assert_equal(got, got.gradient, want, case, torch.float32)


def masked_nan() -> None:
    test_policy_loss.test_a_non_finite_input_under_the_mask_changes_neither_value_nor_gradient("advantages", math.nan)


def masked_ratio() -> None:
    assert equal(sao.step().answer(), *sao.plain(sao.step()))


def strict_bounds() -> None:
    sao.test_a_ratio_on_a_bound_is_outside(0.0, [1.0, 1.0])


def clip_fraction() -> None:
    sao.test_the_clip_fraction_counts_trained_tokens_outside_the_bounds()


def distillation(name: str) -> None:
    answer = test_distillation.one_shard(name)[0]
    want = test_distillation.dense_loss(DISTILLATIONS[name], torch.float32, centered=CENTERED.get(name))
    test_distillation.assert_equal(answer, answer.gradient[:, :VOCAB].double(), want, torch.float32)


def token_sum() -> None:
    assert equal(tttd.step().answer(), *tttd.plain(tttd.step()))


def subset_sum() -> None:
    assert equal(openclawrl.step().answer(), *openclawrl.plain(openclawrl.step()))


def aggregation() -> None:
    for mode in AggregationMode:
        test_aggregation.test_weights_equal_the_formula_with_unequal_lengths_and_empty_masks(mode, 1)


def entropic() -> None:
    for rewards in test_entropic.GROUPS:
        test_entropic.test_advantages_equal_the_oracle(rewards)


def gae() -> None:
    test_gae.test_the_known_values()
    test_gae.test_observations_are_skipped_as_if_they_were_not_there(0.9, 0.8)


CHECKS: dict[str, Callable[[], None]] = {
    "policy": policy,
    "masked nan": masked_nan,
    "masked ratio": masked_ratio,
    "strict bounds": strict_bounds,
    "clip fraction": clip_fraction,
    "centering, on policy": partial(centering.test_the_gradient_is_zero_when_the_engine_is_the_policy, "none", 8),
    "centering, lower bound": partial(centering.test_the_weight_is_strictly_inside_its_bounds, -0.5, 1.0, 3.0),
    "centering, upper bound": partial(centering.test_the_weight_is_strictly_inside_its_bounds, 0.5, 0.3, 1.0),
    **{
        f"centering, {form}": partial(centering.test_a_head_of_the_whole_vocabulary_gives_the_full_correction, form)
        for form in ("masked", "truncated")
    },
    **{f"distillation: {name}": partial(distillation, name) for name in DISTILLATIONS},
    "token sum": token_sum,
    "subset sum": subset_sum,
    "value loss": test_value_loss.test_value_and_gradient_equal_the_oracle,
    "aggregation": aggregation,
    "entropic": entropic,
    "gae": gae,
}


@dataclass(frozen=True)
class Mutant:
    """A mistake. Example: Mutant("mean in place of sum", "pkg.module", ".sum()", ".mean()", "policy")."""

    title: str
    module: str
    old: str
    new: str
    check: str


def read_mutants() -> list[Mutant]:
    blocks = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
    return [Mutant(module=b["module"], check=b["check"], **mistake) for b in blocks for mistake in b["mistakes"]]


MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.module[15:]}: {mutant.title}")
def test_a_mistake_in_the_code_is_noticed(mutant: Mutant) -> None:
    with mutated(mutant.module, mutant.old, mutant.new), pytest.raises(AssertionError):
        CHECKS[mutant.check]()


@pytest.mark.parametrize("check", sorted({mutant.check for mutant in MUTANTS}))
def test_the_code_as_it_is_passes_every_comparison(check: str) -> None:
    CHECKS[check]()
