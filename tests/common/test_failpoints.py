"""A failpoint kills the process that reaches it, at the time that was asked for, and no other."""

import signal
import subprocess
import sys

import pytest
from atoll.common.errors import BadConfiguration
from atoll.common.failpoints import VARIABLE, reached

VISITS = """
import sys
from atoll.common.failpoints import reached
for visit in range(1, 4):
    reached("trainer.recorded")
    reached("trainer.staged")
    print(visit, file=sys.stderr, flush=True)
"""


def visited(failpoint: str) -> tuple[int, str]:
    """Exit status and what a process printed that passes the places three times."""
    done = subprocess.run(
        [sys.executable, "-c", VISITS], env={VARIABLE: failpoint}, stderr=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_the_process_kills_itself_at_the_named_place_and_time() -> None:
    assert visited("trainer.staged") == (-signal.SIGKILL, "")
    assert visited("trainer.staged:3") == (-signal.SIGKILL, "1\n2\n")


def test_other_places_do_nothing() -> None:
    assert visited("trainer.committed") == (0, "1\n2\n3\n")


def test_a_time_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "trainer.staged:often")
    with pytest.raises(BadConfiguration, match="often"):
        reached("trainer.staged")
