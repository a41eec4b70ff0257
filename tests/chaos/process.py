"""One process of a deployment: started, killed, stopped, continued and started again under one name."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

POLL_SECONDS = 0.05
WORKER_PROGRAM = "atoll.trainer.workers.process"


class Process:
    """`command` is run again by every start(); it dies with the harness. Its output is appended to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, address: tuple[str, int]
    ) -> None:
        """address: where it accepts connections once it is up."""
        self.name = name
        self.address = address
        self.environment = dict(environment)
        """May be changed between two starts."""
        self._command = tuple(command)
        self._log = log
        self._child: asyncio.subprocess.Process | None = None
        self.starts = 0

    async def start(self) -> None:
        """Starts it and waits for nothing."""
        assert not self.running, f"{self.name} runs already"
        own = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        with self._log.open("ab") as output:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "atoll.engine.die_with_parent", str(os.getpid()), *self._command),
                env=own | self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.starts += 1

    @property
    def running(self) -> bool:
        """Also true of a stopped one."""
        return self._child is not None and self._child.returncode is None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def state(self) -> str:
        """As the kernel has it, e.g. "sleeping" or "stopped"; "" when it has ended."""
        try:
            return str(psutil.Process(self.pid).status()) if self.running else ""
        except psutil.Error:
            return ""

    def workers(self) -> list[int]:
        """Process ids of a trainer's ranks; none while it starts them."""
        if not self.running:
            return []
        try:
            children = psutil.Process(self.pid).children()
            return [child.pid for child in children if WORKER_PROGRAM in child.cmdline()]
        except psutil.Error:
            return []

    async def kill(self) -> None:
        """SIGKILL, to it alone: what it started must end by itself."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def terminate(self, seconds: float = 30.0) -> None:
        """An orderly stop, or else a kill."""
        if self.running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(seconds):
                    await self.ended()
            except TimeoutError:
                await self.kill()

    def signal(self, number: signal.Signals) -> None:
        """To it alone; harmless when it has ended."""
        assert self._child is not None
        if self._child.returncode is None:
            self._child.send_signal(number)

    async def ended(self) -> int:
        """Waits for its end; the exit status, -N after signal N."""
        assert self._child is not None
        return await self._child.wait()

    async def wait_until_up(self, seconds: float) -> None:
        """Until it accepts connections. Fails when it ends first."""
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(accepts_connections, self.address):
            assert self.running, f"{self.name} ended:\n{self.last_lines()}"
            assert time.monotonic() < deadline, f"{self.name} is not up after {seconds:g} s:\n{self.last_lines()}"
            await asyncio.sleep(POLL_SECONDS)

    def last_lines(self, count: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:]) if self._log.exists() else ""


def accepts_connections(address: tuple[str, int]) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection(address, 1).close()
    except OSError:
        return False
    return True
