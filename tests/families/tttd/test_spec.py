"""What tttd declares: its grid, dropped groups, the best reward it remembers, and every refusal."""

import math
from dataclasses import replace

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.rows import Row
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.signal import FamilyState
from atoll.families.steps import RowWeights, build_train_steps
from atoll.families.tttd import TttdFamily, TttdOptions
from atoll.families.tttd.entropic import entropic_advantages
from pydantic import JsonValue

from tests.families.rows import make_batch, make_report, make_row

RUN = RunSettings(vocab_size=1100, seq_length=128)
FAMILY = TttdFamily(TttdOptions(groups_per_step=2, rollouts_per_group=3, kl_coef=0))


def group(name: str, *rewards: float) -> list[Row]:
    return [make_row(f"{name}{n}", group=name, reward=reward, length=n + 1) for n, reward in enumerate(rewards)]


def test_a_rollouts_advantage_is_on_every_token_with_a_recorded_log_prob() -> None:
    forced_and_tool = replace(
        make_row("g9", rollout="g2", group="g", reward=1.0, length=4, mask=[0, 1, 0, 1]),
        rollout_log_probs=np.asarray([-0.5, -0.5, math.nan, -0.5], dtype=np.float32),
    )
    batch = make_batch(*group("g", 0.0, 0.5, 1.0), forced_and_tool)
    signal = FAMILY.prepare(batch, {})
    expected = entropic_advantages([0.0, 0.5, 1.0]).tolist()
    assert signal.advantages is not None
    assert [values.tolist() for values in signal.advantages[:3]] == [
        pytest.approx([expected[n]] * (n + 1)) for n in range(3)
    ]
    assert signal.advantages[3].tolist() == pytest.approx([expected[2], expected[2], 0.0, expected[2]])


def test_constant_groups_are_consumed_and_not_trained() -> None:
    batch = make_batch(*group("a", 1.0, 1.0), *group("b", 0.0, 1.0, 2.0), *group("c", 5.0))
    signal = FAMILY.prepare(batch, {})
    (step,) = build_train_steps(FAMILY, batch, signal)
    assert [item.row.sample_id for item in step.rows] == ["b0", "b1", "b2"]
    assert FAMILY.schedule_steps(batch).dropped == (0, 1, 5)
    assert signal.metrics["dropped_groups"] == 2
    assert signal.metrics["constant_group_rate"] == pytest.approx(2 / 3)


def test_the_first_group_is_kept_where_all_are_constant() -> None:
    batch = make_batch(*group("a", 1.0, 1.0), *group("b", 0.0, 0.0))
    signal = FAMILY.prepare(batch, {})
    (step,) = build_train_steps(FAMILY, batch, signal)
    assert [item.row.sample_id for item in step.rows] == ["a0", "a1"]
    assert all(item.advantages is not None and not item.advantages.any() for item in step.rows)


def test_groups_may_be_dealt_to_several_optimizer_steps() -> None:
    family = TttdFamily(TttdOptions(groups_per_step=3, rollouts_per_group=3, groups_per_optimizer_step=1))
    batch = make_batch(*group("a", 0.0, 1.0, 2.0), *group("b", 1.0, 1.0, 1.0), *group("c", 3.0, 1.0, 2.0))
    steps = build_train_steps(family, batch, family.prepare(batch, {}))
    assert [[item.row.group_id for item in step.rows] for step in steps] == [["a"] * 3, ["c"] * 3]


def test_a_token_weighs_one_whatever_the_size_of_the_step() -> None:
    rows = [row for name in "abc" for row in group(name, 0.0, 1.0)]
    for count in (1, 2, 6):
        weights = FAMILY.row_weights(rows[:count], [row.response_length for row in rows[:count]])
        assert [weight.policy for weight in weights] == [1.0] * count
    assert weights[1] == RowWeights(1.0, 1 / 12, 1 / 12)


