import errno
import os
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, Conflict, InvalidInput, NotFound
from atoll.registry import durable
from atoll.registry.app import Registry
from atoll.registry.types import Kind

from tests.registry.material import manifest_of, seal, write_files

CONTENTS = {"config.json": b"{}", "sub/weights.bin": bytes(3 << 20)}


def test_a_sealed_artifact_is_in_place_and_read_only(registry: Registry) -> None:
    store = registry.artifacts.store
    root = store.stage("one", Kind.CHECKPOINT)
    (root / "empty" / "folder").mkdir(parents=True)
    artifact = registry.artifacts.seal("one", write_files(root, CONTENTS))
    files = store.files_of(artifact.digest)
    assert artifact.total_size == 2 + (3 << 20)
    assert [file.path for file in artifact.files] == ["config.json", "sub/weights.bin"]
    assert (files / "config.json").read_bytes() == b"{}"
    assert not (files / "empty").exists()
    assert [path.stat().st_mode & 0o222 for path in (files.parent, files, files / "sub", files / "config.json")] == [
        0
    ] * 4
    assert not any(store.staging.iterdir())
    assert not any(store.trash.iterdir())
    assert registry.artifacts.get(artifact.digest) == artifact


def test_sealing_again_returns_the_artifact_with_or_without_a_staging_area(registry: Registry) -> None:
    first = seal(registry, b"same")
    assert registry.artifacts.seal("gone", first.files).digest == first.digest
    assert seal(registry, b"same").digest == first.digest
    assert not any(registry.artifacts.store.staging.iterdir())


def test_content_has_one_kind(registry: Registry) -> None:
    seal(registry, b"same", Kind.MODEL)
    with pytest.raises(Conflict, match="was sealed as model, not checkpoint") as refused:
        seal(registry, b"same", Kind.CHECKPOINT)
    assert refused.value.reason == errors_pb2.REASON_ARTIFACT_MISMATCH


def test_staging_again_empties_the_area(registry: Registry) -> None:
    root = registry.artifacts.store.stage("one", Kind.MODEL)
    write_files(root, CONTENTS)
    assert registry.artifacts.store.stage("one", Kind.MODEL) == root
    assert list(root.iterdir()) == []


def test_a_mismatch_keeps_the_area_for_another_try(registry: Registry) -> None:
    root = registry.artifacts.store.stage("one", Kind.MODEL)
    files = write_files(root, CONTENTS)
    (root / "config.json").write_bytes(b"[]")
    with pytest.raises(Conflict):
        registry.artifacts.seal("one", files)
    (root / "config.json").write_bytes(b"{}")
    assert registry.artifacts.seal("one", files)


def test_an_unknown_area_is_refused(registry: Registry) -> None:
    with pytest.raises(NotFound) as refused:
        registry.artifacts.seal("never", manifest_of(CONTENTS))
    assert refused.value.reason == errors_pb2.REASON_STAGING_NOT_FOUND


def test_an_area_that_is_staged_again_during_its_seal_is_not_placed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = registry.artifacts.store
    files = write_files(store.stage("one", Kind.MODEL), CONTENTS)
    prepare = store.prepare

    def prepare_then_lose_it(*arguments: object) -> None:
        prepare(*arguments)  # type: ignore[arg-type]
        store.stage("one", Kind.MODEL)

    monkeypatch.setattr(store, "prepare", prepare_then_lose_it)
    with pytest.raises(NotFound) as refused:
        registry.artifacts.seal("one", files)
    assert refused.value.reason == errors_pb2.REASON_STAGING_NOT_FOUND
    assert (store.staging / "one").is_dir()


def test_a_file_that_vanishes_during_the_seal_is_a_mismatch(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = registry.artifacts.store
    root = store.stage("one", Kind.MODEL)
    files = write_files(root, CONTENTS)
    sync_tree = durable.sync_tree

    def vanish_and_sync(folder: Path) -> None:
        (root / "config.json").unlink()
        sync_tree(folder)
        (root / "config.json").stat()

    monkeypatch.setattr(durable, "sync_tree", vanish_and_sync)
    with pytest.raises(Conflict, match="vanished while it was sealed") as refused:
        registry.artifacts.seal("one", files)
    assert refused.value.reason == errors_pb2.REASON_ARTIFACT_MISMATCH


def test_abandoning_removes_the_area_and_a_second_time_nothing(registry: Registry) -> None:
    store = registry.artifacts.store
    write_files(store.stage("one", Kind.MODEL), CONTENTS)
    store.abandon("one")
    store.abandon("one")
    assert not any(store.staging.iterdir())
    assert not any(store.trash.iterdir())


@pytest.mark.parametrize("call", ["fsync", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_nothing_half_written(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store = registry.artifacts.store
    files = write_files(store.stage("one", Kind.MODEL), CONTENTS)
    before = sorted(store.root.rglob("*"))

    def full(*_: object, **__: object) -> None:
        raise OSError(code, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(AtollError) as refused:
            store.stage("two", Kind.MODEL)
        assert refused.value.reason == errors_pb2.REASON_STORAGE_FULL
        assert "free space" in refused.value.message
        if call == "fsync":
            with pytest.raises(AtollError) as refused:
                registry.artifacts.seal("one", files)
            assert refused.value.reason == errors_pb2.REASON_STORAGE_FULL
    assert sorted(store.root.rglob("*")) == before
    assert registry.artifacts.seal("one", files)


def test_a_file_is_read_from_any_offset(registry: Registry) -> None:
    artifact = seal(registry, bytes(range(10)))
    for offset in (0, 4, 10):
        with registry.artifacts.open_file(artifact.digest, "weights.bin", offset) as stream:
            assert stream.read() == bytes(range(offset, 10))


@pytest.mark.parametrize(
    ("path", "offset", "field"),
    [
        ("../manifest.json", 0, "path"),
        ("other", 0, "path"),
        ("weights.bin", 11, "offset"),
        ("weights.bin", -1, "offset"),
    ],
)
def test_only_the_manifest_is_readable(registry: Registry, path: str, offset: int, field: str) -> None:
    artifact = seal(registry, bytes(range(10)))
    with pytest.raises(InvalidInput) as refused:
        registry.artifacts.open_file(artifact.digest, path, offset)
    assert refused.value.field == field


def test_pages_list_every_artifact_once_newest_first(registry: Registry) -> None:
    sealed = [seal(registry, bytes([i]), Kind.CHECKPOINT).digest for i in range(5)]
    seen: list[str] = []
    key: str | None = None
    while True:
        page = registry.artifacts.list_page(Kind.CHECKPOINT, 2, key)
        seen += [artifact.digest for artifact in page.artifacts]
        key = page.next_key
        if key is None:
            break
    assert seen == sealed[::-1]
    assert len(registry.artifacts.list_page(None, 100, None).artifacts) == 6


def test_a_digest_is_never_a_path(registry: Registry) -> None:
    with pytest.raises(InvalidInput) as refused:
        registry.artifacts.get("../" * 20)
    assert refused.value.field == "digest"
