"""What grpo declares: advantages in float64, its knobs as the stock loss reads them, and what it refuses."""

import statistics
from datetime import UTC, datetime

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.aggregation import AggregationMode
from atoll.families.grpo import GrpoFamily, GrpoOptions
from atoll.families.grpo.spec import group_advantages
from atoll.families.policy_spec import KlKind, OldPolicy, PolicyLossSpec
from atoll.families.rows import VersionSpan
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import ReportedSample, RowContext, SampleView
from pydantic import JsonValue

from tests.families.rows import make_batch, make_report, make_row

RUN = RunSettings(vocab_size=1100, seq_length=128)


def test_advantages_are_standardised_with_the_sample_deviation() -> None:
    rewards = [0.25, 1.0, 0.0, 0.5]
    deviation = statistics.stdev(rewards) + 1e-6
    expected = [(r - statistics.mean(rewards)) / deviation for r in rewards]
    assert group_advantages(rewards, normalize_std=True).tolist() == pytest.approx(expected, rel=1e-14)
    centred = [r - statistics.mean(rewards) for r in rewards]
    assert group_advantages(rewards, normalize_std=False).tolist() == pytest.approx(centred, rel=1e-14)


@pytest.mark.parametrize("rewards", [[0.1], [0.1] * 3, [1e300] * 7])
def test_a_single_rollout_or_a_constant_group_has_advantages_of_exactly_zero(rewards: list[float]) -> None:
    assert group_advantages(rewards, normalize_std=True).tolist() == [0.0] * len(rewards)


def test_prepare_compares_rollouts_within_their_group_and_counts_each_once() -> None:
    family = GrpoFamily(GrpoOptions(groups_per_step=2, n_samples_per_prompt=2))
    batch = make_batch(
        make_row("a1", rollout="a", group="g", reward=1.0),
        make_row("a2", rollout="a", group="g", reward=1.0, length=2),
        make_row("b", group="g", reward=0.0),
        make_row("c", group="h", reward=5.0),
        make_row("d", group="h", reward=5.0),
    )
    signal = family.prepare(batch, {"kept": 1})
    assert signal.advantages is not None
    firsts = [float(values[0]) for values in signal.advantages]
    assert firsts == pytest.approx([0.7071, 0.7071, -0.7071, 0, 0], abs=1e-4)
    assert [len(values) for values in signal.advantages] == [3, 2, 3, 3, 3]
    assert all(values.dtype == np.float32 for values in signal.advantages)
    assert signal.metrics == {"reward_std": pytest.approx(2.277, abs=1e-3), "constant_group_rate": 0.5}
    assert signal.new_state == {"kept": 1}


def test_rows_of_one_rollout_must_agree_on_its_reward() -> None:
    batch = make_batch(make_row("a1", rollout="a", reward=1.0), make_row("a2", rollout="a", reward=0.5))
    with pytest.raises(InvalidInput, match=r"sample a2: reward 0\.5 differs from 1\.0"):
        GrpoFamily(GrpoOptions()).prepare(batch, {})


def test_the_knobs_reach_the_stock_loss() -> None:
    assert GrpoFamily(GrpoOptions()).policy_loss_spec() == PolicyLossSpec(eps_clip=0.2, eps_clip_high=0.2)
    options = GrpoOptions(
        eps_clip=0.1,
        eps_clip_high=0.3,
        eps_clip_c=3.0,
        use_tis=True,
        tis_cap=1.5,
        kl_loss_coef=0.01,
        kl_loss_type=KlKind.K3,
        entropy_coef=0.02,
    )
    expected = PolicyLossSpec(0.1, 0.3, 3.0, OldPolicy.RECOMPUTED, 1.5, 0.01, KlKind.K3, 0.02)
    assert GrpoFamily(options).policy_loss_spec() == expected
    assert GrpoFamily(GrpoOptions(eps_clip=0.1)).policy_loss_spec().eps_clip_high == 0.1


