"""Reads recorded samples and batches. It never changes one."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, Conflict, NotFound
from atoll.common.pages import decode_number_token, encode_page_token, page_size
from atoll.gateway.database import Database, moment_of
from atoll.gateway.receipts import Receipts, is_receipt
from atoll.gateway.records import PackedSample, Report, Sample, SampleState
from atoll.gateway.sample_packing import check_size, sample_columns, unpack
from atoll.gateway.tables import batch_rows, batches, report_receipts, reports, sample_claims, samples
from atoll.gateway.trajectory import joined
from sqlalchemy import Connection, Select, select

PAGE_BYTES = 1 << 20
"""Of requests and replies on one page, as JSON, beyond the first: as a message it stays below the 4 MB that clients of
gRPC accept by default."""

_WITH_CLAIM = samples.outerjoin(sample_claims, sample_claims.c.receipt == samples.c.receipt)


@dataclass(frozen=True, slots=True, eq=False)
class ReportedPackedSample:
    """A row of a batch: the sample, its tensors, and the reports about it, oldest first."""

    packed: PackedSample
    reports: tuple[Report, ...]
    receipts: tuple[str, ...]
    """The samples that it is made of: its own, or the turns of a trajectory."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenedBatch:
    """A batch that is being read. Example: OpenedBatch("job-1a...", "math", 16, rows)"""

    job_id: str
    scenario: str
    row_count: int
    rows: AsyncIterator[ReportedPackedSample]
    """In the batch's order; each is read when it is asked for."""


class SampleStore:
    """Every method runs its queries on a worker thread."""

    def __init__(self, database: Database, receipts: Receipts) -> None:
        self._database = database
        self._receipts = receipts

    async def get(self, scenario: str, receipt: str) -> PackedSample:
        """Raises NotFound(RECEIPT_NOT_FOUND), Conflict(RECEIPT_NOT_RECORDED), InternalError(SAMPLE_CORRUPT)."""
        return (await self.get_with_reports(scenario, receipt)).packed

    async def get_with_reports(self, scenario: str, receipt: str) -> ReportedPackedSample:
        """The same with the reports about it."""

        if not is_receipt(receipt):
            raise absent_receipt(self._receipts, scenario, receipt)

        def read() -> ReportedPackedSample:
            with self._database.reading() as connection:
                found = _read_sample(connection, receipt)
                if found is None or found.sample.scenario != scenario:
                    raise absent_receipt(self._receipts, scenario, receipt)
                return ReportedPackedSample(found, tuple(_reports_about(connection, receipt)), (receipt,))

        return await asyncio.to_thread(read)

    async def page(
        self, scenario: str, state: SampleState | None = None, size: int = 0, token: str = ""
    ) -> tuple[Sequence[Sample], str]:
        """Samples, newest first, and the token of the next page, empty on the last.

        Raises InvalidInput for a size or token that is not allowed.
        """
        size = page_size(size)
        query = select(samples.c.position, *sample_columns()).select_from(_WITH_CLAIM)
        query = query.where(samples.c.scenario == scenario).order_by(samples.c.position.desc()).limit(size + 1)
        if state is SampleState.PENDING:
            query = query.where(sample_claims.c.receipt.is_(None))
        elif state is not None:
            query = query.where(sample_claims.c.state == state.value)
        after = decode_number_token(token)
        if after is not None:
            query = query.where(samples.c.position < after)
        return await asyncio.to_thread(self._page, query, size)

    async def open_batch(self, job_id: str) -> OpenedBatch:
        """Raises NotFound(JOB_NOT_FOUND)."""

        def read() -> tuple[str, list[tuple[str, ...]]]:
            with self._database.reading() as connection:
                scenario = connection.scalar(select(batches.c.scenario).where(batches.c.job_id == job_id))
                if scenario is None:
                    raise NotFound(
                        f"no batch of this gateway has job_id {job_id[:80]!r}",
                        reason=errors_pb2.REASON_JOB_NOT_FOUND,
                        field="job_id",
                    )
                return scenario, _rows_of(connection, job_id)

        scenario, rows = await asyncio.to_thread(read)
        return OpenedBatch(job_id, scenario, len(rows), self._rows(scenario, rows))

    async def _rows(self, scenario: str, rows: Sequence[tuple[str, ...]]) -> AsyncIterator[ReportedPackedSample]:
        for receipts in rows:
            turns = [await self.get_with_reports(scenario, receipt) for receipt in receipts]
            yield ReportedPackedSample(joined([turn.packed for turn in turns]), turns[0].reports, receipts)

    def _page(self, query: Select[tuple[object, ...]], size: int) -> tuple[Sequence[Sample], str]:
        found: list[Sample] = []
        last, read = "", 0
        with self._database.reading() as connection:
            for row in connection.execute(query):
                read += len(row.request) + len(row.text)
                if found and (len(found) == size or read > PAGE_BYTES):
                    return found, encode_page_token(last)
                found.append(unpack(row))
                last = str(row.position)
        return found, ""


