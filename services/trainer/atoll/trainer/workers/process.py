"""The program of one local worker: ``python -m atoll.trainer.workers.process <fd> <parent pid>``.

It reads a `Start` from the inherited socket, builds the target object, then answers one `Call` at a time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from atoll.trainer.workers.host import WorkerHost

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel (Linux) for SIGKILL when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:  # it died before the request was in place
        os._exit(1)


def serve(connection: Connection) -> None:
    """Answer messages until the parent closes its end."""
    host = WorkerHost()
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(host.answer(message))


def main() -> None:
    """Entry point of the worker process."""
    # A checkpoint is written by forked children: one that outlived us would write into the next attempt's files.
    os.register_at_fork(after_in_child=die_with_parent)
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main()
elif __name__ == "__mp_main__":
    # Helpers that libraries spawn from a worker import this module under this name: they must not outlive it either.
    die_with_parent()
