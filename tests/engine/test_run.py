"""`python -m atoll.engine` as an operator runs it, and what is left of it after every kind of end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.engines import engine_environment, free_port, wait_until_ready

# A start takes twenty seconds on an idle machine and minutes on one that runs other tests as well.
pytestmark = pytest.mark.timeout(900)


@contextmanager
def launched(model_path: Path, log: Path, **settings: object) -> Iterator["subprocess.Popen[bytes]"]:
    """A launcher that has just been started; killed at the end, should a test fail."""
    environment = engine_environment(model_path=model_path, port=free_port(), device="cpu", **settings)
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "atoll.engine"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield launcher
    finally:
        for process in family(launcher.pid):
            process.kill()
        launcher.wait()


def family(pid: int) -> list[psutil.Process]:
    """The process and everything it started."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_for_family(pid: int, size: int) -> list[psutil.Process]:
    """Returns once the launcher has started that many processes, counting itself."""
    deadline = time.monotonic() + 200
    while len(found := family(pid)) < size:
        ended = not found or found[0].status() == psutil.STATUS_ZOMBIE
        assert not ended and time.monotonic() < deadline, f"expected {size} processes, got {found}"
        time.sleep(0.02)
    return found


def listened_at(processes: list[psutil.Process]) -> set[str]:
    """The addresses that anything connects to them at."""
    connections = (each for process in processes for each in process.net_connections("tcp"))
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def assert_gone(processes: list[psutil.Process], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def events(log: Path) -> list[dict[str, object]]:
    """All lines of the log, each of which is JSON."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_stop_signal_ends_a_serving_engine_with_status_0_and_nothing_is_left(
    tiny_models: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with launched(tiny_models / "student", log, weight_version="3:14", stop_timeout_s=120) as launcher:
        wait_until_ready(launcher, log)
        processes = family(launcher.pid)
        assert len(processes) >= 4
        assert listened_at(processes) == {"127.0.0.1"}
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(150) == 0
        assert_gone(processes)
    named = {event["event"]: event for event in events(log)}
    assert named["engine ready"]["weight_version"] == "3:14"
    assert named["engine stopped"]["status"] == 0
    assert "sglang" in named


def test_a_killed_launcher_of_a_serving_engine_leaves_nothing(tiny_models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(tiny_models / "student", log) as launcher:
        wait_until_ready(launcher, log)
        processes = family(launcher.pid)
        launcher.kill()
        assert_gone(processes)


@pytest.mark.parametrize("processes_then", [2, 4])
def test_a_launcher_killed_while_sglang_loads_leaves_nothing(
    tiny_models: Path, tmp_path: Path, processes_then: int
) -> None:
    with launched(tiny_models / "student", tmp_path / "log") as launcher:
        processes = wait_for_family(launcher.pid, processes_then)
        launcher.kill()
        assert_gone(processes)


def test_a_stop_signal_while_sglang_loads_is_obeyed_at_once(tiny_models: Path, tmp_path: Path) -> None:
    with launched(tiny_models / "student", tmp_path / "log") as launcher:
        processes = wait_for_family(launcher.pid, 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 128 + signal.SIGTERM
        assert_gone(processes)


def test_when_sglang_ends_the_launcher_ends_with_its_status_and_says_what_it_printed(
    tiny_models: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with launched(tiny_models / "student", log, extra_args="--no-such-flag") as launcher:
        assert launcher.wait(200) == 2
    last = events(log)[-1]
    assert last["event"] == "sglang ended by itself"
    assert "--no-such-flag" in str(last["output"])


def test_an_engine_that_is_not_ready_in_time_is_stopped(tiny_models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(tiny_models / "student", log, start_timeout_s=2) as launcher:
        processes = wait_for_family(launcher.pid, 2)
        assert launcher.wait(60) == 1
        assert_gone(processes)
    assert events(log)[-1]["event"] == "engine not ready in time"


def test_an_engine_that_is_tied_to_its_parent_ends_with_it(tiny_models: Path, tmp_path: Path) -> None:
    environment = engine_environment(
        model_path=tiny_models / "student", port=free_port(), device="cpu", die_with_parent=True
    )
    script = f"{sys.executable} -m atoll.engine & echo $!; wait"
    with (tmp_path / "log").open("wb") as output:
        parent = subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=output)
    assert parent.stdout is not None
    launcher = int(parent.stdout.readline())
    processes = wait_for_family(launcher, 2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert_gone(processes)
