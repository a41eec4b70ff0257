"""Notices a head whose bytes engines refuse and none loads, and asks once for the way back."""

import hashlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import structlog
from atoll.trainer.chain import ChainVersion

log = structlog.get_logger(__name__)

OnRefusedHead = Callable[[ChainVersion], Awaitable[None]]


def automatic_rollback_id(scenario: str, number: int) -> str:
    """Job id of the rollback that head `number` causes when no engine loads it: the same whoever asks for it."""
    return f"rollback-{hashlib.sha256(f'{scenario}/{number}'.encode()).hexdigest()[:32]}"


class HeadWatch:
    """Belongs to one event loop. A head is refused when engines said no to its bytes and none took them in time.

    Engines that do not answer never make one refused, and what an automatic rollback brought back never is. Nor is a
    head that stood for longer than that before this trainer could act: whether engines served it is not known any more,
    and going back from one that they did would throw its training away.
    """

    def __init__(
        self,
        scenario: str,
        timeout_s: float,
        on_refused_head: OnRefusedHead,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`timeout_s`, counted from when the head was first seen; 0 watches nothing. `now`: the clock of commits."""
        self._scenario = scenario
        self._timeout_s = timeout_s
        self._on_refused_head = on_refused_head
        self._clock = clock
        self._now = now
        self._acts_since: datetime | None = None
        self._head: ChainVersion | None = None
        self._since = 0.0
        self._refused = False
        self._done = False
        """It was loaded or asked for, or is too old to be in doubt."""

    def note_lease(self, held: bool) -> None:
        """Call with every look: whether this trainer may act."""
        if not held:
            self._acts_since = None
        elif self._acts_since is None:
            self._acts_since = self._now()

    def see(self, head: ChainVersion) -> None:
        """Call with every head before engines are driven to it."""
        if self._head is None or head.number > self._head.number:
            self._head, self._since = head, self._clock()
            self._refused, self._done = False, self._is_old(head)

    def note_refused(self, head: ChainVersion) -> None:
        """An engine answered that it does not take the head's bytes."""
        if self._is_current(head) and not self._refused and self._is_old(head):
            log.warning("an engine refuses a head that may have been served long since", version=head.number)
        self._refused = self._refused or self._is_current(head)

    def note_loaded(self, head: ChainVersion) -> None:
        """An engine serves the head."""
        self._done = self._done or self._is_current(head)

    async def check(self) -> None:
        """Asks for the way back when it is time. Raises nothing: what fails is tried again by the next call."""
        head = self._head
        if head is None or self._done or not self._refused or self._timeout_s <= 0:
            return
        if self._clock() - self._since < self._timeout_s:
            return
        self._done = True
        if self._is_automatic_rollback(head):
            log.error("no engine loads what a rollback brought back; roll back by hand", version=head.number)
            return
        log.error("no engine loads the head", version=head.number, waited_s=self._timeout_s)
        try:
            await self._on_refused_head(head)
        except Exception as error:
            self._done = False
            log.error("the way back could not be asked for, trying again", version=head.number, error=str(error))

    def _is_old(self, head: ChainVersion) -> bool:
        if head.committed_at is None or self._acts_since is None:
            return False
        return head.committed_at + timedelta(seconds=self._timeout_s) < self._acts_since

    def _is_automatic_rollback(self, head: ChainVersion) -> bool:
        # The head that caused it need not be its parent: jobs that were queued before it commit first.
        since = 0 if head.restores is None else head.restores
        return any(head.job_id == automatic_rollback_id(self._scenario, n) for n in range(since, head.number))

    def _is_current(self, head: ChainVersion) -> bool:
        return self._head is not None and head.number == self._head.number
