"""An intake of reports on a database of its own, for tests that need no gateway around it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from atoll.common.errors import AtollError
from atoll.gateway.database import Database
from atoll.gateway.head import Head
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import NewReport
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import batch_rows, reports, request_answers
from sqlalchemy import func, select

from tests.gateway.store_world import (
    SCENARIO,
    bound_scenario,
    new_sample,
    url_of,
)


class Desk:
    """An intake without a registry, and what it needs around it."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(url_of(directory))
        self.receipts = Receipts(self.database.key("receipts"))
        self.writer = SampleWriter(self.database)
        self.woken = 0
        self.head: Head | None = None
        self.max_staleness = 0
        self.pending = PendingReports()
        self.intake = ReportIntake(
            self.database, self.receipts, self._binding, lambda _: self.head, self.pending, self._wake
        )

    async def _binding(self, scenario: str) -> BoundScenario:
        return replace(bound_scenario(scenario), max_staleness=self.max_staleness)

    def _wake(self) -> None:
        self.woken += 1

    async def record(self, scenario: str = SCENARIO, **properties: Any) -> str:
        receipt = self.receipts.issue(scenario)
        await self.writer.record(new_sample(receipt, scenario, **properties))
        return receipt

    async def refusal(self, report: NewReport) -> AtollError:
        """The refusal of a report; nothing may be stored by it."""
        before = self.counts()
        with pytest.raises(AtollError) as refusal:
            await self.intake.create(report)
        assert self.counts() == before
        return refusal.value

    def counts(self) -> list[int]:
        with self.database.reading() as connection:
            return [
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (reports, request_answers, batch_rows)
            ]
