"""What only local worker groups promise: they outlive threads, not their parent, and clear up after a killed one."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from atoll.trainer.workers.group import WorkerLost, WorkerPlan
from atoll.trainer.workers.local import LocalWorkerGroup

from tests.trainer.worker_support import eventually, gone, opener

group_of = opener(LocalWorkerGroup)


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


def test_the_group_of_a_rank_that_died_is_killed_once_and_under_an_id_that_is_still_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, killpg = [], os.killpg

    def kill(group: int, number: int) -> None:
        assert psutil.pid_exists(group), "waited for already: it may be another program's"
        killed.append(group)
        killpg(group, number)

    with group_of(2, tmp_path) as group:
        monkeypatch.setattr(os, "killpg", kill)
        helpers = group.call("start_helper", [()] * 2, 30)
        pids = group.pids()
        with pytest.raises(WorkerLost, match="rank 0 was ended by signal SIGKILL"):
            group.call("kill_self_on", [(0, "")] * 2, 60)
        assert not group.alive()
        assert killed == pids
    assert killed == pids
    assert eventually(lambda: all(gone(pid) for pid in helpers if isinstance(pid, int)))


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
