"""Real engines for tests: SGLang on this machine's CPU, started by `python -m atoll.engine` as a deployment does."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.common.engine_client import EngineClient

VOCAB_SIZE = 1024
START_SECONDS = 280.0
"""Twenty on an idle machine, minutes on one that runs other tests as well; less than pytest's limit."""


@dataclass(frozen=True)
class RunningEngine:
    """An engine that samples. Example: RunningEngine("http://127.0.0.1:40123", Path("student"), "1:0", 4711)."""

    base_url: str
    model_path: Path
    """What it served first."""
    weight_version: str
    """What those weights are called."""
    launcher_pid: int
    vocab_size: int = VOCAB_SIZE

    def client(self) -> EngineClient:
        """A client to use as an async context manager."""
        return EngineClient(self.base_url, self.vocab_size, idle_timeout_s=60)


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_environment(**settings: object) -> dict[str, str]:
    """This process's environment with ATOLL_ENGINE_* replaced by the given settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return environment | {f"ATOLL_ENGINE_{name.upper()}": str(value) for name, value in settings.items()}


@contextmanager
def running_engine(model_path: Path, weight_version: str, log: Path) -> Iterator[RunningEngine]:
    """Start an engine and wait until it samples; stop it at the end.

    Raises:
        RuntimeError: it did not come up; the message holds the end of its log.
    """
    port = free_port()
    environment = engine_environment(
        model_path=model_path, weight_version=weight_version, port=port, device="cpu", die_with_parent=True
    )
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "atoll.engine"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until_ready(launcher, log)
        yield RunningEngine(f"http://127.0.0.1:{port}", model_path, weight_version, launcher.pid)
    finally:
        # SGLang's orderly stop takes eight seconds; that it works is tested once.
        launcher.kill()
        launcher.wait()


def wait_until_ready(launcher: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return once the launcher has logged that the engine samples."""
    deadline = time.monotonic() + START_SECONDS
    while b'"event": "engine ready"' not in log.read_bytes():
        if launcher.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the engine did not come up (exit status {launcher.poll()}):\n{tail}")
        time.sleep(0.1)