def test_the_best_reward_is_kept_over_jobs_and_of_dropped_groups_too() -> None:
    state: FamilyState = {"other": 1}
    seen = []
    for rewards in ([0.0, 1.0, 2.0], [7.0, 7.0, 7.0], [3.0, 6.0, 7.0]):
        signal = FAMILY.prepare(make_batch(*group("a", *rewards), *group("b", 0.5, 0.25)), state)
        state = signal.new_state
        seen.append(signal.metrics["best_reward"])
    assert seen == [2.0, 7.0, 7.0]
    assert state == {"other": 1, "best_reward": 7.0, "best_rollout": "a0"}


def test_rows_of_one_rollout_must_agree_on_its_reward() -> None:
    batch = make_batch(make_row("a1", rollout="a", reward=1.0), make_row("a2", rollout="a", reward=0.5))
    with pytest.raises(InvalidInput, match=r"sample a2: reward 0\.5 differs from 1\.0"):
        FAMILY.prepare(batch, {})


def test_the_base_is_needed_for_its_kl_only() -> None:
    assert FAMILY.configure_backend(RUN) == BackendNeeds()
    with_kl = TttdFamily(TttdOptions(kl_coef=0.1))
    assert with_kl.configure_backend(RUN) == BackendNeeds(reference_log_probs=True)
    assert with_kl.requires_rollout_log_probs
    with pytest.raises(InvalidInput, match=r"stack\.yaml: tttd: kl_coef 0\.1 is refused: only 0 is allowed"):
        with_kl.validate_specific_args(RUN, "stack.yaml")
    centred = replace(RUN, score_centering=True)
    with pytest.raises(InvalidInput, match="tttd declares no policy-gradient weight"):
        FAMILY.validate_specific_args(centred, "stack.yaml")


@pytest.mark.parametrize("mode", ["sample_mean", "token_mean", "prompt_mean", "constant"])
def test_every_aggregation_but_its_own_is_refused(mode: str) -> None:
    with pytest.raises(InvalidInput, match=f"loss_aggregation: Input should be 'token_sum', got '{mode}'"):
        TttdFamily.from_options({"loss_aggregation": mode})
    TttdFamily.from_options({"loss_aggregation": "token_sum"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rollouts_per_group": 2},
            "rollouts_per_group 2 is refused with advantage_clip 0: .*set advantage_clip above 0",
        ),
        ({"advantage_clip": -1}, "advantage_clip"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"rollouts_per_group": 0}, "rollouts_per_group"),
        ({"groups_per_optimizer_step": 0}, "groups_per_optimizer_step"),
        ({"calculate_per_token_loss": True}, "tttd has no option calculate_per_token_loss"),
    ],
)
def test_settings_that_cannot_train_are_refused(values: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TttdFamily.from_options(values)


def test_two_rollouts_are_fine_with_a_clip() -> None:
    assert TttdOptions(rollouts_per_group=2, advantage_clip=10).rollouts_per_group == 2


def test_its_reports_are_cells_of_a_grid_of_one_version() -> None:
    cells = [
        replace(
            make_report(f"r{g}{r}"),
            metadata={"step": 0, "group": g, "rollout": r, "groups_per_step": 2, "rollouts_per_group": 3},
            weight_versions=("1:3",),
        )
        for g in range(2)
        for r in range(3)
    ]
    rule = FAMILY.batching
    for cell in cells:
        rule.validate(cell)
    assert rule.form(cells) == [("r00", "r01", "r02", "r10", "r11", "r12")]
    assert rule.form([*cells[:5], replace(cells[5], weight_versions=("1:4",))]) == []
    for name in ("step", "group", "rollout", "groups_per_step", "rollouts_per_group"):
        bad = {**cells[0].metadata, name: "x"}
        with pytest.raises(InvalidInput, match=rf"metadata\.{name}: a whole number .* got 'x'"):
            rule.validate(replace(cells[0], metadata=bad))
