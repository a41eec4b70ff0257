"""A database of the release before, with everything that can be in it, goes on under this one."""

import json
from pathlib import Path

import alembic.command
import alembic.config
import pytest
from atoll.gateway import database as database_module
from atoll.gateway.database import Database
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import SampleState
from atoll.gateway.sample_store import SampleStore
from sqlalchemy import Connection, create_engine, make_url, text

from tests.gateway.store_world import SCENARIO, url_of

TEXT = 'She said "four".\n\\ é'
STALE = "stale_sample: produced by 1:0, the head is 1:3 and max_staleness is 0"
RECEIPTS = ("pending", "reported", "reserved", "consumed", "dropped", "left-over")
JOBS = (("job-open", "open", ""), ("job-done", "committed", ""), ("job-stale", "dropped", STALE))
CLAIMS = (
    ("reserved", "reserved", "job-open", ""),
    ("consumed", "consumed", "job-done", ""),
    ("dropped", "settled", "job-stale", STALE),
    ("left-over", "settled", "", STALE),
)
REPORTS = (("report-1", None, ("reported",)), ("report-2", "job-open", ("reserved", "consumed")))


def fill(connection: Connection) -> None:
    """What the release before wrote."""
    samples = (
        "INSERT INTO samples (scenario, receipt, created_us, prompt_length, response_length, top_k, temperature, "
        "exact, aborted, finish_reason, spans, sampling, request, text, tensors) VALUES (:scenario, :receipt, 1, 1, 1, "
        "0, 1.0, :yes, :no, 'stop', '[[0,1,\"1:0\"]]', '{}', '{}', :text, :tensors)"
    )
    for receipt in RECEIPTS:
        values = {
            "scenario": SCENARIO,
            "receipt": receipt,
            "yes": True,
            "no": False,
            "text": TEXT,
            "tensors": b"0" * 13,
        }
        connection.execute(text(samples), values)
    for job, state, reason in JOBS:
        connection.execute(
            text(
                "INSERT INTO batches (job_id, scenario, family, options, epoch, created_us, state, reason) "
                "VALUES (:job, :scenario, 'grpo', '{}', 0, 1, :state, :reason)"
            ),
            {"job": job, "scenario": SCENARIO, "state": state, "reason": reason},
        )
    for receipt, state, job, reason in CLAIMS:
        connection.execute(
            text("INSERT INTO sample_claims VALUES (:receipt, :scenario, :state, :job, :reason)"),
            {"receipt": receipt, "scenario": SCENARIO, "state": state, "job": job, "reason": reason},
        )
    for report, held_by, receipts in REPORTS:
        connection.execute(
            text(
                "INSERT INTO reports (report_id, scenario, score, metadata, created_us, epoch, job_id) "
                "VALUES (:report, :scenario, 1.0, :metadata, 1, 0, :job)"
            ),
            {"report": report, "scenario": SCENARIO, "metadata": json.dumps({"group": "g"}), "job": held_by},
        )
        for ordinal, receipt in enumerate(receipts):
            connection.execute(
                text("INSERT INTO report_receipts VALUES (:receipt, :report, :ordinal, '1:0')"),
                {"receipt": receipt, "report": report, "ordinal": ordinal},
            )
    connection.execute(
        text(
            "INSERT INTO request_answers (scenario, method, request_id, body_digest, report_id, job_id, created_us) "
            "VALUES (:scenario, 'CreateReport', 'r-1', 'd', 'report-1', '', 1)"
        ),
        {"scenario": SCENARIO},
    )


@pytest.fixture
def url(tmp_path: Path, both_databases: None) -> str:
    """A database that the release before has filled."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(database_module.__file__).parent / "migrations"))
    found = make_url(url_of(tmp_path))
    if found.drivername == "postgresql":
        found = found.set(drivername="postgresql+psycopg")
    engine = create_engine(found)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0001")
        fill(connection)
    engine.dispose()
    return url_of(tmp_path)


async def test_what_the_release_before_recorded_is_read_as_it_was(url: str) -> None:
    database = Database(url)
    store = SampleStore(database, Receipts(b"k" * 32))
    page, _ = await store.page(SCENARIO)
    assert {sample.receipt: sample.text for sample in page} == dict.fromkeys(RECEIPTS, TEXT)
    settled, _ = await store.page(SCENARIO, SampleState.SETTLED)
    assert {(sample.receipt, sample.settled_code, sample.settled_reason) for sample in settled} == {
        ("dropped", "stale_sample", STALE),
        ("left-over", "stale_sample", STALE),
    }
    pending, _ = await store.page(SCENARIO, SampleState.PENDING)
    assert {sample.receipt for sample in pending} == {"pending", "reported"}
    with database.reading() as connection:
        assert connection.execute(text("SELECT job_id, code FROM batches ORDER BY position")).all() == [
            ("job-open", ""),
            ("job-done", ""),
            ("job-stale", "stale_sample"),
        ]
        assert list(PendingReports().read(connection, SCENARIO)) == ["report-1"]
        # Nobody asked then whether receipts are turns of one row.
        rows = connection.execute(text("SELECT receipt, trajectory FROM report_receipts ORDER BY report_id, ordinal"))
        assert rows.all() == [("reported", 0), ("reserved", 0), ("consumed", 1)]
    database.close()
