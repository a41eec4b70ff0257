import errno
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atoll.api.registry.v1 import artifact_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.names import check_id
from atoll.trainer import staging
from atoll.trainer.staging import StorageFull, manifest_of, refuse_full, staging_request_id

from tests.trainer.world import World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


def test_the_manifest_names_every_file_with_its_size_and_digest(tmp_path: Path) -> None:
    contents = {"a.bin": b"x" * 5_000_000, "deep/down/b.txt": b"hello", "empty": b""}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    manifest = manifest_of(tmp_path)
    assert {file.path: (file.size, file.sha256) for file in manifest} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    }


def test_a_restarted_trainer_names_the_same_area_and_another_attempt_or_scenario_another_one() -> None:
    model, checkpoint = artifact_pb2.ARTIFACT_KIND_MODEL, artifact_pb2.ARTIFACT_KIND_CHECKPOINT
    job_id = "j" * 63
    assert staging_request_id("chat", job_id, 1, model) == staging_request_id("chat", job_id, 1, model)
    names = {
        staging_request_id(scenario, job_id, attempt, kind)
        for scenario in ("chat", "other")
        for attempt in (1, 2)
        for kind in (model, checkpoint)
    }
    assert len(names) == 8
    for name in names:
        assert check_id(name, "request_id") == name


def test_a_store_without_room_for_a_version_like_the_last_is_full(tmp_path: Path) -> None:
    refuse_full(tmp_path, 1)
    with pytest.raises(StorageFull, match="goes on by itself"):
        refuse_full(tmp_path, 1 << 60)


def test_the_room_of_a_directory_that_is_gone_is_that_of_its_store(tmp_path: Path) -> None:
    refuse_full(tmp_path / "gone" / "too", 1)
    with pytest.raises(StorageFull):
        refuse_full(tmp_path / "gone" / "too", 1 << 60)


@pytest.mark.parametrize(("code", "attempts"), [(errno.EIO, 2), (errno.EDQUOT, 1)])
async def test_a_store_that_fails_while_the_version_is_hashed_costs_an_attempt_unless_it_is_full(
    here: World, monkeypatch: pytest.MonkeyPatch, code: int, attempts: int
) -> None:
    stub = await here.start()
    failures, hash_all = [OSError(code, "no such luck")], staging.manifest_of

    def hash_or_fail(directory: Path) -> list[artifact_pb2.ManifestFile]:
        if failures:
            raise failures.pop()
        return hash_all(directory)

    monkeypatch.setattr(staging, "manifest_of", hash_or_fail)
    await stub.SubmitJob(here.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_SERVED, attempts)
    assert here.backend.trained_jobs == attempts


async def test_a_disk_that_fails_while_the_head_is_loaded_ends_neither_the_boot_nor_a_job(here: World) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    here.backend.before["load"] = [fail]
    stub = await here.boot()
    here.backend.before["load"] = [fail, fail]
    here.backend.before["stage"] = [here.backend.crash]
    await stub.SubmitJob(here.job("job-0", pair("a")))
    job = await until(stub, "job-0")
    assert (job.state, job.attempt, here.backend.before["load"]) == (job_pb2.JOB_STATE_SERVED, 2, [])
