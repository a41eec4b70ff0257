"""Asking again, for ever, what a service that is away will answer later: a finished step is never thrown away."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from atoll.common.errors import Unavailable
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long to pause between tries: random, doubling from `initial_s` to `max_s`. Example: Patience(0.2, 15.0)."""

    initial_s: float = 0.2
    max_s: float = 15.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after that many earlier failures, for callers with a loop of their own."""
        return min(self.initial_s * 2.0 ** min(failures, 30), self.max_s)

    async def ask(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """The call's answer, however long it takes. Only Unavailable is asked again; every other error passes."""

        def say(state: RetryCallState) -> None:
            failure = None if state.outcome is None else state.outcome.exception()
            log.warning("asking again", what=what, attempt=state.attempt_number, error=str(failure))

        async def once() -> T:
            return await call()

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=wait_random_exponential(multiplier=self.initial_s, max=self.max_s),
            before_sleep=say,
        )
        return await retrying(once)
