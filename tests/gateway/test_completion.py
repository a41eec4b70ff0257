import numpy as np
import pytest
from atoll.common.engine_types import Finish, FinishReason, GenerationChunk, Usage, WeightSpan
from atoll.common.errors import InternalError
from atoll.gateway.completion import Completion


def chunk(text: str, finish: Finish | None = None) -> GenerationChunk:
    ids, log_probs = np.array([7], dtype=np.int32), np.array([-0.5], dtype=np.float32)
    return GenerationChunk(index=0, token_ids=ids, log_probs=log_probs, text=text, top_k=None, finish=finish)


def stopped(count: int) -> Finish:
    return Finish(FinishReason.STOP, "t", "", (WeightSpan("1:0", 0, count),), Usage(1, count, 0))


@pytest.mark.parametrize(
    ("last", "stop", "text"),
    [
        ("ibutter", ("e", "t"), "ibu"),
        ("ibutter", ("t", "e"), "ibu"),
        ("END", ("END",), ""),
        ("nothing", ("x",), "nothing"),
        ("nothing", (), "nothing"),
    ],
)
def test_a_reply_ends_before_the_earliest_stop_string_whatever_their_order(
    last: str, stop: tuple[str, ...], text: str
) -> None:
    completion = Completion(0, "4f0c", stop)
    completion.add(chunk("so "))
    assert completion.add(chunk(last, stopped(2))).text == text
    assert completion.text == "so " + text
    assert completion.token_count == 2


def test_a_stop_string_that_began_in_sent_text_takes_the_rest_of_it() -> None:
    completion = Completion(0, "4f0c", ("stop",))
    completion.add(chunk("st"))
    assert completion.add(chunk("op it", stopped(2))).text == ""


def test_a_reply_without_an_end_makes_no_sample() -> None:
    from datetime import UTC, datetime

    from atoll.common.engine_types import SamplingParams

    completion = Completion(0, "4f0c", ())
    completion.add(chunk("so"))
    with pytest.raises(InternalError, match="has no end"):
        completion.sample("demo", {}, [], [1], SamplingParams(max_new_tokens=1), datetime.now(UTC))
