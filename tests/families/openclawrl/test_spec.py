"""What openclawrl declares: its row with the candidates that fit, its one optimizer step, and every refusal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from atoll.common.errors import InvalidInput
from atoll.families.catalog import make_family
from atoll.families.openclawrl import OpenClawRlFamily, OpenClawRlOptions
from atoll.families.openclawrl.spec import HINT_LENGTHS, HINT_TOKENS, SAMPLER_IDS
from atoll.families.rows import Row, validate_rows
from atoll.families.run_settings import BackendNeeds, RunSettings
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.steps import TrainStep, build_train_steps
from pydantic import JsonValue

from tests.families.reported import reported
from tests.families.rows import make_batch

RUN = RunSettings(vocab_size=20, seq_length=7)
FAMILY = OpenClawRlFamily(OpenClawRlOptions(top_k=2)).bind(RUN)


def shaped(item: ReportedSample, family: OpenClawRlFamily = FAMILY) -> Row:
    return family.shape_sample_row(item, RowContext((item,)))


def hinted(*candidates: list[JsonValue], top_k: int = 4) -> ReportedSample:
    return reported("a", top_k=top_k, metadata={"hint_candidates": list(candidates)})


def test_a_row_carries_the_engines_ids_and_the_candidates() -> None:
    row = shaped(hinted([5, 6, 7], [8]))
    assert row.columns[SAMPLER_IDS].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert row.columns[HINT_TOKENS].tolist() == [5, 6, 7, 8]
    assert row.columns[HINT_LENGTHS].tolist() == [3, 1]
    validate_rows([row], vocab_size=20, columns=FAMILY.columns)


def test_a_candidate_longer_than_the_workers_take_is_dropped() -> None:
    row = shaped(hinted([1] * 5, [1] * 4, [2] * 9))
    assert row.columns[HINT_LENGTHS].tolist() == [4]
    assert shaped(hinted([1] * 5)).columns[HINT_LENGTHS].tolist() == []
    assert shaped(reported("a", top_k=2)).columns[HINT_TOKENS].tolist() == []


def test_a_candidate_outside_the_vocabulary_names_the_sample() -> None:
    with pytest.raises(InvalidInput, match=r"sample sample-of-a: hint candidate 1: .* \[0, 20\), got 20"):
        shaped(hinted([19], [3, 20]))


@pytest.mark.parametrize("captured", [0, 1])
def test_a_sample_with_fewer_captured_ids_is_refused(captured: int) -> None:
    with pytest.raises(InvalidInput, match=rf"sample-of-a: .* 2 most likely ids and {captured} were captured"):
        shaped(reported("a", top_k=captured))


def test_the_gateway_is_told_how_many_ids_to_record() -> None:
    assert FAMILY.sampler_top_k == 2
    assert make_family("sft", {}).sampler_top_k == 0


def test_every_tokens_advantage_is_the_turns_reward() -> None:
    items = (reported("a", score=-1.0, top_k=2), reported("b", score=0.0, top_k=2), hinted([3]))
    items = (*items[:2], replace(items[2], sample=replace(items[2].sample, sample_id="third")))
    batch = make_batch(*(FAMILY.shape_sample_row(item, RowContext(items)) for item in items))
    signal = FAMILY.prepare(batch, {"kept": 1})
    (step,) = build_train_steps(FAMILY, batch, signal)
    assert [item.advantages.tolist() for item in step.rows if item.advantages is not None] == [
        [-1.0] * 3,
        [0.0] * 3,
        [1.0] * 3,
    ]
    assert signal.metrics == {"hinted_rate": pytest.approx(1 / 3)}
    assert signal.new_state == {"kept": 1}


class ActorOnly:
    def train_actor(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        return [{"loss": 0.5} for _ in steps]

    def train_critic(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        raise AssertionError("no critic here")

    def compute_advantages(self, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        raise AssertionError("prepare gave the advantages")


def test_more_than_one_optimizer_step_is_refused() -> None:
    assert FAMILY.train(ActorOnly(), [TrainStep(())]) == [{"loss": 0.5}]
    with pytest.raises(InvalidInput, match="openclawrl takes 1 optimizer step per job, got 2; make batch_size"):
        FAMILY.train(ActorOnly(), [TrainStep(()), TrainStep(())])


def test_the_backend_keeps_the_base() -> None:
    assert FAMILY.configure_backend(RUN) == BackendNeeds(old_log_probs=True, frozen_base=True)
    with_kl = OpenClawRlFamily(OpenClawRlOptions(kl_loss_coef=0.1))
    assert with_kl.configure_backend(RUN).reference_log_probs
    with pytest.raises(InvalidInput, match=r"stack\.yaml: openclawrl uses a reference model and the run has none"):
        with_kl.validate_specific_args(replace(RUN, vocab_size=100), "stack.yaml")
    with pytest.raises(InvalidInput, match="openclawrl declares no policy-gradient weight"):
        FAMILY.validate_specific_args(replace(RUN, score_centering=True), "stack.yaml")


def test_a_top_k_beyond_the_vocabulary_is_refused() -> None:
    OpenClawRlFamily(OpenClawRlOptions(top_k=20)).validate_specific_args(RUN, "stack.yaml")
    with pytest.raises(InvalidInput, match=r"stack\.yaml: openclawrl: top_k 21 is refused: from 1 to 20"):
        OpenClawRlFamily(OpenClawRlOptions(top_k=21)).validate_specific_args(RUN, "stack.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hint_selection": "longest"}, "'shortest', 'token_optimal' or 'sequence_optimal'"),
        ({"hint_scope": "turn"}, "'sample' or 'span'"),
        ({"hint_scope": "span", "hint_selection": "shortest"}, "hint_scope span is only for .* got shortest"),
        ({"subset": "both"}, "'student', 'overlap' or 'teacher'"),
        ({"w_rl": -1}, "w_rl"),
        ({"w_opd": -1}, "w_opd"),
        ({"top_k": 0}, "top_k"),
        ({"adv_diff_clip": -1}, "adv_diff_clip"),
        ({"eps_clip": 1}, "eps_clip"),
        ({"eps_clip_high": 0}, "eps_clip_high"),
        ({"kl_loss_coef": -1}, "kl_loss_coef"),
        ({"entropy_coef": -1}, "entropy_coef"),
        ({"batch_size": 0}, "batch_size"),
        ({"w_rlx": 1}, "did you mean w_rl"),
    ],
)
def test_settings_that_cannot_train_are_refused(values: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        OpenClawRlFamily.from_options(values)


def test_the_gateways_family_knows_no_run_and_keeps_every_candidate() -> None:
    row = shaped(hinted([1] * 5), OpenClawRlFamily(OpenClawRlOptions(top_k=2)))
    assert row.columns[HINT_LENGTHS].tolist() == [5]
    assert row.columns[SAMPLER_IDS].dtype == np.int32
