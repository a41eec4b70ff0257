"""Worker groups of both kinds for the tests of their contract."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import psutil
from atoll.trainer.workers.group import WorkerGroup, WorkerPlan


class ObservedGroup(WorkerGroup, Protocol):
    """A group that tells its processes."""

    def pids(self) -> list[int]: ...


Launch = Callable[[WorkerPlan], ObservedGroup]
GroupOf = Callable[..., AbstractContextManager[ObservedGroup]]


def plan_of(size: int, logs: Path, target: str = "tests.trainer.worker_targets:Calculator") -> WorkerPlan:
    arguments: dict[str, object] = {"base": 7} if target.endswith("Calculator") else {}
    return WorkerPlan(target, size, arguments, logs, {"ATOLL_TEST_WORD": "here"})


def opener(launch: Launch) -> GroupOf:
    @contextmanager
    def group_of(
        size: int, logs: Path, target: str = "tests.trainer.worker_targets:Calculator"
    ) -> Iterator[ObservedGroup]:
        group = launch(plan_of(size, logs, target))
        try:
            yield group
        finally:
            group.close()

    return group_of


def gone(pid: int) -> bool:
    """No such process, or only its entry is left until its parent reads it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
