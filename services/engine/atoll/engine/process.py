"""SGLang as a child process: its output, its signals, its end."""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog

log = structlog.get_logger(__name__)

KEPT_LINES = 30


class SglangProcess:
    """One SGLang, in a process group of its own, so that a Ctrl-C reaches only us and nothing of it is left behind.

    Use: process = await SglangProcess.start(arguments, environment); code = await process.wait(). stop() may be called
    at any time and more than once.
    """

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._output = asyncio.create_task(self._log_output())

    @classmethod
    async def start(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> "SglangProcess":
        """Starts it; the kernel kills it when this process is gone, however it went."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atoll.engine.die_with_parent", str(os.getpid()), *arguments),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        return cls(child)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def last_lines(self) -> str:
        """The end of what it printed, to explain why it died."""
        return "\n".join(self._last_lines)

    async def wait(self) -> int:
        """Its exit status (128 + n when signal n ended it), after everything in its group is gone."""
        code = await self._child.wait()
        self.kill()
        await self._output
        return code if code >= 0 else 128 - code

    async def stop(self, timeout_s: float) -> None:
        """Let it finish its running replies for `timeout_s`, then kill it."""
        if self._child.returncode is not None:
            return
        log.info("engine stopping", timeout_s=timeout_s)
        # To the main process only: it tells its workers, in order.
        self._child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._child.wait()
        except TimeoutError:
            log.warning("sglang did not stop in time, killing it", timeout_s=timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and everything in its group now; harmless when it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    async def _log_output(self) -> None:
        assert self._child.stdout is not None
        rest = b""
        while block := await self._child.stdout.read(65536):
            # Progress bars rewrite their line with carriage returns.
            *lines, rest = re.split(rb"[\r\n]+", rest + block)
            for line in lines:
                self._log_line(line)
        self._log_line(rest)

    def _log_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if line:
            self._last_lines.append(line)
            log.info("sglang", line=line)
