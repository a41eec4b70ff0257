"""Worker groups of either kind: results in rank order, every kind of loss named, and nothing left behind."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from atoll.trainer.workers.group import WorkerLost, WorkerRefusal
from atoll.trainer.workers.local import LocalWorkerGroup
from atoll.trainer.workers.ray_loopback import prefer_loopback

from tests.trainer.worker_support import GroupOf, eventually, gone, opener


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def group_of(request: pytest.FixtureRequest) -> Iterator[GroupOf]:
    if request.param == "local":
        yield opener(LocalWorkerGroup)
        return
    prefer_loopback()
    from atoll.trainer.workers.ray_connection import RayConnection
    from atoll.trainer.workers.ray_group import RayWorkerGroup

    shared = RayConnection(None, "atoll-test", 4)
    yield opener(RayWorkerGroup)
    shared.close()


def test_results_come_back_in_rank_order_and_the_rendezvous_is_the_groups_own(
    group_of: GroupOf, tmp_path: Path
) -> None:
    with group_of(2, tmp_path / "a") as first, group_of(2, tmp_path / "b") as second:
        assert first.call("add", [(1,), (2,)], 30) == [8, 109]
        assert first.call("environment", [("ATOLL_TEST_WORD",)] * 2, 30) == ["here", "here"]
        here, there = first.call("where", [()] * 2, 30), second.call("where", [()] * 2, 30)
        ranks = [place[:2] for place in here if isinstance(place, tuple)]
        assert ranks == [(0, 2), (1, 2)]
        assert here != there


def test_a_rank_that_raises_is_named_with_its_log_and_the_others_are_killed(group_of: GroupOf, tmp_path: Path) -> None:
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


def test_kill_9_of_one_rank_is_reported_within_seconds(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        pids = group.pids()
        start = time.monotonic()
        with pytest.raises(WorkerLost) as lost:
            group.call("kill_self_on", [(0, "last words")] * 2, 60)
        assert time.monotonic() - start < 5
        assert lost.value.rank == 0
        assert lost.value.reason.startswith(("was ended by signal SIGKILL", "died: "))
        assert "last words" in lost.value.log_tail
        assert all(gone(pid) for pid in pids)


def test_the_log_tail_is_of_this_group_and_not_of_one_before_it(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(1, tmp_path) as group, pytest.raises(WorkerLost):
        group.call("kill_self_on", [(0, "words of the first")], 60)
    with group_of(1, tmp_path) as group, pytest.raises(WorkerLost) as lost:
        group.call("kill_self_on", [(0, "words of the second")], 60)
    assert "words of the second" in lost.value.log_tail
    assert "words of the first" not in lost.value.log_tail


def test_a_late_answer_kills_the_group(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        pids = group.pids()
        with pytest.raises(WorkerLost, match=r"rank 1 did not answer within 0\.5 s"):
            group.call("sleep", [(0.0,), (60.0,)], 0.5)
        assert all(gone(pid) for pid in pids)


def test_a_refusal_on_every_rank_leaves_the_group_usable(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group:
        with pytest.raises(WorkerRefusal, match="not this input"):
            group.call("refuse", [([0, 1],)] * 2, 30)
        assert group.call("add", [(0,), (0,)], 30) == [7, 107]


def test_a_refusal_on_one_rank_only_is_a_loss(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(2, tmp_path) as group, pytest.raises(WorkerLost, match="refused what other ranks accepted"):
        group.call("refuse", [([1],)] * 2, 30)


def test_a_worker_that_cannot_be_built_says_why(group_of: GroupOf, tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerLost, match="no device for rank"),
        group_of(2, tmp_path, "tests.trainer.worker_targets:Broken"),
    ):
        pass


def test_kill_from_another_thread_ends_a_call(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(1, tmp_path) as group:
        threading.Timer(0.5, group.kill).start()
        with pytest.raises(WorkerLost, match=r"SIGKILL|killed by|died"):
            group.call("sleep", [(60.0,)], 60)


def test_closing_removes_workers_helpers_and_scratch_files(group_of: GroupOf, tmp_path: Path) -> None:
    with group_of(1, tmp_path) as group:
        (helper,) = group.call("start_helper", [()], 30)
        assert isinstance(helper, int)
        assert len(list(tmp_path.glob("scratch-*"))) == 1
        pids = [*group.pids(), helper]
    assert eventually(lambda: all(gone(pid) for pid in pids))
    assert not list(tmp_path.glob("scratch-*"))
