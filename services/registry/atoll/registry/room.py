"""A full disk, said the same way everywhere."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_full(where: str) -> AtollError:
    return AtollError(
        f"no room left in {where}; nothing was kept of this call: free space or lower ATOLL_REGISTRY_KEEP_CHECKPOINTS, "
        "then make the same call again",
        reason=errors_pb2.REASON_STORAGE_FULL,
        retry_after_s=30.0,
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
