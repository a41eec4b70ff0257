"""Compares the files of an artifact with its manifest: a disk that lies must not put other weights into service."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.api.registry.v1 import artifact_pb2
from atoll.common.errors import BadConfiguration

HASH_THREADS = 4
"""SHA-256 runs outside the interpreter lock."""


def refuse_damaged(location: Path, files: Sequence[artifact_pb2.ManifestFile]) -> None:
    """Reads every file, which also warms the page cache. Raises BadConfiguration naming what differs."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        problems = [problem for problem in pool.map(lambda file: _problem(location, file), files) if problem]
    if problems:
        raise BadConfiguration(
            f"{location} is not what was committed: {'; '.join(problems)}; restore the directory from a copy"
        )


def _problem(location: Path, file: artifact_pb2.ManifestFile) -> str:
    try:
        with (location / file.path).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror}"
    return "" if found == file.sha256 else f"{file.path} has sha256 {found}, its manifest says {file.sha256}"
