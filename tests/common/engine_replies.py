"""What the tests of the engine client share."""

from collections.abc import AsyncIterator, Sequence

import numpy as np
from atoll.common.engine_types import GenerationChunk, Ids, LogProbs

PROMPT = [1, 100, 200, 300, 1023, 2, 7]
"""Holds the last id of the vocabulary, which SGLang reports as another one."""

TOLERANCE = 1e-4
"""In nats: float32 sums in another order."""


async def collect(chunks: AsyncIterator[GenerationChunk]) -> list[GenerationChunk]:
    """The whole stream."""
    return [chunk async for chunk in chunks]


def joined(chunks: Sequence[GenerationChunk]) -> tuple[Ids, LogProbs]:
    """The ids and log-probs of the chunks of one choice."""
    return np.concatenate([c.token_ids for c in chunks]), np.concatenate([c.log_probs for c in chunks])
