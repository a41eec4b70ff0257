"""What sao declares: its row, its schedule of critic and actor, its metrics, and every refusal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.driver import JobContext
from atoll.families.policy_spec import CriticSpec, OldPolicy, PolicyGradientWeight, PolicyLossSpec
from atoll.families.rows import Batch, VersionSpan, validate_rows
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import RowContext
from atoll.families.sao import SaoFamily, SaoOptions
from atoll.families.signal import FamilyState
from atoll.families.steps import TrainRow, TrainStep, build_train_steps
from pydantic import JsonValue

from tests.families.reported import later, reported
from tests.families.rows import make_batch, make_report

RUN = RunSettings(vocab_size=1100, seq_length=128)
OPTIONS = SaoOptions(eps_clip=0.3, eps_clip_high=5.0)
NAN = math.nan


def batch_of(family: SaoFamily) -> Batch:
    items = (
        reported(
            "a",
            versions=(VersionSpan(0, 1, "1:5"), VersionSpan(1, 3, "1:4")),
            log_probs=(-0.5, NAN, -0.5),
            created_at=later(10),
        ),
        reported("b", score=-1.0, versions=(VersionSpan(0, 3, "1:7"),)),
    )
    return make_batch(*(family.shape_sample_row(item, RowContext(items)) for item in items))


def test_a_row_says_what_was_generated_by_whom_and_when() -> None:
    row = batch_of(SaoFamily(OPTIONS)).rows[0]
    assert row.columns["action_mask"].tolist() == [1, 0, 1]
    assert row.columns["producer_version"].tolist() == [1, 4]
    assert float(row.columns["created_at"]) == later(10).timestamp()
    validate_rows([row], vocab_size=10, columns=SaoFamily.columns)


def test_a_sample_of_no_known_version_is_refused() -> None:
    item = reported("a", versions=())
    with pytest.raises(InvalidInput, match="sample sample-of-a: it names no weight version"):
        SaoFamily(OPTIONS).shape_sample_row(item, RowContext((item,)))


def test_metrics_tell_the_age_of_the_samples() -> None:
    family = SaoFamily(OPTIONS)
    metrics = family.rollout_metrics(batch_of(family), JobContext("1:7", later(30)))
    assert metrics == {
        "policy_lag_mean": 1.5,
        "policy_lag_max": 3.0,
        "queue_age_s_mean": 25.0,
        "queue_age_s_max": 30.0,
        "effective_token_rate": pytest.approx(5 / 6),
    }


def test_an_observation_is_not_trained_even_if_the_loss_mask_says_so() -> None:
    family = SaoFamily(OPTIONS)
    row = batch_of(family).rows[0]
    row = replace(row, loss_mask=np.ones(3, dtype=np.uint8))
    assert family.effective_mask(row).tolist() == [1, 0, 1]


class Groups:
    """Worker groups that remember the order of the calls; their critic always says 0.25."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.critic: list[TrainStep] = []

    def compute_advantages(self, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        self.calls.append("advantages")
        return tuple(TrainStep(tuple(self._computed(item) for item in step.rows)) for step in steps)

    def train_critic(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        self.calls.append("critic")
        self.critic += steps
        return [{"loss": 0.5, "grad_norm": 2.0} for _ in steps]

    def train_actor(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        self.calls.append("actor")
        assert all(item.advantages is not None for step in steps for item in step.rows)
        return [{"loss": 0.1, "grad_norm": 1.0} for _ in steps]

    def _computed(self, item: TrainRow) -> TrainRow:
        full = np.full(item.row.response_length, item.row.reward, dtype=np.float32)
        return replace(item, advantages=full - 0.25, values=full * 0 + 0.25, returns=full)


def trained(options: SaoOptions, state: FamilyState) -> tuple[Groups, Sequence[Mapping[str, float]], FamilyState]:
    family = SaoFamily(options)
    batch = batch_of(family)
    signal = family.prepare(batch, state)
    workers = Groups()
    metrics = family.train(workers, build_train_steps(family, batch, signal))
    return workers, metrics, signal.new_state


def test_values_come_first_then_the_critic_then_the_actor() -> None:
    workers, metrics, state = trained(OPTIONS, {})
    assert workers.calls == ["advantages", "critic", "critic", "actor"]
    # Returns 1, 1, -1, -1, -1 and values all alike: nothing is explained.
    assert metrics == [
        {"critic/loss": 0.5, "critic/grad_norm": 2.0},
        {"critic/loss": 0.5, "critic/grad_norm": 2.0},
        {"critic/explained_variance": pytest.approx(0.0, abs=1e-12)},
        {"loss": 0.1, "grad_norm": 1.0},
    ]
    assert state == {"jobs": 1}


def test_the_critic_trains_on_actions_with_the_sample_mean_whatever_the_actor_has() -> None:
    workers, _, _ = trained(OPTIONS.model_copy(update={"calculate_per_token_loss": True}), {})
    first, second = workers.critic[0].rows
    assert first.mask.tolist() == [1, 0, 1]
    assert (first.weights.policy, second.weights.policy) == (1 / 4, 1 / 6)


def test_the_actor_waits_for_the_first_jobs() -> None:
    options = OPTIONS.model_copy(update={"num_critic_only_steps": 2, "critic_steps_per_actor": 3})
    state: FamilyState = {"other": "kept"}
    calls = []
    for _ in range(4):
        workers, _, state = trained(options, state)
        calls.append(workers.calls[1:])
    assert calls == [["critic"] * 3, ["critic"] * 3, ["critic"] * 3 + ["actor"], ["critic"] * 3 + ["actor"]]
    assert state == {"other": "kept", "jobs": 4}


def test_an_advantage_that_is_not_finite_names_its_sample_before_anything_is_trained() -> None:
    class Broken(Groups):
        def _computed(self, item: TrainRow) -> TrainRow:
            good = super()._computed(item)
            assert good.values is not None
            return replace(good, values=good.values * (NAN if item.row.sample_id == "sample-of-b" else 1))

    family = SaoFamily(OPTIONS)
    batch = batch_of(family)
    workers = Broken()
    with pytest.raises(InvalidInput, match="sample sample-of-b: values must be finite"):
        family.train(workers, build_train_steps(family, batch, family.prepare(batch, {})))
    assert workers.calls == ["advantages"]


def test_what_the_backend_and_the_correction_learn() -> None:
    family = SaoFamily(OPTIONS.model_copy(update={"critic_lr": 3e-5, "value_clip": 0.4}))
    assert family.configure_backend(RUN) == BackendNeeds(critic=CriticSpec(3e-5, 0.4, value_head_zero_init=True))
    assert family.policy_loss_spec() == PolicyLossSpec(0.3, 5.0, old_policy=OldPolicy.ROLLOUT)
    assert family.policy_gradient_weight(RUN) == PolicyGradientWeight.masked(0.7, 6.0)
    assert family.requires_rollout_log_probs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "sao: eps_clip_high: Field required; it has no default$"),
        ({"eps_clip_high": 0}, "eps_clip_high: .*greater than 0.*got 0"),
        ({"eps_clip_high": 5.0, "eps_clip": 0}, "eps_clip: .*greater than 0"),
        ({"eps_clip_high": 5.0, "eps_clip": 1}, "eps_clip: .*less than 1"),
        ({"eps_clip_high": 5.0, "normalize_advantages": True}, "normalize_advantages true is refused: only false"),
        ({"eps_clip_high": 5.0, "kl_coef": 0.1}, r"kl_coef 0\.1 is refused: only 0 is allowed"),
        ({"eps_clip_high": 5.0, "gae_lambda": 0.9, "length_adaptive_lambda": True}, r"gae_lambda 0\.9 is refused"),
        ({"eps_clip_high": 5.0, "critic_steps_per_actor": 0}, "critic_steps_per_actor"),
        ({"eps_clip_high": 5.0, "num_critic_only_steps": -1}, "num_critic_only_steps"),
        ({"eps_clip_high": 5.0, "critic_lr": 0}, "critic_lr"),
        ({"eps_clip_high": 5.0, "critic_lambda": 1.5}, "critic_lambda"),
        ({"eps_clip_high": 5.0, "gamma": 1.5}, "gamma"),
        ({"eps_clip_high": 5.0, "batch_size": 0}, "batch_size"),
        ({"eps_clip_high": 5.0, "length_adaptive_alpha": 0}, "length_adaptive_alpha"),
        ({"eps_clip_high": 5.0, "value_clip": 0}, "value_clip"),
        ({"eps_clip_high": 5.0, "eps_clip_low": 0.1}, "sao has no option eps_clip_low"),
    ],
)
def test_settings_that_cannot_train_are_refused(values: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SaoFamily.from_options(values)


def test_flags_carry_the_prefix() -> None:
    flags = ["--sao-eps-clip-high", "3", "--sao-length-adaptive-lambda", "--sao-critic-lambda=0.9"]
    given, rest = SaoOptions.values_from_flags("sao", flags)
    options = SaoOptions.from_mapping("sao", given)
    assert (options.eps_clip_high, options.length_adaptive_lambda, options.critic_lambda, rest) == (3.0, True, 0.9, [])


@pytest.mark.parametrize(
    ("score", "receipts", "field"), [(None, ("a",), "score"), (NAN, ("a",), "score"), (1.0, ("a", "b"), "receipts")]
)
def test_a_report_is_one_scored_sample(score: float | None, receipts: tuple[str, ...], field: str) -> None:
    rule = SaoFamily(OPTIONS).batching
    rule.validate(make_report("r"))
    assert rule.form([make_report("r"), make_report("s", at=1)]) == [("r",), ("s",)]
    with pytest.raises(InvalidInput) as caught:
        rule.validate(make_report("r", score=score, receipts=receipts))
    assert caught.value.field == field
