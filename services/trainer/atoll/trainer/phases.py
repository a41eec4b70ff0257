"""Seconds of every phase of a job, which go into its version as `perf/<phase>_seconds`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class PhaseClock:
    """Example: `with clock.phase("pull"): ...`; clock.metrics() -> {"perf/pull_seconds": 0.2}. A repeat adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.metric(f"perf/{name}_seconds"):
            yield

    @contextmanager
    def metric(self, name: str) -> Iterator[None]:
        """The same for a metric of another name, in full."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> Mapping[str, float]:
        return dict(self._seconds)
