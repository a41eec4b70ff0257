"""The list of an artifact's files: its digest, and the check of a directory against it."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput
from atoll.registry.types import ManifestFile

MAX_PATH_BYTES = 1024
HASH_THREADS = 4
"""SHA-256 runs outside the interpreter lock; more threads than disks deliver are of no use."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 5


def check_digest(value: str, field: str) -> str:
    """Returns the digest, or raises InvalidInput when it is not 64 lower-case hexadecimal digits."""
    if not _SHA256.fullmatch(value):
        raise InvalidInput(f"{field} is {value[:80]!r}, expected 64 lower-case hexadecimal digits", field=field)
    return value


def check_files(files: Sequence[ManifestFile]) -> tuple[ManifestFile, ...]:
    """Returns the files in byte order of their paths.

    Raises InvalidInput for an empty list, a path that is absolute, leaves the directory or occurs twice, a negative
    size, or a SHA-256 that is none.
    """
    if not files:
        raise InvalidInput("files is empty, expected every file of the artifact", field="files")
    for index, file in enumerate(files):
        field = f"files[{index}]"
        parts = file.path.split("/")
        printable = file.path.isprintable() and "\\" not in file.path
        if not printable or len(file.path.encode()) > MAX_PATH_BYTES or any(p in ("", ".", "..") for p in parts):
            raise InvalidInput(
                f"{field}.path is {file.path[:120]!r}, expected a relative path with forward slashes, printable, "
                f"without '.', '..' and empty parts, of at most {MAX_PATH_BYTES} bytes",
                field=f"{field}.path",
            )
        if file.size < 0:
            raise InvalidInput(f"{field}.size is {file.size}, expected 0 or more bytes", field=f"{field}.size")
        check_digest(file.sha256, f"{field}.sha256")
    ordered = tuple(sorted(files, key=lambda file: file.path.encode()))
    for first, second in pairwise(ordered):
        if first.path == second.path:
            raise InvalidInput(f"files names {first.path!r} twice", field="files")
    return ordered


def digest_of(files: Iterable[ManifestFile]) -> str:
    """SHA-256 of one line per file, in byte order of the paths: "<sha256> <size> <path>\\n"."""
    lines = (f"{f.sha256} {f.size} {f.path}\n" for f in sorted(files, key=lambda f: f.path.encode()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def describe(root: Path) -> tuple[ManifestFile, ...]:
    """The manifest of a directory as it is now. Raises Conflict(ARTIFACT_MISMATCH) for anything but plain files."""
    paths = list_files(root)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return tuple(pool.map(lambda path: _describe_file(root, path), paths))


def verify(root: Path, files: Sequence[ManifestFile]) -> None:
    """Checks that the directory holds exactly these files with these bytes.

    Raises Conflict(ARTIFACT_MISMATCH) naming what is missing, too many or different.
    """
    expected = {file.path: file for file in files}
    present = list_files(root)
    problems = [f"{path} is missing" for path in sorted(expected.keys() - set(present))]
    problems += [f"{path} is not in the manifest" for path in present if path not in expected]
    if not problems:
        sizes = {path: (root / path).lstat().st_size for path in present}
        problems = [
            f"{path} has {sizes[path]} bytes, the manifest says {expected[path].size}"
            for path in present
            if sizes[path] != expected[path].size
        ]
    if not problems:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            found = pool.map(lambda path: _describe_file(root, path), present)
            problems = [
                f"{file.path} has SHA-256 {file.sha256}, the manifest says {expected[file.path].sha256}"
                for file in found
                if file != expected[file.path]
            ]
    if problems:
        raise _mismatch(problems)


def list_files(root: Path) -> list[str]:
    """Relative paths of every file below `root`, in byte order.

    Raises Conflict(ARTIFACT_MISMATCH) for a symbolic link, a device, a socket, or a file with a second name: their
    bytes could change after the seal.
    """
    paths: list[str] = []
    problems: list[str] = []
    for folder, folders, names in os.walk(root):
        for name in [*names, *folders]:
            path = Path(folder, name)
            shown = path.relative_to(root).as_posix().encode(errors="surrogateescape").decode(errors="replace")
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode):
                continue
            if not stat.S_ISREG(facts.st_mode):
                problems.append(f"{shown} is not a regular file")
            elif facts.st_nlink > 1:
                problems.append(f"{shown} has a second hard link: copy it instead")
            else:
                paths.append(shown)
    if problems:
        raise _mismatch(problems)
    return sorted(paths, key=str.encode)


def _describe_file(root: Path, path: str) -> ManifestFile:
    with open(root / path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return ManifestFile(path, os.fstat(stream.fileno()).st_size, digest)


def _mismatch(problems: Sequence[str]) -> Conflict:
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return Conflict(
        f"the staging area does not match the manifest: {'; '.join(problems[:_SHOWN])}{more}; write the files again "
        "and seal again",
        reason=errors_pb2.REASON_ARTIFACT_MISMATCH,
        field="files",
    )
