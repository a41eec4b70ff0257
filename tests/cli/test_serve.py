"""`atoll serve` with small programs in place of the services: what starts, what stops, and what is left."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ATOLL = Path(sys.executable).with_name("atoll")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


class StackRun:
    """One `atoll serve`; every process of it carries `mark` in its environment, whoever its parent is by now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.mark = f"ATOLL_TEST_RUN={folder}"
        self.process: subprocess.Popen[str] | None = None

    def command(self, services: str, *overrides: str) -> list[str]:
        file = self.folder / "stack.yaml"
        file.write_text(f"run_dir: {self.run_dir}\nservices:\n{services}")
        return [str(ATOLL), "serve", "-c", str(file), *overrides]

    def environment(self) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return {**os.environ, name: value}

    def start(self, services: str, *overrides: str) -> None:
        self.process = subprocess.Popen(
            self.command(services, *overrides),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_ready(self, services: str) -> None:
        self.start(services)
        wait_for((self.run_dir / "ready").exists, "ready")

    def finish(self, seconds: float = 20) -> tuple[int, str]:
        assert self.process
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def left(self) -> list[str]:
        """Command lines of the processes that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                except OSError:
                    continue
        return found

    def pid_of(self, name: str) -> int:
        return int((self.run_dir / "pids" / f"{name}.pid").read_text())


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackRun]:
    run = StackRun(tmp_path)
    yield run
    if run.process and run.process.poll() is None:
        run.process.kill()
        run.process.wait()
    wait_for(lambda: not run.left(), "an end of every process")


WRITES_ORDER = """
  {name}:
    command: [python, -u, -c, "import signal, sys, time; print('{name} starts', time.time()); signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('{name} stops', time.time()))); open('{folder}/{name}.up', 'w'); time.sleep(60)"]
    ready: {{command: [test, -e, "{folder}/{name}.up"]}}
"""  # noqa: E501


def times_in(stack: StackRun, word: str, *names: str) -> list[float]:
    logs = [(stack.run_dir / "logs" / f"{name}.log").read_text() for name in names]
    return [float(match[1]) for log in logs if (match := re.search(rf"{word} ([\d.]+)", log))]


def test_services_start_in_order_and_stop_in_reverse(stack: StackRun) -> None:
    stack.start_ready("".join(WRITES_ORDER.format(name=name, folder=stack.folder) for name in ("a", "b", "c")))
    assert stack.process
    stack.process.send_signal(signal.SIGINT)
    status, output = stack.finish()
    assert status == 0, output
    starts, stops = times_in(stack, "starts", "a", "b", "c"), times_in(stack, "stops", "c", "b", "a")
    assert len(starts) == len(stops) == 3
    assert starts == sorted(starts) and stops == sorted(stops)
    assert not stack.left()


def test_a_service_waits_until_the_one_before_it_is_ready(stack: StackRun) -> None:
    port = free_port()
    stack.start_ready(f"""
  web:
    command: [sh, -c, "sleep 1; exec python -m http.server {port} --bind 127.0.0.1"]
    ready: {{http: "http://127.0.0.1:{port}/"}}
  next:
    command: [python, -u, -c, "import socket, time; socket.create_connection(('127.0.0.1', {port})); print('connected'); time.sleep(60)"]
    ready: {{command: [grep, connected, "{stack.run_dir}/logs/next.log"]}}
""")  # noqa: E501


def test_parallel_services_do_not_wait_for_each_other(stack: StackRun) -> None:
    service = "  {name}: {{command: [sleep, '60'], ready: {{command: [sleep, '1.5']}}}}\n"
    services = "".join(service.format(name=f"s{number}") for number in range(4)) + "parallel: true\n"
    began = time.monotonic()
    stack.start_ready(services)
    assert time.monotonic() - began < 5, "four times 1.5 s one after the other are 6"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_serve_itself_is_stopped_or_killed(stack: StackRun, number: signal.Signals) -> None:
    stack.start_ready("""
  stubborn:
    command: [sh, -c, "trap '' TERM; setsid sleep 61 & sleep 62 & sleep 63; sleep 64"]
    stop_timeout: 1
  plain: {command: [sleep, "65"]}
""")
    wait_for(lambda: sum(line.startswith("sleep 6") for line in stack.left()) == 4, "four sleepers")
    assert stack.process
    stack.process.send_signal(number)
    stack.finish()
    wait_for(lambda: not stack.left(), "an end of every process", seconds=5)


def test_a_service_that_is_killed_stops_the_stack_with_the_last_lines_of_its_log(stack: StackRun) -> None:
    stack.start_ready("""
  first: {command: [sleep, "60"]}
  talker: {command: [sh, -c, "echo the cause of it; sleep 61 & exec sleep 60"]}
""")
    wait_for(lambda: "cause" in (stack.run_dir / "logs" / "talker.log").read_text(), "a line of log")
    os.kill(stack.pid_of("talker"), signal.SIGKILL)
    status, output = stack.finish()
    assert status == 1
    assert "talker ended with status 137" in output
    assert "the cause of it" in output
    assert not stack.left()


def test_the_last_lines_are_not_those_of_an_earlier_run(stack: StackRun) -> None:
    for words in ("the first", "the second"):
        stack.start(f"  a: {{command: [sh, -c, 'echo {words} reason >&2; exit 3']}}\n")
        status, output = stack.finish()
        assert (status, f"{words} reason" in output) == (1, True)
    assert "the first reason" not in output


def test_a_service_that_is_not_ready_in_time_stops_the_stack_and_says_what_was_seen(stack: StackRun) -> None:
    port = free_port()
    stack.start(f"""
  slow: {{command: [sh, -c, "echo loading; exec sleep 60"], ready: {{tcp: "127.0.0.1:{port}"}}, ready_timeout: 0.7}}
  never: {{command: [touch, "{stack.folder}/never"]}}
""")
    status, output = stack.finish()
    assert status == 1
    assert f"slow is not ready after 0.7 s; last seen: 127.0.0.1:{port} does not accept connections" in output
    assert "loading" in output
    assert not (stack.folder / "never").exists()
    assert not stack.left()


def test_a_second_stack_in_the_same_run_directory_is_refused(stack: StackRun) -> None:
    services = "  a: {command: [sleep, '60']}\n"
    stack.start_ready(services)
    assert stack.process
    second = subprocess.run(stack.command(services), capture_output=True, text=True, timeout=20, check=False)
    assert second.returncode == 2
    assert f"another stack (process {stack.process.pid}) runs in {stack.run_dir}" in second.stderr
    assert stack.process.poll() is None


def test_an_address_that_somebody_else_answers_is_refused(stack: StackRun) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        stack.start(f"  a: {{command: [touch, '{stack.folder}/started'], ready: {{tcp: '{address}'}}}}\n")
        status, output = stack.finish()
    assert status == 2
    assert f"services.a.ready: something already listens on {address}" in output
    assert not (stack.folder / "started").exists()


def test_a_bad_file_starts_nothing(stack: StackRun) -> None:
    stack.start(f"  a: {{command: [touch, '{stack.folder}/started']}}\n  b: {{comand: x}}\n")
    status, output = stack.finish()
    assert status == 2
    assert "services.b.comand: no such key" in output and "services.b.command: is missing" in output
    assert not (stack.folder / "started").exists()
    assert not stack.run_dir.exists()


@pytest.mark.parametrize("words", [["extra"], ["--vars.x"], ["--", "x"]])
def test_words_that_mean_nothing_are_refused(stack: StackRun, words: list[str]) -> None:
    stack.start("  a: {command: [sleep, '60']}\n", *words)
    status, output = stack.finish()
    assert status == 2, output
