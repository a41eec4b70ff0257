import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from atoll.registry.app import Registry
from atoll.registry.settings import RegistrySettings

from tests.registry.material import SCENARIO, seal

ROOT = Path(__file__).parents[2]
ROUNDS = 10
TTL = timedelta(hours=1)


@pytest.fixture
def racers(settings: RegistrySettings) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two processes with the registry open, which call what they are told."""
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
        answers = race(
            racers, (f"commit a-{head} {head} {model} a-{head} 0", f"commit b-{head} {head} {model} b-{head} 0")
        )
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
        line = f"commit job-{head} {head} {model} sample-{head} 0"
        assert race(racers, (line, line)) == [str(head + 1)] * 2
    assert registry.chain.get(SCENARIO).number == ROUNDS


def test_of_two_processes_that_want_a_free_lease_one_gets_it_under_the_next_token(
    registry: Registry, racers: list["subprocess.Popen[str]"]
) -> None:
    for token in range(1, ROUNDS + 1):
        one, other = race(racers, ("acquire a", "acquire b"))
        assert one == other
        holder = one.split()[0]
        assert one == f"{holder} {token}"
        assert race(racers, (f"release {holder}", f"release {holder}")) == ["released"] * 2
    lease = registry.leases.get(SCENARIO, "trainer")
    assert lease is not None and lease.fencing_token == ROUNDS


def test_a_commit_that_races_with_its_replacement_is_before_it_or_fenced(
    registry: Registry, racers: list["subprocess.Popen[str]"]
) -> None:
    model = seal(registry, b"model").digest
    head = 0
    registry.leases.acquire(SCENARIO, "trainer", "old", "old:1", TTL)
    for token in range(1, ROUNDS + 1):
        holder = registry.leases.get(SCENARIO, "trainer")
        assert holder is not None
        registry.leases.release(SCENARIO, "trainer", holder.holder)
        late, taken = race(
            racers, (f"commit job-{token} {head} {model} sample-{token} {token}", f"acquire new-{token}")
        )
        assert taken == f"new-{token} {token + 1}"
        assert late in (str(head + 1), "fenced")
        head = registry.chain.get(SCENARIO).number
        assert (late == "fenced") == (registry.chain.get(SCENARIO).content.job_id != f"job-{token}")


def test_jobs_that_two_processes_record_at_once_get_an_order_without_gaps(
    registry: Registry, racers: list["subprocess.Popen[str]"]
) -> None:
    for index in range(ROUNDS):
        answers = race(racers, (f"record a-{index} 0", f"record b-{index} 0"))
        assert sorted(map(int, answers)) == [2 * index + 1, 2 * index + 2]
