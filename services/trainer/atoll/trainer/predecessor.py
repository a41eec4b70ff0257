"""Who held the lease from this run directory before: dead for sure, so its lease need not run out.

A process keeps the file locked while it lives, and the kernel unlocks it whatever it dies of.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.common.errors import InvalidInput
from atoll.common.names import check_id, new_id


@contextmanager
def holder_ids(run_dir: Path, scenario: str) -> Iterator[tuple[str, str]]:
    """This process's holder id, and that of a predecessor that is dead ("" when there is none or it may live)."""
    mine = new_id()
    with (run_dir / f"lease-holder-{scenario}").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another trainer shares the directory; what happens to its lease is its own matter.
            yield mine, ""
            return
        file.seek(0)
        before = _id_in(file.read())
        file.truncate(0)
        file.write(mine)
        file.flush()
        yield mine, before


def _id_in(text: str) -> str:
    """What a machine that lost its power left may be anything; the lease of a process that is not named runs out."""
    try:
        return check_id(text, "holder")
    except InvalidInput:
        return ""
