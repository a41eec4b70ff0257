"""Looks at pending reports when something besides a new report may have changed what can be trained.

```
gateway starts | head changed | batch cancelled | another gateway did any of it
   --> per scenario: settle what is too old, reserve what is complete (batching.py) --> training queue
```
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from atoll.common.errors import AtollError
from atoll.gateway.batching import Formed, form_batches
from atoll.gateway.database import Database, lock_scenario
from atoll.gateway.head import Head
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import reports
from sqlalchemy import func, select

log = structlog.get_logger(__name__)

POLL_SECONDS = 5.0
"""How soon what another gateway left behind is seen."""

Binding = Callable[[str], Awaitable[BoundScenario]]


@dataclass(frozen=True)
class _Waiting:
    """What a look depends on: the same again leads to nothing. Example: _Waiting(3, 17, 0, Head(2, "1:2", ...))"""

    reports: int
    newest: int
    epochs: int
    head: Head | None


class BatchForming:
    """Runs in the background for as long as the gateway runs; attach() before start()."""

    def __init__(self, database: Database, pending: PendingReports) -> None:
        self._database = database
        self._pending = pending
        self._binding: Binding | None = None
        self._head: Callable[[str], Head | None] = lambda _: None
        self._on_batch: Callable[[], None] = lambda: None
        self._seen: dict[str, _Waiting] = {}
        self._wake = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    def attach(self, binding: Binding, head: Callable[[str], Head | None], on_batch: Callable[[], None]) -> None:
        """binding, head and on_batch: as for ReportIntake."""
        self._binding, self._head, self._on_batch = binding, head, on_batch

    def start(self) -> None:
        """Looks at once, and then whenever it is woken."""
        assert self._binding is not None
        self._main = asyncio.create_task(self._run(self._binding))

    async def stop(self) -> None:
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)

    def wake(self) -> None:
        """A head changed, or a batch was cancelled."""
        self._wake.set()

    async def _run(self, binding: Binding) -> None:
        while True:
            self._wake.clear()
            for scenario, waiting in (await self._changed()).items():
                try:
                    await self._look(await binding(scenario), waiting)
                except AtollError as error:
                    log.warning("pending reports not looked at", scenario=scenario, error=error.message)
                except Exception as defect:  # a loop that ended here would leave reports waiting, in silence
                    log.error("pending reports not looked at", scenario=scenario, exc_info=defect)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()

    async def _changed(self) -> dict[str, _Waiting]:
        """Scenarios whose pending reports, or whose head, are not as they were at the last look."""
        try:
            waiting = await asyncio.to_thread(self._waiting)
        except Exception as error:
            log.error("pending reports not counted", exc_info=error)
            return {}
        return {scenario: found for scenario, found in waiting.items() if self._seen.get(scenario) != found}

    async def _look(self, bound: BoundScenario, waiting: _Waiting) -> None:
        formed = await asyncio.to_thread(self._form, bound, waiting.head)
        self._seen[bound.scenario_id] = waiting
        if formed.batches:
            jobs = [batch.job_id for batch in formed.batches]
            log.info("batches formed without a new report", scenario=bound.scenario_id, jobs=jobs)
            self._on_batch()

    def _form(self, bound: BoundScenario, head: Head | None) -> Formed:
        with self._database.writing() as connection:
            lock_scenario(connection, bound.scenario_id)
            pending = self._pending.read(connection, bound.scenario_id)
            return form_batches(connection, bound, pending, head, datetime.now(UTC))

    def _waiting(self) -> dict[str, _Waiting]:
        own = reports.c
        query = select(own.scenario, func.count(), func.max(own.position), func.sum(own.epoch))
        query = query.where(own.job_id.is_(None)).group_by(own.scenario)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return {
            scenario: _Waiting(count, newest, int(epochs), self._head(scenario))
            for scenario, count, newest, epochs in rows
        }
