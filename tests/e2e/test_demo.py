"""`make demo` with the tiny model: a fresh seed, one command, a reward that rises, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "atoll.cli.demo"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of what runs in a working directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == folder:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "DEMO_"))}
    return clean | more


def test_the_tiny_demo_teaches_its_model_something(tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND,
        cwd=tmp_path,
        env=environment(DEMO_MODEL="tiny"),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = re.fullmatch(
        r"demo: ok versions=(\d+) reward_first=([\d.]+) reward_last=([\d.]+)", done.stdout.splitlines()[-1]
    )
    assert last, done.stdout[-500:]
    assert int(last[1]) >= 9
    assert float(last[3]) - float(last[2]) >= 0.2
    assert not processes_of(tmp_path)


def test_ctrl_c_stops_the_demo_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        COMMAND,
        cwd=tmp_path,
        env=environment(DEMO_MODEL="tiny"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A terminal sends Ctrl-C to the whole foreground group.
        start_new_session=True,
    ) as demo:
        assert demo.stdout
        while "engine" not in (line := demo.stdout.readline()):
            assert line, "the demo ended before it started an engine"
        os.killpg(demo.pid, signal.SIGINT)
        demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert not processes_of(tmp_path)


def test_a_model_that_the_demo_does_not_know_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        COMMAND,
        cwd=tmp_path,
        env=environment(DEMO_MODEL="huge"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "smollm2, tiny" in done.stderr
    assert not list(tmp_path.iterdir())
