import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from atoll.registry.app import Registry
from atoll.registry.settings import RegistrySettings

from tests.registry.material import SCENARIO, seal

ROOT = Path(__file__).parents[2]
ROUNDS = 10


@pytest.fixture
def racers(settings: RegistrySettings) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two processes with the registry open, which commit what they are told."""
    directory, base = settings.store.parent, settings.scenarios[0].base_model
    command = [sys.executable, "-m", "tests.registry.racing", str(directory), base, settings.database]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
    yield processes
    for process in processes:
        process.communicate(timeout=30)


def race(racers: list["subprocess.Popen[str]"], lines: tuple[str, str]) -> list[str]:
    for process, line in zip(racers, lines, strict=True):
        assert process.stdin is not None
        process.stdin.write(line + "\n")
    for process in racers:
        assert process.stdin is not None
        process.stdin.flush()
    return [process.stdout.readline().strip() for process in racers if process.stdout is not None]


def test_of_two_processes_that_commit_on_one_head_exactly_one_wins(
    registry: Registry, racers: list["subprocess.Popen[str]"]
) -> None:
    model = seal(registry, b"model").digest
    for head in range(ROUNDS):
        answers = race(racers, (f"a-{head} {head} {model} a-{head}", f"b-{head} {head} {model} b-{head}"))
        assert sorted(answers) == sorted([str(head + 1), "parent_not_head"])
    chain = registry.chain.since(SCENARIO, 0, 100)
    assert [(v.number, v.revision, v.content.parent) for v in chain[1:]] == [
        (number, number + 1, number - 1) for number in range(1, ROUNDS + 1)
    ]


def test_two_processes_that_commit_the_same_job_get_the_same_version(
    registry: Registry, racers: list["subprocess.Popen[str]"]
) -> None:
    model = seal(registry, b"model").digest
    for head in range(ROUNDS):
        line = f"job-{head} {head} {model} sample-{head}"
        assert race(racers, (line, line)) == [str(head + 1)] * 2
    assert registry.chain.get(SCENARIO).number == ROUNDS
