"""Runs one service and leaves nothing of it behind, whatever happens to `atoll serve` or to the service.

`atoll serve` starts one keeper per service, by path and with the standard library alone: it costs a few milliseconds.
The keeper is told by the kernel when its parent dies (PR_SET_PDEATHSIG), inherits every descendant that loses its own
parent (PR_SET_CHILD_SUBREAPER), and ends with the service's exit status.

    python -I -S keeper.py STOP_SECONDS PID_FILE COMMAND...
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def descendants(root: int) -> list[int]:
    """Process ids below `root`, read from /proc; processes that end meanwhile are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold anything, spaces and parentheses too.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        queue.extend(children.get(queue.pop(), ()))
        found = sorted({*found, *queue})
    return found


def signal_all(number: int) -> None:
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def reap(main: int) -> int | None:
    """Collects ended children, adopted ones too. Returns the wait status of `main` when it is among them."""
    status_of_main = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status_of_main
        if pid == 0:
            return status_of_main
        if pid == main:
            status_of_main = status


def end_the_rest(stop_seconds: float) -> None:
    """Whatever the service left: asked to stop, then killed."""
    signal_all(signal.SIGTERM)
    deadline = time.monotonic() + stop_seconds
    while descendants(os.getpid()):
        if time.monotonic() > deadline:
            signal_all(signal.SIGKILL)
        reap(0)
        time.sleep(POLL_SECONDS)


def main() -> int:
    stop_seconds, pid_file, command = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    parent = os.getppid()
    stop_at: float | None = None

    def stop(_number: int, _frame: object) -> None:
        nonlocal stop_at
        if stop_at is not None:
            # Asked twice: no more patience.
            stop_at = time.monotonic()
            return
        stop_at = time.monotonic() + stop_seconds
        # Not child.send_signal: it may collect the exit status that the loop below waits for.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        # A keeper that is killed outright takes the service with it.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    try:
        child = subprocess.Popen(command, preexec_fn=in_child)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    pid_file.write_text(f"{child.pid}\n")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    if os.getppid() != parent:
        # It died before the kernel knew that this process wants to hear of it.
        stop(signal.SIGTERM, None)
    while (status := reap(child.pid)) is None:
        if stop_at is not None and time.monotonic() > stop_at:
            signal_all(signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    # A service that stopped in an orderly way has ended its own processes; one that was killed has not.
    end_the_rest(2.0 if stop_at is None else max(0.0, stop_at - time.monotonic()))
    pid_file.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
