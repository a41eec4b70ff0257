"""What the teacher needs of an engine: log-probs made of the ids, at a pace that the test sets."""

import asyncio

import numpy as np
from atoll.common.engine_types import Ids, ScoreResult, TopK


class FakeScoringEngine:
    """Answers -id / 1000 for each id; holds a sequence whose prompt starts with 9 until `go_on` is set.

    `failures` maps the first prompt id to the errors that its sequence gets, one each time.
    """

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.failures: dict[int, list[Exception]] = {}
        self.in_flight_tokens = 0
        self.most_in_flight = 0
        self.started: list[int] = []

    async def score(self, prompt_ids: Ids, response_ids: Ids, top_k: int = 0) -> ScoreResult:
        first = int(prompt_ids[0])
        self.started.append(first)
        tokens = len(prompt_ids) + len(response_ids)
        self.in_flight_tokens += tokens
        self.most_in_flight = max(self.most_in_flight, self.in_flight_tokens)
        try:
            await asyncio.sleep(0)
            if first == 9:
                await self.go_on.wait()
            if self.failures.get(first):
                raise self.failures[first].pop(0)
        finally:
            self.in_flight_tokens -= tokens
        log_probs = (-response_ids / 1000).astype(np.float32)
        shape = (len(response_ids), top_k)
        chosen = None if top_k == 0 else TopK(np.ones(shape, np.int32), np.full(shape, -1, np.float32))
        return ScoreResult(log_probs, chosen, "0:0")
