"""A worker group of processes on this machine, each a fresh interpreter in its own process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from atoll.trainer.workers.group import WorkerLost, WorkerPlan
from atoll.trainer.workers.messages import Answer, Call, Raised, Start
from atoll.trainer.workers.outcome import GRACE_S, RankFailed, log_tail, results_of
from atoll.trainer.workers.ranks import Ranks


class LocalWorkerGroup:
    """Implements `atoll.trainer.workers.group.WorkerGroup` with local processes.

    The ranks die with the process that launched them, also when that is killed with SIGKILL.

    Raises `WorkerLost` when a rank does not come up within ``plan.start_timeout_s``.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._ranks = Ranks.prepare(plan)
        self._lock = threading.Lock()
        self._killing = threading.Lock()
        self._released = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._log_starts: list[int] = []
        self._spawn()
        try:
            # A file of its own makes the rendezvous: no port to clash with a group that starts beside this one.
            self._exchange(self._ranks.starts(f"file://{self._ranks.scratch.path}/rendezvous"), plan.start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._ranks.plan.size

    def call(self, method: str, arguments: Sequence[tuple[object, ...]], timeout_s: float) -> list[object]:
        """See `WorkerGroup.call`."""
        return self._exchange(self._ranks.calls(method, arguments), timeout_s)

    def alive(self) -> bool:
        """True while every rank's process runs."""
        return all(_end_of(process) is None for process in self._processes)

    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """Kill every rank with its process group."""
        # Processes are waited for here alone, after the kill: the id of one that was may be another program's.
        with self._killing:
            left = [process for process in self._processes if process.returncode is None]
            for process in left:
                os.killpg(process.pid, signal.SIGKILL)
            for process in left:
                process.wait()

    def close(self) -> None:
        """Kill what still runs, close the sockets, remove the scratch directory."""
        self.kill()
        for connection in self._connections:
            connection.close()
        if not self._released.is_set():
            self._released.set()
            self._ranks.remove()

    def log_path(self, rank: int) -> Path:
        """Where a rank's stdout and stderr go."""
        return self._ranks.log_path(rank)

    def _spawn(self) -> None:
        # The kernel kills a child when the *thread* that started it ends, so the thread must live as long as the
        # group; the caller's may be a short one of a pool.
        failure: list[Exception] = []
        spawned = threading.Event()

        def hold() -> None:
            try:
                for rank in range(self.size):
                    self._processes.append(self._spawn_rank(rank))
            except Exception as error:
                failure.append(error)
            spawned.set()
            self._released.wait()

        threading.Thread(target=hold, name="atoll-workers", daemon=True).start()
        spawned.wait()
        if failure:
            self.close()
            raise failure[0]

    def _spawn_rank(self, rank: int) -> subprocess.Popen[bytes]:
        ours, theirs = Pipe(duplex=True)
        self._connections.append(ours)
        command = [sys.executable, "-m", "atoll.trainer.workers.process", str(theirs.fileno()), str(os.getpid())]
        with theirs, self.log_path(rank).open("ab") as log:
            self._log_starts.append(log.tell())
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._ranks.environment(rank)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _exchange(self, messages: Sequence[Start | Call], timeout_s: float) -> list[object]:
        with self._lock:
            deadline = time.monotonic() + timeout_s
            answers: dict[int, Answer] = {}
            lost: dict[int, str] = {}
            for rank, (connection, message) in enumerate(zip(self._connections, messages, strict=True)):
                try:
                    connection.send(message)
                except (OSError, EOFError):
                    lost[rank] = self._how_it_ended(rank)
            while len(answers) + len(lost) < self.size:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                pending = [rank for rank in range(self.size) if rank not in answers and rank not in lost]
                self._receive(pending, min(left, 0.5), answers, lost)
                if lost or any(isinstance(answer, Raised) for answer in answers.values()):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            try:
                return results_of(answers, lost, self.size, timeout_s)
            except RankFailed as failed:
                self.kill()
                tail = log_tail(self.log_path(failed.rank), self._log_starts[failed.rank])
                raise WorkerLost(failed.rank, failed.reason, tail) from None

    def _receive(
        self,
        pending: Sequence[int],
        timeout_s: float,
        answers: dict[int, Answer],
        lost: dict[int, str],
    ) -> None:
        by_connection = {id(self._connections[rank]): rank for rank in pending}
        for ready in wait([self._connections[rank] for rank in pending], timeout_s):
            rank = by_connection[id(ready)]
            try:
                answers[rank] = self._connections[rank].recv()
            except (EOFError, OSError):
                lost[rank] = self._how_it_ended(rank)
        for rank in pending:  # a helper of the rank may hold its socket open: ask the process as well
            if rank not in answers and _end_of(self._processes[rank]) is not None:
                lost.setdefault(rank, self._how_it_ended(rank))

    def _how_it_ended(self, rank: int) -> str:
        deadline = time.monotonic() + 5
        while (code := _end_of(self._processes[rank])) is None:
            if time.monotonic() > deadline:
                return "closed its connection"
            time.sleep(0.01)
        return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _end_of(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit status, or the signal that ended it as a negative number; None while it runs. Does not wait for it, so
    that its id stays its own."""
    try:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.wait()
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
