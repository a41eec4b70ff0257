"""Local worker groups: results in rank order, every kind of loss named, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from atoll.trainer.workers.group import WorkerLost, WorkerPlan, WorkerRefusal
from atoll.trainer.workers.local import LocalWorkerGroup


@contextmanager
def group_of(
    size: int, logs: Path, target: str = "tests.trainer.worker_targets:Calculator"
) -> Iterator[LocalWorkerGroup]:
    arguments: dict[str, object] = {"base": 7} if target.endswith("Calculator") else {}
    group = LocalWorkerGroup(WorkerPlan(target, size, arguments, logs, {"ATOLL_TEST_WORD": "here"}))
    try:
        yield group
    finally:
        group.close()


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


def test_results_come_back_in_rank_order_and_the_rendezvous_is_the_groups_own(tmp_path: Path) -> None:
    with group_of(2, tmp_path / "a") as first, group_of(2, tmp_path / "b") as second:
        assert first.call("add", [(1,), (2,)], 30) == [8, 109]
        assert first.call("environment", [("ATOLL_TEST_WORD",)] * 2, 30) == ["here", "here"]
        here, there = first.call("where", [()] * 2, 30), second.call("where", [()] * 2, 30)
        ranks = [place[:2] for place in here if isinstance(place, tuple)]
        assert ranks == [(0, 2), (1, 2)]
        assert here != there


def test_a_rank_that_raises_is_named_with_its_log_and_the_others_are_killed(tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        pids = group.pids()
        with pytest.raises(WorkerLost) as lost:
            group.call("fail_on", [(1,), (1,)], 60)
        assert lost.value.rank == 1
        assert lost.value.reason == "raised ValueError: rank 1 cannot"
        assert "Traceback" in lost.value.log_tail
        assert all(gone(pid) for pid in pids)
        assert not group.alive()
        with pytest.raises(WorkerLost):
            group.call("add", [(1,), (1,)], 30)


def test_kill_9_of_one_rank_is_reported_within_seconds(tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        pids = group.pids()
        start = time.monotonic()
        with pytest.raises(WorkerLost) as lost:
            group.call("kill_self_on", [(0, "last words")] * 2, 60)
        assert time.monotonic() - start < 5
        assert lost.value.rank == 0
        assert lost.value.reason == "was ended by signal SIGKILL"
        assert "last words" in lost.value.log_tail
        assert all(gone(pid) for pid in pids)


def test_the_log_tail_is_of_this_group_and_not_of_one_before_it(tmp_path: Path) -> None:
    with group_of(1, tmp_path) as group, pytest.raises(WorkerLost):
        group.call("kill_self_on", [(0, "words of the first")], 60)
    with group_of(1, tmp_path) as group, pytest.raises(WorkerLost) as lost:
        group.call("kill_self_on", [(0, "words of the second")], 60)
    assert "words of the second" in lost.value.log_tail
    assert "words of the first" not in lost.value.log_tail


def test_a_late_answer_kills_the_group(tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        pids = group.pids()
        with pytest.raises(WorkerLost, match=r"rank 1 did not answer within 0\.5 s"):
            group.call("sleep", [(0.0,), (60.0,)], 0.5)
        assert all(gone(pid) for pid in pids)


def test_a_refusal_on_every_rank_leaves_the_group_usable(tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        with pytest.raises(WorkerRefusal, match="not this input"):
            group.call("refuse", [([0, 1],)] * 2, 30)
        assert group.call("add", [(0,), (0,)], 30) == [7, 107]


def test_a_refusal_on_one_rank_only_is_a_loss(tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group, pytest.raises(WorkerLost, match="refused what other ranks accepted"):
        group.call("refuse", [([1],)] * 2, 30)


def test_a_worker_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerLost, match="no device for rank"),
        group_of(2, tmp_path, "tests.trainer.worker_targets:Broken"),
    ):
        pass


def test_kill_from_another_thread_ends_a_call(tmp_path: Path) -> None:
    with group_of(1, tmp_path) as group:
        threading.Timer(0.5, group.kill).start()
        with pytest.raises(WorkerLost, match="SIGKILL"):
            group.call("sleep", [(60.0,)], 60)


def test_workers_outlive_the_thread_that_launched_them(tmp_path: Path) -> None:
    groups: list[LocalWorkerGroup] = []
    plan = WorkerPlan("tests.trainer.worker_targets:Calculator", 1, {"base": 7}, tmp_path)
    launcher = threading.Thread(target=lambda: groups.append(LocalWorkerGroup(plan)))
    launcher.start()
    launcher.join()
    try:
        time.sleep(0.3)
        assert groups[0].call("add", [(1,)], 30) == [8]
    finally:
        groups[0].close()


def test_closing_removes_workers_helpers_and_scratch_files(tmp_path: Path) -> None:
    with group_of(1, tmp_path) as group:
        (helper,) = group.call("start_helper", [()], 30)
        (place,) = group.call("where", [()], 30)
        assert isinstance(helper, int)
        assert isinstance(place, tuple)
        pids = [*group.pids(), helper]
    assert eventually(lambda: all(gone(pid) for pid in pids))
    assert not Path(str(place[2]).removeprefix("file://")).parent.exists()


_LAUNCHER = """
import sys, time
from pathlib import Path
from atoll.trainer.workers.group import WorkerPlan
from atoll.trainer.workers.local import LocalWorkerGroup
sys.path.insert(0, sys.argv[2])
group = LocalWorkerGroup(WorkerPlan("tests.trainer.worker_targets:Calculator", 2, {"base": 0}, Path(sys.argv[1])))
helpers = group.call("start_library_helper", [()] * 2, 60) + group.call("start_forked_helper", [()] * 2, 60)
print(*group.pids(), *helpers, flush=True)
time.sleep(600)
"""


def test_workers_and_their_helpers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path), str(Path(__file__).parents[2])]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 6
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert eventually(lambda: all(gone(pid) for pid in pids))


def test_scratch_is_under_the_log_directory_and_what_a_killed_trainer_left_is_removed(tmp_path: Path) -> None:
    left, other = tmp_path / "scratch-of-a-killed-one", tmp_path / "notes"
    for directory in (left, other):
        directory.mkdir()
    with group_of(1, tmp_path) as group:
        (answer,) = group.call("where", [()], 10)
        assert isinstance(answer, tuple)
        scratch = Path(answer[2].removeprefix("file://")).parent
        assert scratch.parent == tmp_path and scratch.is_dir()
        assert not left.exists() and other.exists()
        with group_of(1, tmp_path):
            assert scratch.is_dir()
    assert not scratch.exists()
