"""The whole of Atoll for tests: `atoll serve` with a bundled stack, in its own process, on free ports."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from atoll.api.gateway.v1 import sample_pb2, sample_service_pb2, sample_service_pb2_grpc
from atoll.api.registry.v1 import (
    artifact_service_pb2,
    artifact_service_pb2_grpc,
    version_pb2,
    version_service_pb2,
    version_service_pb2_grpc,
)
from atoll.cli.ports import free_ports
from atoll.common.tensors import Array, TensorReader
from openai import OpenAI

ATOLL = Path(sys.executable).with_name("atoll")
SCENARIO = "demo"
TOKEN = "end-to-end-token"
"""Asked for by every service, so every call between them carries it."""
PORT_NAMES = ("registry", "engine", "gateway", "gateway_grpc", "trainer")
AUTHORIZATION = (("authorization", f"Bearer {TOKEN}"),)
GROUP_SIZE = 2
GROUPS = 2
BATCH = GROUPS * GROUP_SIZE
"""Samples of one training job: as few as a group-relative family can learn from."""

START_SECONDS = 400.0
"""Half a minute on an idle machine; the stack's own timeouts, which say more, come first."""
VERSION_SECONDS = 180.0
Json = dict[str, object]


@dataclass(frozen=True)
class Chat:
    """A reply and what its sample is called. Example: Chat("4f0c...", "The sea", "1:0")."""

    receipt: str
    text: str
    weight_version: str


@dataclass(frozen=True)
class RecordedSample:
    """A sample as the gateway's gRPC side tells it, with its tensors by name."""

    sample: sample_pb2.Sample
    tensors: Mapping[str, Array]


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Returns once the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


