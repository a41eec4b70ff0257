"""Services as a deployment starts them, for tests of the gateway's HTTP side."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

START_SECONDS = 120.0


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def service_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with nothing of Atoll's but the settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | dict(settings)


@contextmanager
def service(module: str, settings: Mapping[str, str], log: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs `python -m module` with the settings, from when its port answers; SIGTERM at the end.

    Fails with the end of the log when the process dies first.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module], env=service_environment(settings), stdout=output, stderr=subprocess.STDOUT
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


@asynccontextmanager
async def service_beside(
    module: str, settings: Mapping[str, str], log: Path, port: int
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """The same while this process's event loop, which may serve what the service calls, goes on."""
    running = service(module, settings, log, port)
    process = await asyncio.to_thread(running.__enter__)
    try:
        yield process
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


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
