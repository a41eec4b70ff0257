"""Whose lease need not run out: only that of a process which is dead for sure."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration
from atoll.trainer.predecessor import holder_ids

HOLD = (
    "import sys, time; from pathlib import Path; from atoll.trainer.predecessor import holder_ids\n"
    "with holder_ids(Path(sys.argv[1]), 'chat') as (mine, before):\n"
    "    print(mine, flush=True); time.sleep(60)"
)


@contextmanager
def holder(run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that has the run directory, and its holder id."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_a_predecessor_that_was_killed_is_known_by_its_id_also_when_it_was_stopped_before(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, first):
        os.kill(process.pid, signal.SIGSTOP)
        with holder_ids(tmp_path, "chat") as (mine, before):
            assert (mine != first, before) == (True, ""), "it is stopped, not dead"
        process.kill()
        process.wait()
        with holder_ids(tmp_path, "chat") as (_, before):
            assert before == first


def test_a_trainer_that_shares_the_directory_leaves_the_holders_id_as_it_is(tmp_path: Path) -> None:
    with holder_ids(tmp_path, "chat") as (first, _):
        with holder_ids(tmp_path, "chat"):
            pass
        with holder_ids(tmp_path, "other") as (_, before):
            assert before == "", "another scenario's holder is nobody's predecessor here"
    with holder_ids(tmp_path, "chat") as (_, before):
        assert before == first


@pytest.mark.parametrize("left", ["", "\x00\x00", "no id at all"])
def test_a_file_that_a_crash_left_half_written_names_nobody(tmp_path: Path, left: str) -> None:
    (tmp_path / "lease-holder-chat").write_text(left)
    with holder_ids(tmp_path, "chat") as (_, before):
        assert before == ""


def test_a_run_directory_that_cannot_be_written_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "lease-holder-chat").mkdir()
    with (
        pytest.raises(BadConfiguration, match=r"ATOLL_TRAINER_RUN_DIR: .*lease-holder-chat"),
        holder_ids(tmp_path, "chat"),
    ):
        pass