def absent_receipt(receipts: Receipts, scenario: str, receipt: str) -> AtollError:
    """The refusal of a receipt without a sample: was it handed out?"""
    if receipts.was_issued(scenario, receipt):
        return Conflict(
            f"receipt {receipt}: its sample is not durable: the reply has not ended, or it ended with an error and "
            "nothing was recorded",
            reason=errors_pb2.REASON_RECEIPT_NOT_RECORDED,
            field="receipts",
        )
    shown = ascii(receipt if len(receipt) <= 64 else receipt[:64] + "...")
    return NotFound(
        f"no sample of scenario {scenario} has receipt {shown}",
        reason=errors_pb2.REASON_RECEIPT_NOT_FOUND,
        field="receipts",
    )


def _read_sample(connection: Connection, receipt: str) -> PackedSample | None:
    query = select(samples.c.tensors, *sample_columns()).select_from(_WITH_CLAIM).where(samples.c.receipt == receipt)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    sample = unpack(row)
    check_size(sample, row.tensors)
    return PackedSample(sample, row.tensors)


def _reports_about(connection: Connection, receipt: str) -> Sequence[Report]:
    about = select(report_receipts.c.report_id).where(report_receipts.c.receipt == receipt)
    rows = connection.execute(select(reports).where(reports.c.report_id.in_(about)).order_by(reports.c.position)).all()
    receipts = receipts_of(connection, [row.report_id for row in rows])
    return [
        Report(
            scenario=row.scenario,
            report_id=row.report_id,
            receipts=receipts[row.report_id],
            score=row.score,
            feedback=row.feedback,
            metadata=row._mapping[reports.c.metadata],
            created_at=moment_of(row.created_us),
        )
        for row in rows
    ]


def _rows_of(connection: Connection, job_id: str) -> list[tuple[str, ...]]:
    """The receipts of each row of a batch, in the batch's order: turns of a trajectory are one row."""
    about = batch_rows.join(report_receipts, report_receipts.c.receipt == batch_rows.c.receipt)
    query = select(batch_rows.c.receipt, batch_rows.c.report_id, report_receipts.c.trajectory).select_from(about)
    ordered = connection.execute(query.where(batch_rows.c.job_id == job_id).order_by(batch_rows.c.ordinal))
    rows = groupby(ordered, key=lambda row: (row.report_id, row.trajectory))
    return [tuple(row.receipt for row in turns) for _, turns in rows]


def receipts_of(connection: Connection, report_ids: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Report id -> its receipts in their order."""
    table = report_receipts
    query = select(table.c.report_id, table.c.receipt).where(table.c.report_id.in_(report_ids))
    found: dict[str, tuple[str, ...]] = dict.fromkeys(report_ids, ())
    for report_id, receipt in connection.execute(query.order_by(table.c.report_id, table.c.ordinal)):
        found[report_id] = (*found[report_id], receipt)
    return found
