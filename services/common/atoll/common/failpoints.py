"""Places where a test kills a process: right after something became durable, and before anybody was told.

`ATOLL_FAILPOINT=trainer.staged` kills it the first time that it gets there, `trainer.staged:3` the third time. Without
the variable, as always outside tests, `reached` does nothing. `ATOLL_FAILPOINT_SIGNAL=SIGSTOP` stops it there instead:
a process that comes back later with what it was about to do.
"""

import os
import signal
from functools import cache
from itertools import count

import structlog
from atoll.common.errors import BadConfiguration

VARIABLE = "ATOLL_FAILPOINT"
SIGNAL_VARIABLE = "ATOLL_FAILPOINT_SIGNAL"

log = structlog.get_logger(__name__)


def reached(name: str) -> None:
    """Call where `name`, "<service>.<what is durable now>", has just become true.

    Raises BadConfiguration for a variable that names no time.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    place, _, times = wanted.partition(":")
    if place != name:
        return
    if not (times or "1").isdigit():
        raise BadConfiguration(f"{VARIABLE} is {wanted!r}, expected a name or name:times", field=VARIABLE)
    if next(_visits(name)) == int(times or "1"):
        log.warning("failpoint reached", name=name)
        os.kill(os.getpid(), signal.Signals[os.environ.get(SIGNAL_VARIABLE, "SIGKILL")])


@cache
def _visits(name: str) -> "count[int]":
    """Counts from 1, once for each process and name."""
    return count(1)
