"""What worker groups of either kind give their ranks before any of them runs."""

import os
from pathlib import Path

import pytest
from atoll.trainer.workers.group import WorkerPlan
from atoll.trainer.workers.local import LocalWorkerGroup
from atoll.trainer.workers.ranks import SOCKET_NAME_BYTES, Ranks

from tests.trainer.worker_support import plan_of


def test_every_rank_is_told_its_place_and_the_plans_words_win(tmp_path: Path) -> None:
    plan = WorkerPlan("module:Class", 2, {"base": 7}, tmp_path, {"PYTHONUNBUFFERED": "0"})
    ranks = Ranks.prepare(plan)
    starts = ranks.starts("file:///r")
    assert [(start.place.rank, start.place.size, start.place.rendezvous) for start in starts] == [
        (0, 2, "file:///r"),
        (1, 2, "file:///r"),
    ]
    assert {start.place.scratch for start in starts} == {ranks.scratch.path}
    environment = ranks.environment(1)
    assert (environment["LOCAL_RANK"], environment["PYTHONUNBUFFERED"]) == ("1", "0")
    assert [call.arguments for call in ranks.calls("add", [(1,), (2,)])] == [(1,), (2,)]
    with pytest.raises(ValueError, match="add: expected arguments for 2 ranks, got 1"):
        ranks.calls("add", [(1,)])
    ranks.remove()


@pytest.mark.parametrize("depth", [1, 12])
def test_helpers_put_their_sockets_where_the_group_removes_them_however_deep_the_run_lies(
    tmp_path_factory: pytest.TempPathFactory, depth: int
) -> None:
    logs = tmp_path_factory.mktemp("r").joinpath(*["directory"] * depth)
    group = LocalWorkerGroup(plan_of(1, logs))
    socket = Path(str(group.call("listening_helper", [()], 60)[0]))
    assert socket.exists()
    assert len(os.fsencode(socket)) <= SOCKET_NAME_BYTES
    assert (depth == 1) == socket.is_relative_to(logs)
    group.kill()
    assert socket.exists(), "a killed rank clears nothing up"
    group.close()
    assert not socket.exists()


def test_the_temporary_files_of_a_killed_group_are_removed_by_the_next(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    logs = tmp_path_factory.mktemp("r")
    killed = Ranks.prepare(plan_of(1, logs))
    (killed.temporary / "pymp-left").mkdir()
    os.close(killed.scratch.lock)  # as the kernel does for a process that is gone
    following = Ranks.prepare(plan_of(1, logs))
    assert not killed.temporary.exists()
    assert following.temporary.is_dir()
    following.remove()
