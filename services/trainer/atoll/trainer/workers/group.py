"""The interface the trainer uses to run one object per rank, wherever the ranks live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class WorkerRefusal(Exception):
    """Raised by a worker method on *every* rank at the same point: the input was wrong, the group lives on.

    A subclass must be picklable from its positional arguments.
    """


class WorkerLost(Exception):
    """A rank died, raised, or did not answer in time; the whole group has been killed."""

    def __init__(self, rank: int, reason: str, log_tail: str) -> None:
        super().__init__(rank, reason, log_tail)
        self.rank = rank
        self.reason = reason
        self.log_tail = log_tail

    def __str__(self) -> str:
        lines = f"; its last log lines:\n{self.log_tail}" if self.log_tail else "; it logged nothing"
        return f"worker rank {self.rank} {self.reason}{lines}"


@dataclass(frozen=True)
class WorkerPlan:
    """What to launch.

    Example: ``WorkerPlan("atoll.trainer.megatron.rank:MegatronRank", 2, {"settings": s}, Path("run/logs"))``
    """

    target: str
    """``module:Class``. Each rank builds ``Class(place, **arguments)`` and then serves its methods."""
    size: int
    arguments: Mapping[str, object]
    """Picklable; the same for every rank."""
    log_directory: Path
    """Each rank writes stdout and stderr to ``rank-<n>.log`` in here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 120.0


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker stands in its group. ``rendezvous`` is a torch.distributed init method of this group alone.

    Example: ``WorkerPlace(rank=1, size=2, rendezvous="file:///run/scratch-7-x1/rendezvous", scratch=Path("/run/..."))``
    """

    rank: int
    size: int
    rendezvous: str
    scratch: Path
    """Directory of this group alone, which all of its ranks share and which goes with it."""


class WorkerGroup(Protocol):
    """Ranks that are called together. Calls are serialized; `kill` may come from any thread."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def call(self, method: str, arguments: Sequence[tuple[object, ...]], timeout_s: float) -> list[object]:
        """Call ``method(*arguments[rank])`` on every rank and return the results in rank order.

        Raises:
            WorkerRefusal: every rank refused; the group is usable.
            WorkerLost: a rank died, raised anything else, or was late; the group is gone.
        """
        ...

    def alive(self) -> bool:
        """True while every rank's process runs."""
        ...

    def kill(self) -> None:
        """Kill every rank and all they started, at once; a call in progress raises `WorkerLost`."""
        ...

    def close(self) -> None:
        """Kill what still runs and remove the group's temporary files. Idempotent."""
        ...
