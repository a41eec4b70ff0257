"""Registry commits a second, against what SQLite itself does with one durable transaction per commit on the same disk.

python benchmarks/registry_commit.py [--commits 200] [--samples 64] [--directory .]

Prints the rate of CommitVersion over gRPC by one client, the rate of bare SQLite transactions that write the same rows,
and their ratio: what is lost is gRPC, checks and Python.
"""

import argparse
import asyncio
import hashlib
import json
import sqlite3
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.api.registry.v1 import artifact_pb2, version_pb2
from atoll.api.registry.v1 import artifact_service_pb2 as artifacts_pb
from atoll.api.registry.v1 import version_service_pb2 as versions_pb
from atoll.api.registry.v1.artifact_service_pb2_grpc import ArtifactServiceStub
from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceStub
from atoll.common.channels import open_channel
from atoll.registry.app import Registry, RegistryServer
from atoll.registry.settings import BootScenario, RegistrySettings

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


async def commits_per_second(directory: Path, commits: int, samples: int) -> float:
    boot = BootScenario(scenario_id=SCENARIO, family="grpo", base_model=str(write_base_model(directory / "base")))
    settings = RegistrySettings(port=0, store=directory / "store", scenarios=(boot,))
    registry = Registry(settings)
    server = RegistryServer(registry, settings)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        digest = await seal_model(ArtifactServiceStub(channel))
        versions = VersionServiceStub(channel)
        requests = [
            versions_pb.CommitVersionRequest(
                scenario=SCENARIO,
                job_id=f"job-{parent}",
                expected_parent=parent,
                operation=version_pb2.OPERATION_TRAINING,
                family="grpo",
                model_digest=digest,
                consumed_sample_ids=[f"s-{parent}-{index}" for index in range(samples)],
                metrics={"train/loss": 0.5},
            )
            for parent in range(commits)
        ]
        started = time.perf_counter()
        for request in requests:
            await versions.CommitVersion(request)
        elapsed = time.perf_counter() - started
    await server.stop()
    registry.close()
    return commits / elapsed


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        bare = bare_transactions_per_second(directory, arguments.commits, arguments.samples)
        ours = asyncio.run(commits_per_second(directory, arguments.commits, arguments.samples))
    print(f"bare SQLite transactions: {bare:8.1f} /s")
    print(f"CommitVersion over gRPC:  {ours:8.1f} /s")
    print(f"ratio: {ours / bare:.2f}")


if __name__ == "__main__":
    main()
