import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
WORKS = [
    ("create", 30),
    ("train", 30),
    ("reseal", 20),
    ("lease", 12),
    ("record", 30),
    ("rollback", 12),
    ("recovery", 12),
]


def points(work: str, directory: Path, *more: str) -> int:
    """How many points were tried: restart, check, replay what the client was not answered, check."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.registry.crash_points", work, str(directory), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize(("work", "at_least"), WORKS)
def test_a_kill_before_any_durable_operation_leaves_a_registry_that_goes_on(
    tmp_path: Path, work: str, at_least: int
) -> None:
    assert points(work, tmp_path) >= at_least


@pytest.mark.slow
@pytest.mark.parametrize("work", ["train", "lease", "record", "rollback", "recovery"])
def test_a_kill_around_any_commit_on_postgresql_leaves_a_registry_that_goes_on(
    tmp_path: Path, postgres: PostgresServer, work: str
) -> None:
    assert points(work, tmp_path, str(postgres.directory)) >= 4
