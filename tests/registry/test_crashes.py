import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("work", "at_least"), [("create", 30), ("train", 30), ("reseal", 20)])
def test_a_kill_before_any_durable_operation_leaves_a_registry_that_goes_on(
    tmp_path: Path, work: str, at_least: int
) -> None:
    """Every point between two operations is tried: restart, check, replay what the client was not answered, check."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.registry.crash_points", work, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) >= at_least, done.stdout
