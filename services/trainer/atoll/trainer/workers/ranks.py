"""What every kind of worker group gives its ranks: messages, environment, a log each, and a place for their files."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.trainer.workers.group import WorkerPlace, WorkerPlan
from atoll.trainer.workers.messages import Call, Start
from atoll.trainer.workers.scratch import Scratch

SOCKET_NAME_BYTES = 107
"""Longest name of a Unix socket on Linux."""
_SOCKET_IN_TMPDIR = "/pymp-12345678/listener-12345678"
"""What the standard library's helper processes add to the directory for temporary files."""


@dataclass(frozen=True)
class Ranks:
    """A group that is to be: its plan, and the directories that go with it, also after a SIGKILL of all of it."""

    plan: WorkerPlan
    scratch: Scratch
    short: Scratch | None
    """Beside the system's temporary files, where names of sockets in ``scratch`` would be too long."""

    @classmethod
    def prepare(cls, plan: WorkerPlan) -> Ranks:
        """Makes the directories, and removes those of groups that were killed."""
        plan.log_directory.mkdir(parents=True, exist_ok=True)
        scratch = Scratch.make(plan.log_directory.resolve())
        inside = scratch.path / "tmp"
        inside.mkdir()
        fits = len(os.fsencode(inside)) + len(_SOCKET_IN_TMPDIR) <= SOCKET_NAME_BYTES
        return cls(plan, scratch, None if fits else Scratch.make(Path(tempfile.gettempdir()), "atoll-ranks-"))

    @property
    def temporary(self) -> Path:
        """Where the ranks' libraries put temporary files and sockets: helpers of a killed rank leave theirs behind."""
        return self.scratch.path / "tmp" if self.short is None else self.short.path

    def remove(self) -> None:
        """Remove the directories. Once only."""
        self.scratch.remove()
        if self.short is not None:
            self.short.remove()

    def log_path(self, rank: int) -> Path:
        """Where a rank's stdout and stderr go, on the machine it runs on."""
        return self.plan.log_directory.resolve() / f"rank-{rank}.log"

    def environment(self, local_rank: int) -> dict[str, str]:
        """What a rank's process finds beside the launcher's own environment; the plan's words win."""
        threads = str(max(1, (os.cpu_count() or 1) // self.plan.size))
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
            "LOCAL_RANK": str(local_rank),
            "TMPDIR": str(self.temporary),
            **self.plan.environment,
        }

    def starts(self, rendezvous: str) -> list[Start]:
        """The first message to each rank."""
        plan = self.plan
        places = [WorkerPlace(rank, plan.size, rendezvous, self.scratch.path) for rank in range(plan.size)]
        return [Start(plan.target, place, plan.arguments) for place in places]

    def calls(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Call]:
        """A call to each rank. Raises ValueError for another number of arguments than ranks."""
        if len(arguments) != self.plan.size:
            raise ValueError(f"{method}: expected arguments for {self.plan.size} ranks, got {len(arguments)}")
        return [Call(method, each) for each in arguments]
