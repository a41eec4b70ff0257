"""Who held the lease from this run directory before: dead for sure, so its lease need not run out.

A process keeps the file locked while it lives, and the kernel unlocks it whatever it dies of.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.common.names import check_id, new_id


@contextmanager
def holder_ids(run_dir: Path, scenario: str) -> Iterator[tuple[str, str]]:
    """This process's holder id, and that of a predecessor that is dead ("" when there is none or it may live).

    Raises BadConfiguration for a directory that cannot be written.
    """
    mine = new_id()
    try:
        opened = (run_dir / f"lease-holder-{scenario}").open("a+")
    except OSError as error:
        raise BadConfiguration(f"ATOLL_TRAINER_RUN_DIR: {error}", field="ATOLL_TRAINER_RUN_DIR") from error
    with opened as file:
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
