"""A full disk, said the same way everywhere."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError

RETRY_SECONDS = 30.0
"""People free a disk, or an hour's grace of an artifact ends: asking more often is of no use."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_full(where: str) -> AtollError:
    return AtollError(
        f"no room left in {where}; nothing was kept of this call: free space or lower ATOLL_REGISTRY_KEEP_CHECKPOINTS, "
        "then make the same call again",
        reason=errors_pb2.REASON_STORAGE_FULL,
        retry_after_s=RETRY_SECONDS,
    )


def storage_low(store: Path, free: int, min_free: int) -> AtollError:
    return AtollError(
        f"the filesystem of the store {store} has {free:,} bytes left, expected {min_free:,} or more before anything "
        "is written, and retention has nothing more to remove: free space, unpin versions, or lower "
        "ATOLL_REGISTRY_MIN_FREE_SPACE; the same call works as soon as there is room",
        reason=errors_pb2.REASON_STORAGE_FULL,
        retry_after_s=RETRY_SECONDS,
    )


@contextmanager
def needs_room(where: str) -> Iterator[None]:
    """Turns a full disk inside the block into AtollError(STORAGE_FULL); other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise storage_full(where) from error
        raise
