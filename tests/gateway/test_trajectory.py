"""Turns become one row: what was sampled is trained, what stands between is not."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from atoll.families.rows import VersionSpan
from atoll.gateway.records import NewSample, PackedSample, Sample, SampleState
from atoll.gateway.sample_packing import check_size, pack, unpack_tensors
from atoll.gateway.trajectory import Turn, joined, trajectories

from tests.gateway.store_world import new_sample


def turn(tokens: list[int], prompt_length: int, temperature: float = 1.0) -> Turn:
    return Turn(np.array(tokens, np.int32), prompt_length, temperature)


def test_turns_that_extend_each_other_are_one_row_and_others_begin_a_new_one() -> None:
    first = turn([1, 2, 7, 8], 2)
    second = turn([1, 2, 7, 8, 3, 9], 5)
    assert trajectories([first]) == (0,)
    assert trajectories([first, second]) == (0, 0)
    assert trajectories([second, first]) == (0, 1), "the order is the reporter's"
    assert trajectories([first, turn([1, 2, 7, 9, 3, 9], 5)]) == (0, 1), "one token of the reply differs"
    assert trajectories([first, turn([1, 2, 7, 8, 9], 3)]) == (0, 1), "the prompt ends within the reply"
    assert trajectories([first, turn([1, 2, 7, 8, 9], 4)]) == (0, 0), "nothing between the turns"
    assert trajectories([first, second, turn([5, 6], 1), turn([5, 6, 7], 2)]) == (0, 0, 1, 1)


def test_a_turn_at_another_temperature_begins_a_new_row() -> None:
    assert trajectories([turn([1, 2], 1), turn([1, 2, 3, 4], 3, temperature=0.7)]) == (0, 1)


def recorded(sample: NewSample) -> PackedSample:
    """As it is read back."""
    row = pack(sample)
    read = Sample(
        scenario=sample.scenario,
        receipt=sample.receipt,
        state=SampleState.RESERVED,
        created_at=datetime.now(UTC),
        prompt_length=row["prompt_length"],
        response_length=row["response_length"],
        top_k=row["top_k"],
        temperature=1.0,
        exact=True,
        finish_reason="stop",
        aborted=False,
        spans=sample.spans,
        request=sample.request,
        text=sample.text,
        sampling={},
    )
    return PackedSample(read, row["tensors"])


def conversation(*top_k: int, context: int = 2) -> list[NewSample]:
    """Turns whose prompts extend each other, with so many candidates each."""
    turns: list[NewSample] = []
    tokens = np.zeros(0, np.int32)
    for number, k in enumerate(top_k):
        new = new_sample(f"turn-{number}", prompt=3, response=4, top_k=k, weight_version=f"1:{number}")
        prompt = np.concatenate([tokens, new.prompt_ids[: context if number else 3]])
        tokens = np.concatenate([prompt, new.response_ids])
        turns.append(replace(new, prompt_ids=prompt, text=f"reply {number}"))
    return turns


def test_a_row_of_turns_trains_the_replies_and_nothing_between_them() -> None:
    first, second, third = conversation(0, 0, 0)
    row = joined([recorded(first), recorded(second), recorded(third)])
    check_size(row.sample, row.tensors)
    tensors = unpack_tensors(row)
    assert (row.sample.receipt, row.sample.prompt_length, row.sample.response_length) == ("turn-0", 3, 16)
    np.testing.assert_array_equal(tensors.token_ids, np.concatenate([third.prompt_ids, third.response_ids]))
    assert tensors.loss_mask.tolist() == [1] * 4 + [0] * 2 + [1] * 4 + [0] * 2 + [1] * 4
    between = np.zeros(2, np.float32)
    expected = [first.log_probs, between, second.log_probs, between, third.log_probs]
    np.testing.assert_array_equal(tensors.log_probs, np.concatenate(expected))
    assert row.sample.spans == (VersionSpan(0, 6, "1:0"), VersionSpan(6, 12, "1:1"), VersionSpan(12, 16, "1:2"))
    assert row.sample.text == "reply 0\nreply 1\nreply 2" and row.sample.top_k == 0


def test_every_sampled_token_keeps_its_own_candidates_and_context_has_none() -> None:
    first, second = conversation(3, 2)
    row = joined([recorded(first), recorded(second)])
    check_size(row.sample, row.tensors)
    tensors = unpack_tensors(row)
    assert row.sample.top_k == 2, "as many as every turn has"
    assert tensors.top_k_ids is not None and tensors.top_k_log_probs is not None
    assert first.top_k_ids is not None and second.top_k_ids is not None and first.top_k_log_probs is not None
    np.testing.assert_array_equal(tensors.top_k_ids[:4], first.top_k_ids[:, :2])
    np.testing.assert_array_equal(tensors.top_k_ids[6:], second.top_k_ids)
    np.testing.assert_array_equal(tensors.top_k_log_probs[:4], first.top_k_log_probs[:, :2])
    assert (tensors.top_k_ids[4:6] == -1).all() and np.isneginf(tensors.top_k_log_probs[4:6]).all()


@pytest.mark.parametrize("top_k", [(3, 0), (0, 3)])
def test_a_turn_without_candidates_drops_them_for_the_row(top_k: tuple[int, int]) -> None:
    turns = conversation(*top_k)
    row = joined([recorded(turn) for turn in turns])
    check_size(row.sample, row.tensors)
    assert row.sample.top_k == 0 and unpack_tensors(row).top_k_ids is None


def test_a_turn_right_after_another_needs_no_context() -> None:
    row = joined([recorded(turn) for turn in conversation(0, 0, context=0)])
    assert unpack_tensors(row).loss_mask.tolist() == [1] * 8
    assert [span.end for span in row.sample.spans] == [4, 8]


def test_a_sample_alone_is_its_own_row() -> None:
    alone = recorded(new_sample("alone", top_k=2))
    assert joined([alone]) is alone
