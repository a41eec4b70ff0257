"""Directories that belong to one worker group and are removed with it, or by the next group after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Scratch:
    """A directory and the descriptor whose lock says that its owner is there. Example: ``Scratch(Path("run/x"), 5)``"""

    path: Path
    lock: int

    @classmethod
    def make(cls, parent: Path, prefix: str = "scratch-") -> Scratch:
        """A new directory in ``parent``.

        Those with the same prefix that a killed process left are removed: the kernel gave up their locks with it.
        Process ids would not tell, since a container's processes have the same ones after every restart.
        """
        for left in parent.glob(f"{prefix}*"):
            try:
                descriptor = os.open(left, os.O_RDONLY)
            except OSError:  # another user's, or its owner removed it just now
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor = os.open(made, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return cls(made, descriptor)

    def remove(self) -> None:
        """Remove the directory and give up its lock. Once only."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
