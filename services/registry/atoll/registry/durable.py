"""File operations that survive a crash, and a lock between processes."""

import contextlib
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Makes a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Makes a directory durable, deepest entries first. Symbolic links are not followed."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file so that after a crash it holds the old bytes or the new ones. The directory is synced too."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_read_only(root: Path) -> None:
    """Takes write permission from a directory and everything in it: an accident guard, not a defence, so files of a
    writer that runs as another user stay as they are."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            with contextlib.suppress(PermissionError):
                Path(folder, name).chmod(0o444)
        with contextlib.suppress(PermissionError):
            Path(folder).chmod(0o555)


def remove_tree(root: Path) -> None:
    """Removes a directory, read-only or not; one that is not there is no error."""
    for folder, _, _ in os.walk(root):
        Path(folder).chmod(stat.S_IRWXU)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root)


class StoreLock:
    """Held by one thread of one process at a time; the kernel lets go when a process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._threads, self._path.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield
