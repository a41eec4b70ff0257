"""What a call to all ranks came to: their results, one refusal of all, or the rank to blame."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from atoll.trainer.workers.messages import Answer, Raised, Refused, Returned

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16_384
GRACE_S = 1.5
"""After one rank failed the others usually fail too, and one of them may name the cause (a rank that was killed
shows up beside peers that only lost a connection): seconds to wait for it."""


class RankFailed(Exception):
    """The group is of no use any more; ``rank`` is the likeliest cause."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


def results_of(answers: Mapping[int, Answer], lost: Mapping[int, str], size: int, timeout_s: float) -> list[object]:
    """Results in rank order. ``lost`` says of each rank whose process is gone how it ended.

    Raises:
        WorkerRefusal: every rank refused.
        RankFailed: a rank is gone, raised, is missing from both (it was late), or refused alone.
    """
    if lost:
        # A rank that a signal ended is the cause, one that exited may have followed it.
        rank = min(lost, key=lambda rank: ("signal" not in lost[rank], rank))
        raise RankFailed(rank, lost[rank])
    for rank, answer in answers.items():
        if isinstance(answer, Raised):
            raise RankFailed(rank, f"raised {answer.summary}")
    for rank in range(size):
        if rank not in answers:
            raise RankFailed(rank, f"did not answer within {timeout_s:g} s")
    refused = {rank: answer.refusal for rank, answer in answers.items() if isinstance(answer, Refused)}
    if len(refused) == size:
        raise refused[0]
    if refused:
        rank = min(refused)
        raise RankFailed(rank, f"refused what other ranks accepted: {refused[rank]}")
    return [answer.value for _, answer in sorted(answers.items()) if isinstance(answer, Returned)]


def log_tail(path: Path, start: int) -> str:
    """The last lines of a rank's log, not further back than byte ``start``: a restart appends to the same file."""
    with path.open("rb") as log:
        log.seek(max(start, path.stat().st_size - _LOG_TAIL_BYTES))
        text = log.read().decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])
