"""What the teacher measured of itself."""

import time
from collections import deque
from collections.abc import Callable, Iterable

from atoll.teacher.sequences import Sequence

WINDOW_SECONDS = 60.0
KEPT_SEQUENCES = 1_000


class Measures:
    """Counts since start, the rate of the last minute, and mean times of the last thousand sequences."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sequences = 0
        self.response_tokens = 0
        self.failures = 0
        self._clock = clock
        self._started = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_tokens = 0
        self._times: deque[tuple[float, float]] = deque(maxlen=KEPT_SEQUENCES)

    def scored(self, sequence: Sequence, *, queued_s: float, engine_s: float) -> None:
        """A sequence has its result; seconds that it waited for its engine and that the engine took."""
        self.sequences += 1
        self.response_tokens += len(sequence.response_ids)
        self._recent.append((self._clock(), sequence.length))
        self._recent_tokens += sequence.length
        self._times.append((queued_s, engine_s))
        self._forget_old()

    def failed(self) -> None:
        self.failures += 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens (P + R) over the last minute, or since start when that is less."""
        self._forget_old()
        return self._recent_tokens / max(1.0, min(WINDOW_SECONDS, self._clock() - self._started))

    @property
    def mean_queue_seconds(self) -> float:
        return _mean(queued for queued, _ in self._times)

    @property
    def mean_engine_seconds(self) -> float:
        return _mean(taken for _, taken in self._times)

    def _forget_old(self) -> None:
        while self._recent and self._recent[0][0] < self._clock() - WINDOW_SECONDS:
            self._recent_tokens -= self._recent.popleft()[1]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
