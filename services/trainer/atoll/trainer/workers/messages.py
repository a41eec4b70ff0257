"""What a worker group and its worker processes say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.trainer.workers.group import WorkerPlace, WorkerRefusal


@dataclass(frozen=True)
class Start:
    """First message to a worker; answered by `Returned(None)` or `Raised`."""

    target: str
    place: WorkerPlace
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Call:
    """One method call."""

    method: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Returned:
    """The method's result."""

    value: object


@dataclass(frozen=True)
class Refused:
    """The method raised a `WorkerRefusal`: the worker is fine and waits for the next call."""

    refusal: WorkerRefusal


@dataclass(frozen=True)
class Raised:
    """The method raised anything else; ``summary`` is one line, the traceback is in the worker's log."""

    summary: str


Answer = Returned | Refused | Raised
