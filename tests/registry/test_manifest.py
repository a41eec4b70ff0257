import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput
from atoll.registry import manifest
from atoll.registry.types import ManifestFile
from hypothesis import given
from hypothesis import strategies as st

from tests.registry.material import write_files

SHA = "0" * 64
CONTENTS = {"a.bin": b"a", "sub/b.bin": b"bb", "sub/deep/c.bin": b""}


def test_the_digest_is_the_documented_one() -> None:
    files = (ManifestFile("b", 2, "2" * 64), ManifestFile("a/x", 10, "1" * 64))
    text = f"{'1' * 64} 10 a/x\n{'2' * 64} 2 b\n"
    assert manifest.digest_of(files) == hashlib.sha256(text.encode()).hexdigest()


def test_paths_are_ordered_by_bytes_and_not_by_folders_or_code_points() -> None:
    names = ["é", "a/b", "a-b", "a.b", "\U0001f600", "\uffee", "B"]
    files = [ManifestFile(name, 0, SHA) for name in names]
    random.Random(1).shuffle(files)
    assert [file.path for file in manifest.check_files(files)] == sorted(names, key=str.encode)


@given(st.permutations([ManifestFile(name, 1, SHA) for name in ("a", "b/c", "b-c", "d")]))
def test_the_digest_does_not_depend_on_the_order_given(files: list[ManifestFile]) -> None:
    assert manifest.digest_of(files) == manifest.digest_of(sorted(files))


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a/.", "a\nb", "a\x00b", "a\\b", "x" * 1025],
)
def test_a_path_that_is_not_a_plain_relative_one_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        manifest.check_files([ManifestFile("ok", 0, SHA), ManifestFile(path, 0, SHA)])
    assert refused.value.field == "files[1].path"


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ([], "files"),
        ([ManifestFile("a", -1, SHA)], "files[0].size"),
        ([ManifestFile("a", 1, "A" * 64)], "files[0].sha256"),
        ([ManifestFile("a", 1, "")], "files[0].sha256"),
        ([ManifestFile("a", 1, SHA), ManifestFile("a", 2, SHA)], "files"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(files: list[ManifestFile], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        manifest.check_files(files)
    assert refused.value.field == field


def test_describe_and_verify_agree(tmp_path: Path) -> None:
    files = write_files(tmp_path, CONTENTS)
    assert manifest.describe(tmp_path) == manifest.check_files(files)
    manifest.verify(tmp_path, files)


def _symlink(root: Path) -> None:
    (root / "a.bin").unlink()
    (root / "a.bin").symlink_to(root / "sub/b.bin")


def _symlink_to_folder(root: Path) -> None:
    (root / "more").symlink_to(root / "sub")


def _hard_link(root: Path) -> None:
    (root.parent / "outside").hardlink_to(root / "a.bin")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: (root / "a.bin").unlink(), "a.bin is missing"),
        (lambda root: (root / "sub/extra").write_bytes(b"x"), "sub/extra is not in the manifest"),
        (lambda root: (root / "a.bin").write_bytes(b"aa"), "a.bin has 2 bytes, the manifest says 1"),
        (lambda root: (root / "sub/b.bin").write_bytes(b"bc"), "sub/b.bin has SHA-256"),
        (lambda root: os.mkfifo(root / "pipe"), "pipe is not a regular file"),
        (_symlink, "a.bin is not a regular file"),
        (_symlink_to_folder, "more is not a regular file"),
        (_hard_link, "a.bin has a second hard link"),
    ],
)
def test_a_directory_that_differs_is_refused_with_the_file(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    root = tmp_path / "root"
    files = write_files(root, CONTENTS)
    spoil(root)
    with pytest.raises(Conflict, match=words) as refused:
        manifest.verify(root, files)
    assert refused.value.reason == errors_pb2.REASON_ARTIFACT_MISMATCH


def test_many_differences_are_summed_up(tmp_path: Path) -> None:
    files = write_files(tmp_path, {f"{i:02}": b"x" for i in range(20)})
    for i in range(20):
        (tmp_path / f"{i:02}").unlink()
    with pytest.raises(Conflict, match="04 is missing and 15 more"):
        manifest.verify(tmp_path, files)