@pytest.mark.parametrize(
    ("values", "needs", "reads_recorded"),
    [
        ({}, BackendNeeds(old_log_probs=True), False),
        ({"use_tis": True}, BackendNeeds(old_log_probs=True), True),
        ({"use_rollout_log_probs": True}, BackendNeeds(), True),
        ({"kl_loss_coef": 0.1}, BackendNeeds(old_log_probs=True, reference_log_probs=True), False),
    ],
)
def test_the_backend_sets_up_what_the_loss_reads(
    values: dict[str, JsonValue], needs: BackendNeeds, reads_recorded: bool
) -> None:
    family = GrpoFamily.from_options(values)
    assert family.configure_backend(RUN) == needs
    assert family.requires_rollout_log_probs is reads_recorded


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt"),
        ({"groups_per_step": 4, "groups_per_optimizer_step": 3}, "3 must divide groups_per_step 4"),
        ({"eps_clip": 0}, "eps_clip"),
        ({"eps_clip": 1}, "eps_clip"),
        ({"eps_clip_high": 0}, "eps_clip_high"),
        ({"eps_clip_c": 1}, "eps_clip_c"),
        ({"tis_cap": 0}, "tis_cap"),
        ({"kl_loss_coef": -0.1}, "kl_loss_coef"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"kl_loss_type": "k4"}, "'k1', 'k2', 'k3' or 'low_var_kl'"),
        ({"use_tis": True, "use_rollout_log_probs": True}, "use_tis .* is refused with use_rollout_log_probs"),
        ({"lr": 1e-3}, "grpo has no option lr"),
    ],
)
def test_settings_that_cannot_train_are_refused(values: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        GrpoFamily.from_options(values)


def test_flags_carry_the_prefix() -> None:
    flags = ["--grpo-eps-clip", "0.1", "--grpo-kl-loss-type=k2", "--eps-clip"]
    given, rest = GrpoOptions.values_from_flags("grpo", flags)
    assert GrpoOptions.from_mapping("grpo", given) == GrpoOptions(eps_clip=0.1, kl_loss_type=KlKind.K2)
    assert rest == ["--eps-clip"]


def test_a_run_that_cannot_serve_the_family_is_refused_with_its_source() -> None:
    family = GrpoFamily(GrpoOptions(kl_loss_coef=0.1))
    with pytest.raises(InvalidInput, match=r"stack\.yaml: grpo uses a reference model and the run has none"):
        family.validate_specific_args(RUN, "stack.yaml")
    family.validate_specific_args(RunSettings(vocab_size=1100, seq_length=128, has_reference=True), "stack.yaml")
    centred = RunSettings(vocab_size=1100, seq_length=128, score_centering=True)
    with pytest.raises(InvalidInput, match=r"stack\.yaml: score_centering true is refused: grpo declares no"):
        GrpoFamily(GrpoOptions()).validate_specific_args(centred, "stack.yaml")


def test_the_group_size_reaches_the_aggregation() -> None:
    family = GrpoFamily(GrpoOptions(n_samples_per_prompt=8, loss_aggregation=AggregationMode.PROMPT_MEAN))
    assert family.aggregation().group_size == 8


def test_a_reported_sample_becomes_a_row() -> None:
    sample = SampleView(
        sample_id="s1",
        tokens=np.asarray([5, 6, 7, 2], dtype=np.int32),
        prompt_length=2,
        loss_mask=np.ones(2, dtype=np.uint8),
        log_probs=np.asarray([-0.1, -0.2], dtype=np.float32),
        temperature=0.7,
        exact=True,
        versions=(VersionSpan(0, 2, "1:4"),),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    item = ReportedSample(sample, make_report("r1", group="q7", score=0.5))
    row = GrpoFamily(GrpoOptions()).shape_sample_row(item, RowContext((item,)))
    assert (row.sample_id, row.rollout_id, row.group_id, row.reward) == ("s1", "r1", "q7", 0.5)
    assert row.tokens is sample.tokens
    assert row.versions == sample.versions
