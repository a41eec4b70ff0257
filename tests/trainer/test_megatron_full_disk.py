"""A disk that is full before or while a version is written: an error that all ranks survive, then again with room."""

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from atoll.trainer.megatron.settings import ParallelLayout
from safetensors import SafetensorError

from tests.trainer.full_disk import contents
from tests.trainer.megatron_support import ModelKind, Pool, grpo_binding, grpo_steps, make_rows

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = ["unshare", "-Urm"]


def can_mount() -> bool:
    try:
        mount = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
        return subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="no user namespace may mount a filesystem here")
@pytest.mark.parametrize(
    "layout", ["DP2", pytest.param("TP2", marks=pytest.mark.slow), pytest.param("PP2", marks=pytest.mark.slow)]
)
def test_a_disk_that_fills_up_anywhere_in_a_version_costs_nothing_but_the_attempt(
    layout: str, tiny_model: Callable[[ModelKind], Path], tmp_path: Path
) -> None:
    model = tiny_model(ModelKind("qwen3"))
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.full_disk", layout, str(model), str(tmp_path)]
    done = subprocess.run([*UNSHARE, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # The export, shards of whichever rank was told first, and what rank 0 alone writes at the end.
    assert {"model", ".metadata"} < set(found["failures"])
    assert {"__0_0.distcp", "__1_0.distcp"} & set(found["failures"])
    assert found["differing"] == []
    assert found["files"] >= 8
    assert "bytes are needed and" in found["early"]
    assert "No space left" in found["start"]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_write_is_the_answer_of_all_and_staging_again_gives_the_same_bytes(
    failing: int, megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path], tmp_path: Path
) -> None:
    layout = ParallelLayout(data=2)
    backend = megatron_pool.of(layout)
    backend.load(tiny_model(ModelKind("qwen3")), None, None)
    binding = grpo_binding()
    backend.train(binding, grpo_steps(make_rows(), binding), [1e-2])
    backend.stage(None, tmp_path / "undisturbed", b"state")
    group = megatron_pool.groups[layout]
    group.call("limit_files", [(100_000 if rank == failing else None,) for rank in range(2)], 60.0)
    with pytest.raises(OSError, match="File too large") as failed:
        backend.stage(None, tmp_path / "again", b"state")
    assert failed.value.errno == errno.EFBIG
    assert Path(failed.value.filename).name == f"__{failing}_0.distcp"
    assert backend.healthy()
    assert megatron_pool.groups[layout] is group
    assert not (tmp_path / "again").exists()
    group.call("limit_files", [(None,)] * 2, 60.0)
    backend.stage(None, tmp_path / "again", b"state")
    assert contents(tmp_path / "again") == contents(tmp_path / "undisturbed")


def test_room_is_asked_for_everything_that_goes_onto_one_filesystem(
    megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = megatron_pool.of(ParallelLayout())
    backend.load(tiny_model(ModelKind("qwen3")), None, None)
    one_copy = 4 * sum(weight.size for weight in megatron_pool.probe(1, 1, "weights").values())
    usage = shutil.disk_usage(tmp_path)
    for free, wanted in ((one_copy - 1, one_copy), (4 * one_copy - 1, 4 * one_copy)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: usage._replace(free=free))
        with pytest.raises(OSError, match=f"{wanted} bytes are needed and {free} are free") as refused:
            backend.stage(tmp_path / "model", tmp_path / "checkpoint", b"")
        assert refused.value.errno == errno.ENOSPC
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=4 * one_copy))
    backend.stage(tmp_path / "model", tmp_path / "checkpoint", b"")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_a_directory_that_is_there_is_refused_and_left_alone(
    megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path], tmp_path: Path
) -> None:
    backend = megatron_pool.of(ParallelLayout())
    backend.load(tiny_model(ModelKind("qwen3")), None, None)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError):
        backend.stage(tmp_path, None, b"")
    assert (tmp_path / "mine").read_text() == "mine"
    binding = grpo_binding()
    assert backend.train(binding, grpo_steps(make_rows(), binding), [1e-3]).metrics[0]["grad_norm"] > 0


def test_the_filesystems_error_is_found_behind_those_of_libraries() -> None:
    from atoll.trainer.megatron.writing import os_error_behind

    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("unexpected pos 64 vs 0")
    wrapped.__context__ = full
    assert os_error_behind(wrapped) is full
    rust = os_error_behind(SafetensorError("Error while serializing: No space left on device (os error 28)"))
    assert rust is not None and rust.errno == errno.ENOSPC
    assert os_error_behind(RuntimeError("os error 28")) is None
