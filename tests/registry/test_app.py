"""The process that an operator starts."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from atoll.api.registry.v1 import version_service_pb2
from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceStub
from atoll.common.channels import open_channel
from atoll.common.errors import BadConfiguration
from atoll.common.settings import load_settings
from atoll.registry.app import SERVICES, Registry, RegistryServer
from atoll.registry.settings import RegistrySettings
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.registry.material import SCENARIO, content, seal

Start = Callable[..., "subprocess.Popen[str]"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(settings: RegistrySettings, port: int) -> Iterator[Start]:
    """Starts `python -m atoll.registry` on the test's store; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(**environment: str) -> "subprocess.Popen[str]":
        scenarios = json.dumps([boot.model_dump() for boot in settings.scenarios])
        values = {"PORT": str(port), "STORE": str(settings.store), "SCENARIOS": scenarios} | environment
        if settings.database_url is not None:
            values["DATABASE_URL"] = settings.database_url
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll.registry"],
            env=inherited | {f"ATOLL_REGISTRY_{name}": value for name, value in values.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until_serving(process: "subprocess.Popen[str]", port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        deadline = time.monotonic() + 60
        while True:
            try:
                request = health_pb2.HealthCheckRequest(service=SERVICES[1])
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2, wait_for_ready=True)
            except grpc.RpcError:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
            else:
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                return


async def test_a_watch_resumes_across_a_kill_and_a_restart(settings: RegistrySettings, start: Start, port: int) -> None:
    request = version_service_pb2.WatchVersionsRequest
    registry = Registry(settings)
    model = seal(registry, b"model").digest
    registry.chain.commit(content(0, model))
    first = start()
    wait_until_serving(first, port)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        versions = VersionServiceStub(channel)
        seen: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            async for response in versions.WatchVersions(request(scenario=SCENARIO)):
                seen.append(response.revision)
                if len(seen) == 2:
                    first.kill()
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        registry.chain.commit(content(1, model))
        registry.close()
        wait_until_serving(start(), port)
        async for response in versions.WatchVersions(request(scenario=SCENARIO, from_revision=seen[-1])):
            seen.append(response.revision)
            break
        assert seen == [1, 2, 3]


async def test_a_term_signal_ends_the_watches_with_unavailable_and_the_process_with_success(
    start: Start, port: int
) -> None:
    process = start()
    wait_until_serving(process, port)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        watch = VersionServiceStub(channel).WatchVersions(version_service_pb2.WatchVersionsRequest(scenario=SCENARIO))
        await watch.read()
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await watch.read()
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert process.wait(30) == 0
    assert time.monotonic() - asked < 15


BASE = {"scenario_id": "x", "family": "grpo", "base_model": "/nowhere"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PORTS": "1"}, "ATOLL_REGISTRY_PORTS: no such setting"),
        ({"KEEP_CHECKPOINTS": "0"}, "ATOLL_REGISTRY_KEEP_CHECKPOINTS"),
        ({"SCENARIOS": json.dumps([BASE])}, "ATOLL_REGISTRY_SCENARIOS[0]: base_model '/nowhere' is not a directory"),
        ({"SCENARIOS": json.dumps([BASE | {"familly": "grpo"}])}, "FAMILLY"),
        ({"SCENARIOS": json.dumps([BASE | {"scenario_id": "X"}])}, "scenario_id is 'X'"),
        ({"SCENARIOS": json.dumps([BASE | {"scenario_id": SCENARIO}])}, "exists with another definition"),
        ({"DATABASE_URL": "nonsense"}, "ATOLL_REGISTRY_DATABASE_URL"),
        ({"STORE": "/dev/null"}, "ATOLL_REGISTRY_STORE"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_setting(
    settings: RegistrySettings, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    for name, value in ({"STORE": str(settings.store), "DATABASE_URL": settings.database} | environment).items():
        monkeypatch.setenv(f"ATOLL_REGISTRY_{name}", value)
    with pytest.raises(BadConfiguration, match=re.escape(words)):
        Registry(load_settings(RegistrySettings))


def test_a_refused_configuration_is_one_line_and_status_2(start: Start) -> None:
    process = start(SCENARIOS=json.dumps([BASE]))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2, output
    (line,) = [line for line in output.splitlines() if not line.startswith("{")]
    assert line.startswith("atoll registry: ATOLL_REGISTRY_SCENARIOS[0]: ")


async def test_other_machines_are_not_let_in_without_a_token(registry: Registry, settings: RegistrySettings) -> None:
    with pytest.raises(BadConfiguration, match="ATOLL_TOKEN is not set"):
        RegistryServer(registry, settings.model_copy(update={"host": "0.0.0.0"}))
