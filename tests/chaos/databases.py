"""What gateway and registry hold on disk, read straight from their SQLite files, not through any service."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import JsonValue
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.fakes.weight_engine import weights_key

MICROSECONDS = 1e6

asked_again = retry(
    retry=retry_if_exception_type(sqlite3.OperationalError),
    stop=stop_after_delay(20),
    wait=wait_fixed(0.1),
    reraise=True,
)
"""SQLite's files cannot be opened for moments while another process puts them in order after a kill."""


@dataclass(frozen=True)
class StoredSample:
    """A row of the gateway's samples. Example: StoredSample("4f0c...", " 311", (5, 6), (311, 2), ((0, 2, "1:3"),))"""

    receipt: str
    text: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    spans: tuple[tuple[int, int, str], ...]
    """Start, end, weight version."""
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Claim:
    """Where a sample stands. Example: Claim("consumed", "job-1a...", "")"""

    state: str
    job_id: str
    reason: str


@dataclass(frozen=True)
class GatewayState:
    """One consistent look at the gateway's database."""

    samples: Mapping[str, StoredSample]
    claims: Mapping[str, Claim]
    """By receipt; a sample without one is pending."""
    reports: Mapping[str, tuple[str, str | None]]
    """Report id and job id by receipt; the job id is None while it is pending, "" when it was settled without one."""
    batches: Mapping[str, str]
    """State by job id."""
    batch_receipts: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class StoredVersion:
    """An entry of the chain. Example: StoredVersion(3, 2, "training", 1, "job-1a...", "ab...", "cd...", 1764430000)"""

    number: int
    parent: int | None
    operation: str
    incarnation: int
    job_id: str | None
    model_digest: str
    checkpoint_digest: str | None
    created_at: float
    consumed: tuple[str, ...] = ()
    fencing_token: int = 0
    restores: int | None = None

    @property
    def is_live(self) -> bool:
        """Whether its weights alone are kept."""
        return self.operation == "training" and self.checkpoint_digest is None

    @property
    def weight_version(self) -> str:
        return f"{self.incarnation}:{self.number}"


@dataclass(frozen=True)
class StoredJob:
    """A job record. Example: StoredJob("running", 1, "", None)"""

    phase: str
    attempt: int
    reason: str | None
    version: int | None

    @property
    def open(self) -> bool:
        return self.phase in ("recorded", "running", "staged")


@dataclass(frozen=True)
class RegistryState:
    """One consistent look at the registry's database, one scenario's."""

    head: int
    versions: Sequence[StoredVersion]
    """By number."""
    files: Mapping[str, Sequence[tuple[str, str]]]
    """Path and SHA-256 of every file by artifact digest, also of artifacts whose bytes are gone."""
    removed: frozenset[str]
    """Digests whose bytes retention took."""
    jobs: Mapping[str, StoredJob]
    """By job id."""

    @property
    def by_weight_version(self) -> Mapping[str, StoredVersion]:
        return {version.weight_version: version for version in self.versions}

    def key_of(self, version: StoredVersion) -> int:
        """What the fake engine's tokens are made of under this version."""
        return weights_key(self.files[version.model_digest])


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    # A writer holds the file for milliseconds; a gateway that was killed leaves no lock.
    connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=30)
    try:
        connection.execute("BEGIN")
        yield connection
    finally:
        connection.close()


def _rows(connection: sqlite3.Connection, query: str, *values: object) -> Sequence[sqlite3.Row]:
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(query, values).fetchall()


