"""Answers a repeated request with its first answer: by scenario, method and the caller's request id."""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict
from atoll.common.structs import normalized
from atoll.gateway.database import microseconds
from atoll.gateway.records import Settlement
from atoll.gateway.tables import request_answers
from pydantic import JsonValue
from sqlalchemy import Connection, delete, insert, select

KEPT = timedelta(days=7)


@dataclass(frozen=True)
class RequestKey:
    """Example: RequestKey("math", "CreateReport", "r-1", body_digest("...")). An empty request_id is never replayed."""

    scenario: str
    method: str
    request_id: str
    body: str
    """Digest of the parsed body."""


@dataclass(frozen=True)
class FirstAnswer:
    """Example: FirstAnswer("9b2d...", "job-1a...")"""

    report_id: str
    job_id: str
    settled: Settlement | None = None


def body_digest(body: dict[str, JsonValue]) -> str:
    """SHA-256 of the parsed fields: key order, spacing and 4 or 4.0 make no difference."""
    text = json.dumps(normalized(body), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def first_answer(connection: Connection, key: RequestKey, now: datetime) -> FirstAnswer | None:
    """What the request was answered before. Raises Conflict(REQUEST_ID_REUSED) when the body was another one."""
    if not key.request_id:
        return None
    table = request_answers
    connection.execute(delete(table).where(table.c.created_us < microseconds(now - KEPT)))
    row = connection.execute(
        select(table).where(
            table.c.scenario == key.scenario, table.c.method == key.method, table.c.request_id == key.request_id
        )
    ).one_or_none()
    if row is None:
        return None
    if row.body_digest != key.body:
        raise Conflict(
            f"request_id {key.request_id!r} came before with another body; use a new id for another request",
            reason=errors_pb2.REASON_REQUEST_ID_REUSED,
            field="request_id",
        )
    settled = Settlement(row.code, row.reason) if row.code else None
    return FirstAnswer(row.report_id, row.job_id, settled)


def keep_answer(connection: Connection, key: RequestKey, answer: FirstAnswer, now: datetime) -> None:
    """Remembers the answer, in the transaction that did the work."""
    if not key.request_id:
        return
    connection.execute(
        insert(request_answers).values(
            scenario=key.scenario,
            method=key.method,
            request_id=key.request_id,
            body_digest=key.body,
            report_id=answer.report_id,
            job_id=answer.job_id,
            created_us=microseconds(now),
            code="" if answer.settled is None else answer.settled.code,
            reason="" if answer.settled is None else answer.settled.message,
        )
    )
