"""What a report must be, whatever the family: checked before and inside its transaction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput
from atoll.common.structs import check_depth, check_json, normalized
from atoll.common.weight_version import WeightVersion
from atoll.gateway.receipts import Receipts, is_receipt
from atoll.gateway.records import NewReport, SampleState
from atoll.gateway.sample_packing import unpack_spans
from atoll.gateway.sample_store import absent_receipt
from atoll.gateway.tables import NO_JOB, report_receipts, sample_claims, samples
from atoll.gateway.trajectory import Turn, trajectories
from pydantic import JsonValue
from sqlalchemy import Connection, select

MAX_RECEIPTS = 1_000
MAX_REQUEST_ID = 64


def checked_report(report: NewReport) -> NewReport:
    """The report with its numbers as every transport writes them. Raises InvalidInput naming the field."""
    if not report.receipts:
        raise InvalidInput("receipts is empty, expected at least one receipt", field="receipts")
    if len(report.receipts) > MAX_RECEIPTS:
        raise InvalidInput(f"receipts has {len(report.receipts)} entries, at most {MAX_RECEIPTS}", field="receipts")
    if len(set(report.receipts)) != len(report.receipts):
        raise InvalidInput("receipts names a receipt twice, expected each once", field="receipts")
    if len(report.request_id) > MAX_REQUEST_ID:
        raise InvalidInput(
            f"request_id has {len(report.request_id)} characters, at most {MAX_REQUEST_ID}", field="request_id"
        )
    if "\0" in report.request_id:
        raise InvalidInput("request_id holds a NUL character, which no database keeps", field="request_id")
    if report.score is not None and not math.isfinite(report.score):
        raise InvalidInput(f"score is {report.score}, expected a finite number", field="score")
    if not (report.feedback is None or isinstance(report.feedback, str | dict)):
        raise InvalidInput(
            f"feedback is a {type(report.feedback).__name__}, expected a text or an object", field="feedback"
        )
    metadata = dict(report.metadata)
    fields: dict[str, JsonValue] = {
        "request_id": report.request_id,
        "feedback": report.feedback,
        "metadata": metadata,
    }
    for field, value in fields.items():
        check_depth(value, field)
        check_json(value, field)
    return NewReport(
        scenario=report.scenario,
        receipts=report.receipts,
        score=None if report.score is None else float(report.score),
        feedback=normalized(report.feedback),
        metadata=cast(Mapping[str, JsonValue], normalized(metadata)),
        request_id=report.request_id,
    )


@dataclass(frozen=True, slots=True)
class Reportable:
    """A receipt that takes the report. Example: Reportable("4f0c...", "1:3", trajectory=0)"""

    receipt: str
    weight_version: str
    """The oldest of its spans."""
    trajectory: int
    """Receipts with the same number are turns of one row."""


def reportable(connection: Connection, receipts: Receipts, report: NewReport) -> tuple[Reportable, ...]:
    """The samples of a report, in its order.

    Raises NotFound(RECEIPT_NOT_FOUND), Conflict(RECEIPT_NOT_RECORDED, ALREADY_CONSUMED, SAMPLE_NOT_EXACT),
    InvalidInput(REPORT_REFUSED).
    """
    known = _samples_of(connection, report.receipts)
    versions: list[str] = []
    for receipt in report.receipts:
        row = known.get(receipt)
        if row is None or row.scenario != report.scenario:
            raise absent_receipt(receipts, report.scenario, receipt)
        _refuse_taken(row)
        _refuse_untrainable(row)
        spans = unpack_spans(row.spans)
        versions.append(min((span.weight_version for span in spans), key=WeightVersion.parse))
    numbers = _trajectories(connection, report.receipts)
    return tuple(map(Reportable, report.receipts, versions, numbers))


def _trajectories(connection: Connection, receipts: Sequence[str]) -> tuple[int, ...]:
    if len(receipts) == 1:
        return (0,)
    own = samples.c
    query = select(own.receipt, own.tensors, own.prompt_length, own.response_length, own.temperature)
    turns = {
        row.receipt: Turn(
            np.frombuffer(row.tensors, "<i4", row.prompt_length + row.response_length),
            row.prompt_length,
            row.temperature,
        )
        for row in connection.execute(query.where(own.receipt.in_(receipts)))
    }
    return trajectories([turns[receipt] for receipt in receipts])


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What decides whether a sample takes a report. The names are those of the query below."""

    receipt: str
    scenario: str
    response_length: int
    exact: bool
    temperature: float
    spans: str
    state: str | None
    job_id: str | None
    reason: str | None
    report_id: str | None


def _samples_of(connection: Connection, receipts: Sequence[str]) -> Mapping[str, _Candidate]:
    joined = samples.outerjoin(sample_claims, sample_claims.c.receipt == samples.c.receipt)
    joined = joined.outerjoin(report_receipts, report_receipts.c.receipt == samples.c.receipt)
    query = select(
        samples.c.receipt,
        samples.c.scenario,
        samples.c.response_length,
        samples.c.exact,
        samples.c.temperature,
        samples.c.spans,
        sample_claims.c.state,
        sample_claims.c.job_id,
        sample_claims.c.reason,
        report_receipts.c.report_id,
    )
    formed = [receipt for receipt in receipts if is_receipt(receipt)]
    rows = connection.execute(query.select_from(joined).where(samples.c.receipt.in_(formed)))
    return {row.receipt: _Candidate(**row._mapping) for row in rows}


def _refuse_taken(row: _Candidate) -> None:
    if row.state is None and row.report_id is None:
        return
    if row.state is None:
        standing = f"already has report {row.report_id}"
    elif row.state == SampleState.RESERVED:
        standing = f"is reserved for training job {row.job_id}"
    elif row.job_id == NO_JOB:
        standing = f"was settled: {row.reason}"
    else:
        standing = f"was {row.state} by training job {row.job_id}"
    raise Conflict(
        f"receipt {row.receipt}: its sample {standing}; a sample takes one report",
        reason=errors_pb2.REASON_ALREADY_CONSUMED,
        field="receipts",
    )


def _refuse_untrainable(row: _Candidate) -> None:
    if row.response_length == 0:
        raise InvalidInput(
            f"receipt {row.receipt}: its client went away before the first token; there is nothing to train",
            field="receipts",
            reason=errors_pb2.REASON_REPORT_REFUSED,
        )
    # No row of a batch may be inexact, whatever the family: one would have the whole batch refused by the trainer.
    if not row.exact or row.temperature <= 0:
        raise Conflict(
            f"receipt {row.receipt}: its recorded log-probs are not those of the plain policy (temperature "
            f"{row.temperature:g}, or a penalty, logit bias or grammar), so it cannot be trained; sample without them",
            reason=errors_pb2.REASON_SAMPLE_NOT_EXACT,
            field="receipts",
        )
