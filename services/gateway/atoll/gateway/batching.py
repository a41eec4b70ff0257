"""Forms batches inside the transaction that records a report: what is reserved, and under which job id."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from atoll.families.batching import ReportView
from atoll.gateway.database import microseconds, moment_of
from atoll.gateway.records import Batch, BatchRow, BatchState, SampleState
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import batch_rows, batches, report_receipts, reports, sample_claims
from sqlalchemy import Connection, insert, select, update


def form_batches(connection: Connection, bound: BoundScenario, now: datetime) -> list[Batch]:
    """Reserves every batch that the family's rule finds complete among the pending reports.

    The caller holds the scenario's lock, so that two gateways never form from the same reports; should one ever do,
    the primary key of `sample_claims` fails the transaction.
    """
    pending, epochs = pending_reports(connection, bound.scenario_id)
    formed: list[Batch] = []
    for report_ids in bound.family.batching.form(list(pending.values())):
        members = [pending[report_id] for report_id in report_ids]
        epoch = max(epochs[report_id] for report_id in report_ids)
        batch = Batch(
            job_id=job_id_of(bound, report_ids, epoch),
            scenario=bound.scenario_id,
            family=bound.family_reference,
            options=json.loads(bound.family.options.canonical_json()),
            epoch=epoch,
            rows=tuple(BatchRow(receipt, report.report_id) for report in members for receipt in report.receipts),
        )
        _reserve(connection, batch, report_ids, now)
        formed.append(batch)
    return formed


def job_id_of(bound: BoundScenario, report_ids: Sequence[str], epoch: int) -> str:
    """Stable over retries and restarts; an epoch makes a new one. Example: "job-1a2b...", 36 characters."""
    identity = [bound.scenario_id, bound.family_reference, bound.family.options.canonical_json(), *report_ids, epoch]
    text = json.dumps(identity, separators=(",", ":"), ensure_ascii=True)
    return "job-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def pending_reports(connection: Connection, scenario: str) -> tuple[dict[str, ReportView], Mapping[str, int]]:
    """Reports in no batch, by id and oldest first, and their epochs."""
    waiting = (reports.c.scenario == scenario) & reports.c.job_id.is_(None)
    members: dict[str, list[tuple[str, str]]] = {}
    joined = report_receipts.join(reports, reports.c.report_id == report_receipts.c.report_id)
    query = select(report_receipts).select_from(joined).where(waiting)
    for row in connection.execute(query.order_by(report_receipts.c.report_id, report_receipts.c.ordinal)):
        members.setdefault(row.report_id, []).append((row.receipt, row.weight_version))
    views: dict[str, ReportView] = {}
    epochs: dict[str, int] = {}
    for row in connection.execute(select(reports).where(waiting).order_by(reports.c.position)):
        epochs[row.report_id] = row.epoch
        views[row.report_id] = ReportView(
            report_id=row.report_id,
            receipts=tuple(receipt for receipt, _ in members[row.report_id]),
            score=row.score,
            created_at=moment_of(row.created_us),
            feedback=row.feedback,
            metadata=row._mapping[reports.c.metadata],
            weight_versions=tuple(version for _, version in members[row.report_id]),
        )
    return views, epochs


def _reserve(connection: Connection, batch: Batch, report_ids: Sequence[str], now: datetime) -> None:
    connection.execute(
        insert(batches).values(
            job_id=batch.job_id,
            scenario=batch.scenario,
            family=batch.family,
            options=batch.options,
            epoch=batch.epoch,
            created_us=microseconds(now),
            state=BatchState.OPEN.value,
            reason="",
        )
    )
    connection.execute(
        insert(batch_rows),
        [
            {"job_id": batch.job_id, "ordinal": ordinal, "receipt": row.receipt, "report_id": row.report_id}
            for ordinal, row in enumerate(batch.rows)
        ],
    )
    connection.execute(
        insert(sample_claims),
        [
            {
                "receipt": row.receipt,
                "scenario": batch.scenario,
                "state": SampleState.RESERVED.value,
                "job_id": batch.job_id,
                "reason": "",
            }
            for row in batch.rows
        ],
    )
    for report_id in report_ids:
        connection.execute(update(reports).where(reports.c.report_id == report_id).values(job_id=batch.job_id))
