"""One row from the turns of a conversation: what the policy sampled is trained, what stands between is not. Pure.

```
turn 1: prompt [P1] response [R1]
turn 2: prompt = turn 1's tokens + context [C], response [R2]
row:    prompt [P1] | response = R1 + C + R2     mask 1..1 0..0 1..1
```
Context (a tool's result, the user's next words, the template's own tokens) has mask 0, log-prob 0 and no candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from atoll.families.rows import Float32, Int32, UInt8, VersionSpan
from atoll.gateway.records import PackedSample
from atoll.gateway.sample_packing import SampleTensors, pack_tensors, unpack_tensors


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What decides whether samples are turns of one row. Example: Turn(tokens=[5, 6, 7, 2], prompt_length=2, 1.0)"""

    tokens: Int32
    """[P + R]"""
    prompt_length: int
    temperature: float


def trajectories(turns: Sequence[Turn]) -> tuple[int, ...]:
    """For each turn, in their order, the number of its row: 0, 1, ...

    A turn goes on with the row before it when its prompt begins with every token of that row. A row has one
    temperature, so a turn at another one begins a new row.
    """
    numbers: list[int] = []
    for turn in turns:
        if not numbers:
            numbers.append(0)
            continue
        before = turns[len(numbers) - 1]
        number = numbers[-1]
        numbers.append(number if _goes_on(before, turn) else number + 1)
    return tuple(numbers)


def _goes_on(before: Turn, turn: Turn) -> bool:
    length = len(before.tokens)
    return (
        turn.temperature == before.temperature
        and turn.prompt_length >= length
        and np.array_equal(turn.tokens[:length], before.tokens)
    )


def joined(turns: Sequence[PackedSample]) -> PackedSample:
    """The row of turns that `trajectories` put together, under the first one's receipt and request.

    Candidates are kept where every turn has them, as many as the turn with the fewest; a turn without drops them for
    the row. The reply's text is that of all turns, a line each.
    """
    if len(turns) == 1:
        return turns[0]
    parts = [unpack_tensors(turn) for turn in turns]
    first = turns[0].sample
    width = min(turn.sample.top_k for turn in turns)
    masks: list[UInt8] = []
    log_probs: list[Float32] = []
    ids: list[Int32] = []
    candidate_log_probs: list[Float32] = []
    spans: list[VersionSpan] = []
    reached = first.prompt_length
    for turn, part in zip(turns, parts, strict=True):
        context = turn.sample.prompt_length - reached
        start = turn.sample.prompt_length - first.prompt_length
        masks += [np.zeros(context, np.uint8), part.loss_mask]
        log_probs += [np.zeros(context, np.float32), part.log_probs]
        if width:
            assert part.top_k_ids is not None and part.top_k_log_probs is not None
            ids += [np.full((context, width), -1, np.int32), part.top_k_ids[:, :width]]
            candidate_log_probs += [
                np.full((context, width), -np.inf, np.float32),
                part.top_k_log_probs[:, :width],
            ]
        spans = _followed(spans, start, turn.sample.spans)
        reached = turn.sample.prompt_length + turn.sample.response_length
    last = turns[-1].sample
    row = replace(
        first,
        response_length=reached - first.prompt_length,
        top_k=width,
        finish_reason=last.finish_reason,
        spans=tuple(spans),
        text="\n".join(turn.sample.text for turn in turns),
    )
    tensors = SampleTensors(
        token_ids=parts[-1].token_ids,
        loss_mask=np.concatenate(masks),
        log_probs=np.concatenate(log_probs),
        top_k_ids=np.concatenate(ids) if width else None,
        top_k_log_probs=np.concatenate(candidate_log_probs) if width else None,
    )
    return PackedSample(row, pack_tensors(tensors))


def _followed(spans: Sequence[VersionSpan], start: int, turn: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Spans that cover the row up to the end of a turn; context belongs to the version before it."""
    shifted = [VersionSpan(span.start + start, span.end + start, span.weight_version) for span in turn]
    if not spans:
        return shifted
    return [*spans[:-1], replace(spans[-1], end=start), *shifted]
