"""Forms batches inside one transaction: what is reserved, under which job id, and what will never be trained.

```
pending reports --can they still be admitted?--> family's rule --> batches: samples RESERVED
                          |no: samples SETTLED with the reason
```
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog
from atoll.gateway.database import microseconds
from atoll.gateway.head import Head, why_never_admitted
from atoll.gateway.pending_reports import PendingReport
from atoll.gateway.records import Batch, BatchRow, BatchState, SampleState, Settlement
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import NO_JOB, batch_rows, batches, reports, sample_claims
from sqlalchemy import Connection, insert, update

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Formed:
    """What one look at the pending reports led to. Example: Formed((Batch("job-1a...", ...),), {"9b2d...": why})"""

    batches: tuple[Batch, ...]
    settled: Mapping[str, Settlement]
    """Reports whose samples will never be trained, by report id."""


def settle_outdated(
    connection: Connection, bound: BoundScenario, waiting: Mapping[str, PendingReport], head: Head | None
) -> Mapping[str, Settlement]:
    """Settles the pending reports that can no longer be trained at this head or a later one: why, by report id.

    head: the scenario's newest version as last heard. One sample that is too old has the trainer drop its whole batch,
    so what is left over from older versions goes before it meets newer reports, and what can only be trained together
    with it goes too. The caller holds the scenario's lock.
    """
    if head is None:
        return {}
    outdated = dict(_outdated(waiting.values(), head, bound.max_staleness))
    if not outdated:
        return {}
    views = [report.view for report in waiting.values()]
    for report_id, culprit in bound.family.batching.dropped_with(frozenset(outdated), views).items():
        why = outdated[culprit]
        outdated[report_id] = Settlement(why.code, f"its batch needs report {culprit}, {why.message}")
    _settle(connection, bound.scenario_id, [(waiting[report_id], why) for report_id, why in outdated.items()])
    return outdated


def form_batches(
    connection: Connection, bound: BoundScenario, waiting: Mapping[str, PendingReport], head: Head | None, now: datetime
) -> Formed:
    """Reserves every batch that the family's rule finds complete among the reports that can still be trained.

    waiting: every pending report of the scenario, by its id. The caller holds the scenario's lock, so that two gateways
    never form from the same reports; should one ever do, the primary key of `sample_claims` fails the transaction.
    """
    settled = settle_outdated(connection, bound, waiting, head)
    usable = {report_id: report for report_id, report in waiting.items() if report_id not in settled}
    formed: list[Batch] = []
    for report_ids in bound.family.batching.form([report.view for report in usable.values()]):
        members = [usable[report_id] for report_id in report_ids]
        epoch = max(report.epoch for report in members)
        batch = Batch(
            job_id=job_id_of(bound, report_ids, epoch),
            scenario=bound.scenario_id,
            family=bound.family_reference,
            options=json.loads(bound.family.options.canonical_json()),
            epoch=epoch,
            rows=tuple(BatchRow(receipt, m.view.report_id) for m in members for receipt in m.view.receipts),
        )
        _reserve(connection, batch, report_ids, now)
        formed.append(batch)
    return Formed(tuple(formed), settled)


def job_id_of(bound: BoundScenario, report_ids: Sequence[str], epoch: int) -> str:
    """Stable over retries and restarts; an epoch makes a new one. Example: "job-1a2b...", 36 characters."""
    identity = [bound.scenario_id, bound.family_reference, bound.family.options.canonical_json(), *report_ids, epoch]
    text = json.dumps(identity, separators=(",", ":"), ensure_ascii=True)
    return "job-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _outdated(waiting: Iterable[PendingReport], head: Head, max_staleness: int) -> Mapping[str, Settlement]:
    """Reports with a sample that will never be admitted, and why, by report id."""
    reasons: dict[str, Settlement] = {}
    for report in waiting:
        for version in report.view.weight_versions:
            reason = why_never_admitted(version, head, max_staleness)
            if reason is not None:
                reasons[report.view.report_id] = reason
                break
    return reasons


def _settle(connection: Connection, scenario: str, outdated: Sequence[tuple[PendingReport, Settlement]]) -> None:
    """A report is one rollout: all of its samples are settled."""
    connection.execute(
        insert(sample_claims),
        [
            {
                "receipt": receipt,
                "scenario": scenario,
                "state": SampleState.SETTLED.value,
                "job_id": NO_JOB,
                "code": why.code,
                "reason": why.reason,
            }
            for report, why in outdated
            for receipt in report.view.receipts
        ],
    )
    ids = [report.view.report_id for report, _ in outdated]
    connection.execute(update(reports).where(reports.c.report_id.in_(ids)).values(job_id=NO_JOB))
    log.warning("reports settled without a job", scenario=scenario, reports=len(ids), reason=outdated[0][1].reason)


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
    connection.execute(update(reports).where(reports.c.report_id.in_(report_ids)).values(job_id=batch.job_id))
