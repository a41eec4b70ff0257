"""Services as a deployment starts them, for tests of the gateway's HTTP side."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120.0


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def service(module: str, settings: Mapping[str, str], log: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs `python -m module` with the settings, from when its port answers; SIGTERM at the end.

    Fails with the end of the log when the process dies first.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module], env=clean | dict(settings), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_for_port(process, port, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, f"port {port} does not answer after {START_SECONDS} s"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
