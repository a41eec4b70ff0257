"""Links between services are cut and healed, in network namespaces."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.namespaces import in_own_network, may_make_namespaces
from tests.chaos.partitioned import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not may_make_namespaces(), reason="no network namespaces on this machine"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", CASES)
def test_a_partition_costs_time_and_nothing_else(case: str, tmp_path: Path) -> None:
    command = in_own_network([sys.executable, "-m", "tests.chaos.partitioned", case, str(tmp_path)])
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
