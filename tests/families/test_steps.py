"""Train steps: every whole-step fact is there, the bytes survive a trip to another process, bad signals are refused."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.family import AdvantageSource
from atoll.families.grpo import GrpoFamily, GrpoOptions
from atoll.families.rows import Batch, Column, ColumnDtype, ColumnOrigin, ColumnSpec, Float32, Row, UInt8
from atoll.families.signal import StepSignal
from atoll.families.steps import TrainStep, build_train_steps, check_computed

from tests.families.rows import make_batch, make_row

BATCH = make_batch(
    make_row("a", group="g", reward=1.0),
    make_row("b", group="g", mask=[1, 0, 1]),
    make_row("c", group="h", length=2),
    make_row("d", group="h", length=2, reward=1.0),
)
OPTIONS = GrpoOptions(groups_per_step=2, n_samples_per_prompt=2)


def signal(*advantages: Float32) -> StepSignal:
    return StepSignal(advantages or tuple(np.zeros(row.response_length, dtype=np.float32) for row in BATCH.rows))


def test_one_step_carries_masks_advantages_and_weights() -> None:
    family = GrpoFamily(OPTIONS)
    (step,) = build_train_steps(family, BATCH, family.prepare(BATCH, {}))
    assert [item.row.sample_id for item in step.rows] == ["a", "b", "c", "d"]
    assert [item.weights.policy for item in step.rows] == [1 / 12, 1 / 8, 1 / 8, 1 / 8]
    assert [item.mask.tolist() for item in step.rows] == [[1, 1, 1], [1, 0, 1], [1, 1], [1, 1]]
    half = np.sqrt(0.5) / (np.sqrt(0.5) + 1e-6) * np.sqrt(0.5)
    for item, sign in zip(step.rows, (1, -1, -1, 1), strict=True):
        assert item.advantages is not None
        assert item.advantages.tolist() == pytest.approx([sign * half] * item.row.response_length, rel=1e-6)


def test_weights_are_facts_of_the_optimizer_step_not_of_the_batch() -> None:
    family = GrpoFamily(GrpoOptions(groups_per_step=2, n_samples_per_prompt=2, groups_per_optimizer_step=1))
    steps = build_train_steps(family, BATCH, signal())
    assert [[item.weights.policy for item in step.rows] for step in steps] == [[1 / 6, 1 / 4], [1 / 4, 1 / 4]]


def test_each_term_has_the_weights_of_its_own_aggregation() -> None:
    for mode, policy, regularizer in (("token_mean", 1 / 9, 1 / 9), ("constant", 1 / 40, 1 / 12)):
        divisor = 10.0 if mode == "constant" else None
        values = {**OPTIONS.model_dump(mode="json"), "loss_aggregation": mode, "loss_aggregation_divisor": divisor}
        (step,) = build_train_steps(GrpoFamily.from_options(values), BATCH, signal())
        weights = step.rows[0].weights
        assert (weights.policy, weights.regularizer, weights.metric) == (policy, regularizer, 1 / 12)


def test_a_step_survives_the_trip_to_a_worker() -> None:
    (step,) = build_train_steps(GrpoFamily(OPTIONS), BATCH, signal())
    (copy,) = pickle.loads(pickle.dumps([step]))
    assert copy.rows[1].mask.tolist() == [1, 0, 1]
    assert copy.rows[1].weights == step.rows[1].weights


class SkipsFirst(GrpoFamily):
    """Clears the first token's bit and adds a column from each side."""

    columns: ClassVar[tuple[ColumnSpec, ...]] = (
        ColumnSpec("seen", ColumnDtype.UINT8, response_aligned=True),
        ColumnSpec("centre", ColumnDtype.FLOAT32, ColumnOrigin.DRIVER, response_aligned=True),
    )

    def effective_mask(self, row: Row) -> UInt8:
        mask = row.loss_mask.copy()
        mask[:1] = 0
        return mask

    def build_rollout_data(self, batch: Batch, signal: StepSignal) -> Sequence[Mapping[str, Column]]:
        return [{"centre": np.zeros(row.response_length, dtype=np.float32)} for row in batch.rows]


def test_the_effective_mask_decides_the_denominators_and_columns_of_both_origins_arrive() -> None:
    (step,) = build_train_steps(SkipsFirst(OPTIONS), BATCH, signal())
    assert [item.weights.policy for item in step.rows] == [1 / 8, 1 / 4, 1 / 4, 1 / 4]
    assert [sorted(item.columns) for item in step.rows] == [["centre"]] * 4


class Greedy(GrpoFamily):
    def effective_mask(self, row: Row) -> UInt8:
        return np.ones_like(row.loss_mask)


class Forgets(SkipsFirst):
    def build_rollout_data(self, batch: Batch, signal: StepSignal) -> Sequence[Mapping[str, Column]]:
        return [{} for _ in batch.rows]


class NoAdvantages(GrpoFamily):
    advantages: ClassVar[AdvantageSource] = AdvantageSource.FORBIDDEN


def zeros(length: int) -> Float32:
    return np.zeros(length, dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        (GrpoFamily, StepSignal(None), "advantages are required, and prepare returned none"),
        (NoAdvantages, signal(), "advantages are forbidden, and prepare returned some"),
        (GrpoFamily, signal(zeros(3)), "for 4 rows expected, got 1"),
        (GrpoFamily, signal(zeros(3), zeros(3), zeros(2), zeros(3)), r"sample d: advantages must be float32 \[2\]"),
        (
            GrpoFamily,
            signal(zeros(3), zeros(3), zeros(2), np.full(2, np.inf, dtype=np.float32)),
            "sample d: advantages must be finite",
        ),
        (Greedy, signal(), "sample b: the effective mask may only clear bits"),
        (Forgets, signal(), r"sample a: build_rollout_data must fill \['centre'\], got \[\]"),
    ],
)
def test_a_signal_that_does_not_fit_is_refused(family: type[GrpoFamily], given: StepSignal, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_train_steps(family(OPTIONS), BATCH, given)


def test_an_advantage_under_the_mask_may_be_anything() -> None:
    advantages = [zeros(3), np.asarray([0, np.nan, 0], dtype=np.float32), zeros(2), zeros(2)]
    assert build_train_steps(GrpoFamily(OPTIONS), BATCH, signal(*advantages))


def computed(**changes: Any) -> TrainStep:
    """A step whose first row has other `advantages`, `values` or `returns`."""
    step = build_train_steps(GrpoFamily(OPTIONS), BATCH, signal(zeros(3), zeros(3), zeros(2), zeros(2)))[0]
    return TrainStep((replace(step.rows[0], **changes), *step.rows[1:]))


def test_what_workers_computed_must_be_there_and_finite_on_trained_tokens() -> None:
    check_computed([computed(values=zeros(3)), computed(values=None)])
    bad = np.full(3, np.nan, dtype=np.float32)
    for name in ("advantages", "values", "returns"):
        with pytest.raises(InvalidInput, match=f"{name} must be finite on every trained token"):
            check_computed([computed(**{name: bad})])
    with pytest.raises(InvalidInput, match="no advantages were computed"):
        check_computed([computed(advantages=None)])