@asked_again
def read_gateway(path: Path) -> GatewayState:
    """Raises sqlite3.Error."""
    with _reading(path) as connection:
        samples = {}
        columns = "receipt, text, prompt_length, response_length, spans, tensors"
        for receipt, text, prompt, response, spans, tensors in connection.execute(f"SELECT {columns} FROM samples"):
            ids = np.frombuffer(tensors, "<i4", prompt + response).tolist()
            told = tuple((start, end, version) for start, end, version in json.loads(spans))
            # Behind the ids and one byte of loss mask for each token of the response.
            log_probs = np.frombuffer(tensors, "<f4", response, 4 * len(ids) + response).tolist()
            samples[receipt] = StoredSample(
                receipt, text, tuple(ids[:prompt]), tuple(ids[prompt:]), told, tuple(log_probs)
            )
        claims = {
            receipt: Claim(state, job_id, reason)
            for receipt, state, job_id, reason in connection.execute(
                "SELECT receipt, state, job_id, reason FROM sample_claims"
            )
        }
        reports = {
            receipt: (report_id, job_id)
            for receipt, report_id, job_id in connection.execute(
                "SELECT receipt, report_id, job_id FROM report_receipts JOIN reports USING (report_id)"
            )
        }
        batches = dict(connection.execute("SELECT job_id, state FROM batches"))
        rows: dict[str, list[str]] = defaultdict(list)
        for job_id, receipt in connection.execute("SELECT job_id, receipt FROM batch_rows ORDER BY job_id, ordinal"):
            rows[job_id].append(receipt)
    return GatewayState(samples, claims, reports, batches, rows)


@asked_again
def batch_options(path: Path, job_id: str) -> dict[str, JsonValue]:
    """The complete options that a batch was formed with."""
    with _reading(path) as connection:
        options: dict[str, JsonValue] = json.loads(
            _rows(connection, "SELECT options FROM batches WHERE job_id = ?", job_id)[0]["options"]
        )
    return options


@asked_again
def open_batches(path: Path) -> int:
    """How many batches wait for their job."""
    with _reading(path) as connection:
        return int(connection.execute("SELECT count(*) FROM batches WHERE state = 'open'").fetchone()[0])


@asked_again
def read_registry(path: Path, scenario: str) -> RegistryState:
    """Raises sqlite3.Error."""
    with _reading(path) as connection:
        ((head,),) = connection.execute("SELECT head FROM scenarios WHERE scenario_id = ?", (scenario,)).fetchall()
        consumed: dict[int, list[str]] = defaultdict(list)
        for number, receipt in connection.execute(
            "SELECT number, sample_id FROM consumed_samples WHERE scenario_id = ? ORDER BY number, position",
            (scenario,),
        ):
            consumed[number].append(receipt)
        versions = [
            StoredVersion(
                row["number"],
                row["parent"],
                row["operation"],
                row["incarnation"],
                row["job_id"],
                row["model_digest"],
                row["checkpoint_digest"],
                row["created_at"] / MICROSECONDS,
                tuple(consumed[row["number"]]),
                row["fencing_token"],
                row["restores"],
            )
            for row in _rows(connection, "SELECT * FROM versions WHERE scenario_id = ? ORDER BY number", scenario)
        ]
        files: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for digest, name, sha256 in connection.execute("SELECT digest, path, sha256 FROM artifact_files"):
            files[digest].append((name, sha256))
        removed = frozenset(
            digest for (digest,) in connection.execute("SELECT digest FROM artifacts WHERE removed_at IS NOT NULL")
        )
        jobs = {
            row["job_id"]: StoredJob(row["phase"], row["attempt"], row["reason"], row["version"])
            for row in _rows(connection, "SELECT * FROM jobs WHERE scenario_id = ?", scenario)
        }
    return RegistryState(int(head), versions, files, removed, jobs)


@asked_again
def lease_address(path: Path, scenario: str) -> str:
    """host:port of the trainer that had the lease last, however long ago; "" when none ever had it."""
    with _reading(path) as connection:
        rows = _rows(connection, "SELECT address FROM leases WHERE scenario_id = ? AND role = 'trainer'", scenario)
    return str(rows[0]["address"]) if rows else ""


@asked_again
def head_number(path: Path, scenario: str) -> int:
    """The newest version."""
    with _reading(path) as connection:
        row = connection.execute("SELECT head FROM scenarios WHERE scenario_id = ?", (scenario,)).fetchone()
    return int(row[0])
