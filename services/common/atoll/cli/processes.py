"""The processes of a stack: one keeper per service, its log file, and the lock on the run directory."""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from atoll.cli.stack_file import Service
from atoll.common.errors import BadConfiguration

KEEPER = Path(__file__).with_name("keeper.py")
BACKSTOP_SECONDS = 5.0
"""How long a keeper may take beyond the service's own time to stop, before its whole process group is killed."""

TAIL_LINES = 20


class ServiceProcess:
    """A started service. Example: process = await ServiceProcess.start("registry", service, run_dir, environment)."""

    def __init__(
        self, name: str, service: Service, keeper: asyncio.subprocess.Process, log: Path, log_before: int
    ) -> None:
        """log_before: bytes of the log that earlier runs wrote."""
        self.name = name
        self.log = log
        self._log_before = log_before
        self._keeper = keeper
        self._stop_timeout = service.stop_timeout

    @classmethod
    async def start(
        cls, name: str, service: Service, run_dir: Path, environment: Mapping[str, str]
    ) -> "ServiceProcess":
        """Starts the command in a process group of its own. Log: run_dir/logs/NAME.log, pid: run_dir/pids/NAME.pid."""
        log = run_dir / "logs" / f"{name}.log"
        pid_file = run_dir / "pids" / f"{name}.pid"
        for path in (log, pid_file):
            path.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            log_before = output.tell()
            keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(KEEPER), str(service.stop_timeout), str(pid_file)),
                *service.command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(name, service, keeper, log, log_before)

    async def exit_status(self) -> int:
        """Waits for the end of the service; 128 + N after signal N, as shells count."""
        return await self._keeper.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the service's stop_timeout; returns when nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_timeout + BACKSTOP_SECONDS):
                await self._keeper.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._keeper.pid, signal.SIGKILL)
            await self._keeper.wait()

    def last_lines(self) -> str:
        """The end of this run's log, for the person who asks why."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_before, self.log.stat().st_size - 32_768))
            text = file.read().decode(errors="replace")
        return "\n".join(line[:500] for line in text.splitlines()[-TAIL_LINES:])


@contextlib.contextmanager
def hold_run_dir(run_dir: Path) -> Iterator[None]:
    """Holds run_dir/stack.pid for this process. Raises BadConfiguration when another stack runs there."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / "stack.pid").open("a+")
    except OSError as error:
        raise BadConfiguration(f"run_dir: cannot use {run_dir}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BadConfiguration(
                f"another stack (process {file.read().strip() or 'unknown'}) runs in {run_dir}: stop it, or choose "
                "another place with --run_dir DIRECTORY"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