class LiveStack:
    """Everything of one deployment. It can be stopped, or hurt, and started again in the same run directory."""

    def __init__(
        self, run_dir: Path, model: Path, stack: str = "local-cpu", engine_url: str | None = None, **settings: object
    ) -> None:
        """stack: one that comes with Atoll. engine_url: of an engine that is not the stack's own.

        settings: overrides with "__" for the dots: vars__learning_rate=1e-3.
        """
        self.run_dir = run_dir
        self.model = model
        self._stack = stack
        self._ports = dict(zip(PORT_NAMES, free_ports(len(PORT_NAMES)), strict=True))
        self.engine_url = engine_url or f"http://127.0.0.1:{self._ports['engine']}"
        self._settings = {name.replace("__", "."): str(value) for name, value in settings.items()}
        self._serve: subprocess.Popen[str] | None = None
        self.http = httpx.Client(base_url=self.gateway_url, timeout=60.0, headers={"authorization": f"Bearer {TOKEN}"})
        self.openai = OpenAI(base_url=f"{self.gateway_url}/v1", api_key=TOKEN, max_retries=0, timeout=60.0)

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['gateway']}"

    def address(self, service: str) -> str:
        """host:port of a gRPC side: registry, gateway_grpc or trainer."""
        return f"127.0.0.1:{self._ports[service]}"

    def start(self) -> None:
        """Returns when every service is ready; a failure carries what `atoll serve` said."""
        assert self._serve is None
        overrides = {
            "run_dir": str(self.run_dir),
            "vars.scenario": SCENARIO,
            "vars.options": f"{{groups_per_step: {GROUPS}, n_samples_per_prompt: {GROUP_SIZE}}}",
            "vars.learning_rate": "1.0e-3",
            "vars.trainer_threads": "1",
            "vars.context_length": "512",
            **{f"vars.ports.{name}": str(port) for name, port in self._ports.items()},
            **self._settings,
        }
        words = [word for path, value in overrides.items() for word in (f"--{path}", value)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        self._serve = subprocess.Popen(
            [str(ATOLL), "serve", "-c", self._stack, *words],
            env=environment | {"ATOLL_MODEL": str(self.model), "ATOLL_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not (self.run_dir / "ready").exists():
            if self._serve.poll() is not None or time.monotonic() > deadline:
                self._serve.send_signal(signal.SIGTERM)
                said, _ = self._serve.communicate(timeout=60)
                self._serve = None
                raise AssertionError(f"the stack did not come up:\n{said}")
            time.sleep(0.1)

    def stop(self) -> None:
        """An orderly stop; nothing to do when it is down already."""
        if self._serve is not None:
            self._serve.send_signal(signal.SIGTERM)
            said, _ = self._serve.communicate(timeout=90)
            status, self._serve = self._serve.returncode, None
            assert status == 0, said

    def kill(self, service: str) -> None:
        """kill -9 of one service, and the end of the stack that follows from it."""
        assert self._serve is not None
        os.kill(int((self.run_dir / "pids" / f"{service}.pid").read_text()), signal.SIGKILL)
        said, _ = self._serve.communicate(timeout=90)
        status, self._serve = self._serve.returncode, None
        assert status == 1 and f"{service} ended with status 137" in said, said

    def close(self) -> None:
        self.openai.close()
        self.http.close()
        self.stop()

    def chat(self, content: str = "Tell me a story.", max_tokens: int = 12, **more: float) -> Chat:
        """One recorded reply through the official client, at temperature 1 unset."""
        answer = self.openai.chat.completions.with_raw_response.create(
            model=SCENARIO,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            **more,  # type: ignore[call-overload]
        )
        completion = answer.parse()
        noted = (completion.model_extra or {})["atoll"]
        assert noted["receipt"] == answer.headers["x-atoll-receipt"]
        return Chat(noted["receipt"], completion.choices[0].message.content or "", noted["weight_version"])

    def report(self, receipt: str, score: float, group: str) -> Json:
        """The gateway's answer to a report that must be taken."""
        body = {"receipt": receipt, "score": score, "metadata": {"group": group}, "request_id": f"r-{receipt}"}
        answer = self.http.post("/atoll/report", json=body)
        assert answer.status_code == 200, answer.text
        result: Json = answer.json()
        return result

    def feed_batch(self, name: str) -> tuple[list[Chat], str]:
        """Chats and reports that complete one batch; the chats, and the id of the training job."""
        chats = [self.chat(f"{name}: question {number // GROUP_SIZE}") for number in range(BATCH)]
        job = ""
        for number, chat in enumerate(chats):
            answer = self.report(chat.receipt, float(number % GROUP_SIZE), f"{name}-{number // GROUP_SIZE}")
            assert bool(answer["job_id"]) == (number == BATCH - 1)
            job = str(answer["job_id"])
        return chats, job

    def status(self) -> Json:
        """The scenario's part of /atoll/status."""
        (state,) = self.http.get("/atoll/status").json()["scenarios"]
        found: Json = state
        return found

    def wait_until_served(self, number: int) -> None:
        """Until version `number` is the head and the engine answers with it."""

        def served() -> bool:
            state = self.status()
            assert not state["last_error"], state
            return state["head_number"] == number and self.served_version() == f"1:{number}"

        wait_for(served, f"version {number} served", VERSION_SECONDS)

    def served_version(self) -> str:
        return str(httpx.get(f"{self.engine_url}/model_info", timeout=30).json()["weight_version"])

    def versions(self) -> list[version_pb2.Version]:
        """The chain from the registry, oldest first."""
        with self._channel("registry") as channel:
            stub = version_service_pb2_grpc.VersionServiceStub(channel)
            answer = stub.ListVersions(
                version_service_pb2.ListVersionsRequest(scenario=SCENARIO), timeout=10, metadata=AUTHORIZATION
            )
        return sorted(answer.versions, key=lambda version: version.number)

    def artifact(self, digest: str) -> Path:
        """Where the files of an artifact are."""
        with self._channel("registry") as channel:
            stub = artifact_service_pb2_grpc.ArtifactServiceStub(channel)
            answer = stub.GetArtifact(
                artifact_service_pb2.GetArtifactRequest(digest=digest), timeout=10, metadata=AUTHORIZATION
            )
        return Path(answer.artifact.location)

    def sample(self, receipt: str) -> RecordedSample:
        """What was recorded under a receipt."""
        with self._channel("gateway_grpc") as channel:
            stub = sample_service_pb2_grpc.SampleServiceStub(channel)
            request = sample_service_pb2.GetSampleRequest(scenario=SCENARIO, receipt=receipt)
            pieces = iter(stub.GetSample(request, timeout=10, metadata=AUTHORIZATION))
            header = next(pieces).row
            reader = TensorReader(list(header.tensors))
            for piece in pieces:
                reader.add(piece.chunk)
        return RecordedSample(header.sample, reader.arrays())

    def samples(self) -> list[sample_pb2.Sample]:
        """Every sample of the scenario."""
        found: list[sample_pb2.Sample] = []
        with self._channel("gateway_grpc") as channel:
            stub = sample_service_pb2_grpc.SampleServiceStub(channel)
            request = sample_service_pb2.ListSamplesRequest(scenario=SCENARIO)
            while True:
                page = stub.ListSamples(request, timeout=10, metadata=AUTHORIZATION)
                found.extend(page.samples)
                if not page.next_page_token:
                    return found
                request.page_token = page.next_page_token

    @contextlib.contextmanager
    def _channel(self, service: str) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(self.address(service)) as channel:
            yield channel
