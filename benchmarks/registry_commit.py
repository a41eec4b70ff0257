"""What a training job costs in the registry, against bare durable SQLite transactions on the same disk.

python benchmarks/registry_commit.py [--commits 200] [--samples 64] [--directory .] [--database postgresql://...]

Prints the rate of bare SQLite transactions that write a version's rows, the rate of CommitVersion over gRPC by one
client with their ratio (what is lost is gRPC, checks and Python), and the milliseconds that a whole job's bookkeeping
takes: recorded, running, staged, a renewed lease, committed.
"""

import argparse
import asyncio
import hashlib
import json
import sqlite3
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from atoll.api.registry.v1 import artifact_pb2, job_record_pb2, version_pb2
from atoll.api.registry.v1 import artifact_service_pb2 as artifacts_pb
from atoll.api.registry.v1 import job_record_service_pb2 as records_pb
from atoll.api.registry.v1 import lease_service_pb2 as leases_pb
from atoll.api.registry.v1 import version_service_pb2 as versions_pb
from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceStub
from atoll.api.registry.v1.job_record_service_pb2_grpc import JobRecordServiceStub
from atoll.api.registry.v1.lease_service_pb2_grpc import LeaseServiceStub
from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceStub
from atoll.common.channels import open_channel
from atoll.registry.app import Registry, RegistryServer
from atoll.registry.settings import BootScenario, RegistrySettings
from google.protobuf import duration_pb2
from pydantic import ByteSize

if TYPE_CHECKING:  # this class is in the stubs only
    from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceAsyncStub

SCENARIO = "benchmark"


def write_base_model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "none"}')
    (directory / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return directory


async def seal_model(artifacts: "ArtifactServiceAsyncStub") -> str:
    staged = await artifacts.StageArtifact(
        artifacts_pb.StageArtifactRequest(request_id="model", kind=artifact_pb2.ARTIFACT_KIND_MODEL)
    )
    Path(staged.location, "weights").write_bytes(b"weights")
    file = artifact_pb2.ManifestFile(path="weights", size=7, sha256=hashlib.sha256(b"weights").hexdigest())
    sealed = await artifacts.SealArtifact(artifacts_pb.SealArtifactRequest(staging_id="model", files=[file]))
    return sealed.artifact.digest


@dataclass(frozen=True)
class Rates:
    """Commits a second, and milliseconds of all that the registry does for one job."""

    commits: float
    job_ms: float


async def measure(directory: Path, commits: int, samples: int, database: str | None) -> Rates:
    boot = BootScenario(scenario_id=SCENARIO, family="grpo", base_model=str(write_base_model(directory / "base")))
    settings = RegistrySettings(
        port=0, store=directory / "store", database_url=database, scenarios=(boot,), min_free_space=ByteSize(0)
    )
    registry = Registry(settings)
    server = RegistryServer(registry, settings)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        digest = await seal_model(ArtifactServiceStub(channel))
        versions = VersionServiceStub(channel)
        requests = [commit_request(parent, digest, samples) for parent in range(2 * commits)]
        started = time.perf_counter()
        for request in requests[:commits]:
            await versions.CommitVersion(request)
        bare_commits = time.perf_counter() - started
        started = time.perf_counter()
        await whole_jobs(channel, requests[commits:])
        whole = time.perf_counter() - started
    await server.stop()
    registry.close()
    return Rates(commits / bare_commits, 1000 * whole / commits)


def commit_request(parent: int, digest: str, samples: int) -> versions_pb.CommitVersionRequest:
    return versions_pb.CommitVersionRequest(
        scenario=SCENARIO,
        job_id=f"job-{parent}",
        expected_parent=parent,
        operation=version_pb2.OPERATION_TRAINING,
        family="grpo",
        model_digest=digest,
        consumed_sample_ids=[f"s-{parent}-{index}" for index in range(samples)],
        metrics={"train/loss": 0.5},
    )


async def whole_jobs(channel: grpc.aio.Channel, requests: Sequence[versions_pb.CommitVersionRequest]) -> None:
    """What a trainer calls for each job."""
    leases, records, versions = LeaseServiceStub(channel), JobRecordServiceStub(channel), VersionServiceStub(channel)
    ttl = duration_pb2.Duration(seconds=60)
    acquire = leases_pb.AcquireLeaseRequest(
        scenario=SCENARIO, role="trainer", holder="one", address="127.0.0.1:1", ttl=ttl
    )
    token = (await leases.AcquireLease(acquire)).lease.fencing_token
    renew = leases_pb.RenewLeaseRequest(scenario=SCENARIO, role="trainer", holder="one", fencing_token=token, ttl=ttl)
    for request in requests:
        record = job_record_pb2.JobRecord(
            scenario=SCENARIO, job_id=request.job_id, phase=job_record_pb2.JOB_PHASE_RECORDED
        )
        record.body.training.family = request.family
        record.body.training.sample_ids.extend(request.consumed_sample_ids)
        await records.PutJobRecord(records_pb.PutJobRecordRequest(record=record, fencing_token=token))
        record.phase, record.attempt = job_record_pb2.JOB_PHASE_RUNNING, 1
        await records.PutJobRecord(records_pb.PutJobRecordRequest(record=record, fencing_token=token))
        await leases.RenewLease(renew)
        record.phase = job_record_pb2.JOB_PHASE_STAGED
        record.staged.parent = request.expected_parent
        record.staged.model_digest = request.model_digest
        record.staged.metrics.update(request.metrics)
        await records.PutJobRecord(records_pb.PutJobRecordRequest(record=record, fencing_token=token))
        request.fencing_token = token
        await versions.CommitVersion(request)


def bare_transactions_per_second(directory: Path, commits: int, samples: int) -> float:
    connection = sqlite3.connect(directory / "bare.db", isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("CREATE TABLE versions (number INTEGER PRIMARY KEY, job TEXT UNIQUE, content TEXT)")
    connection.execute("CREATE TABLE consumed (sample TEXT PRIMARY KEY, number INTEGER)")
    started = time.perf_counter()
    for number in range(commits):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO versions VALUES (?, ?, ?)", (number, f"job-{number}", "x" * 300))
        rows = [(f"s-{number}-{index}", number) for index in range(samples)]
        connection.executemany("INSERT INTO consumed VALUES (?, ?)", rows)
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - started
    connection.close()
    return commits / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64, help="samples that each commit consumes")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; decides which disk is measured")
    parser.add_argument("--database", default=None, help="an empty database; by default SQLite in the directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        bare = bare_transactions_per_second(directory, arguments.commits, arguments.samples)
        ours = asyncio.run(measure(directory, arguments.commits, arguments.samples, arguments.database))
    print(f"bare SQLite transactions: {bare:8.1f} /s")
    print(f"CommitVersion over gRPC:  {ours.commits:8.1f} /s")
    print(f"all of a job's writes:    {ours.job_ms:8.1f} ms")
    print(f"registry: ratio={ours.commits / bare:.2f} job_ms={ours.job_ms:.1f}")


if __name__ == "__main__":
    main()
