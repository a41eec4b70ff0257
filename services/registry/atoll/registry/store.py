"""The directory that holds the bytes of versions.

    <store>/staging/<id>/          manifest.json (kind only) and files/, which a writer fills
    <store>/artifacts/<digest>/    manifest.json (kind, files, time) and files/, read-only
    <store>/trash/                 what is being removed

    stage --> staging/<id> --seal: verify, sync, one rename--> artifacts/<digest> --remove: one rename--> trash

Nothing here knows the database: `artifacts.py` keeps the two in step, `recovery.py` after a crash.
"""

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, NotFound
from atoll.common.names import new_id
from atoll.registry import durable, manifest
from atoll.registry.room import needs_room
from atoll.registry.types import Kind, ManifestFile
from pydantic import BaseModel, ConfigDict

FILES = "files"
MANIFEST = "manifest.json"
UNFINISHED = ".new-"
"""Prefix of a staging area that is being made; ids cannot begin with a dot."""


IDLE_STAGING = timedelta(hours=6)
"""A writer adds to its area all the time until it seals it: one that did not for so long is dead."""


class ManifestRecord(BaseModel):
    """What manifest.json says. `files` and `sealed_at` are there once the directory was verified."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    files: tuple[ManifestFile, ...] | None = None
    sealed_at: datetime | None = None


@dataclass(frozen=True)
class StagingArea:
    """An open staging area; `identity` tells it from a later one of the same id."""

    staging_id: str
    path: Path
    kind: Kind
    identity: tuple[int, int]


class Store:
    """Thread-safe and safe between processes that share the directory: renames happen under `lock()`."""

    def __init__(self, root: Path) -> None:
        """Makes the directories that are missing. Raises AtollError(STORAGE_FULL)."""
        self.root = root.absolute()
        self.staging, self.artifacts, self.trash = (self.root / name for name in ("staging", "artifacts", "trash"))
        with needs_room(f"the store {self.root}"):
            for folder in (self.staging, self.artifacts, self.trash):
                folder.mkdir(parents=True, exist_ok=True)
            durable.sync(self.root)
        self._lock = durable.StoreLock(self.root / ".lock")
        self._imports = durable.StoreLock(self.root / ".import-lock")

    def lock(self) -> AbstractContextManager[None]:
        """Excludes every other change of the store's layout. Not reentrant. Take it before a database transaction."""
        return self._lock.held()

    def importing(self) -> AbstractContextManager[None]:
        """Excludes other imports of base models. Take it before `lock()`."""
        return self._imports.held()

    def files_of(self, digest: str) -> Path:
        """Where a sealed artifact's files are."""
        return self.artifacts / digest / FILES

    def stage(self, staging_id: str, kind: Kind) -> Path:
        """Makes an empty staging area, in place of an older one of the same id, and returns where to write.

        Raises AtollError(STORAGE_FULL).
        """
        area = self.staging / staging_id
        unfinished = self.staging / f"{UNFINISHED}{new_id()}"
        with self.lock(), needs_room(f"the store {self.root}"):
            try:
                (unfinished / FILES).mkdir(parents=True)
                self._write_record(unfinished, ManifestRecord(kind=kind))
                self._to_trash(area)
                unfinished.rename(area)
            except OSError:
                durable.remove_tree(unfinished)
                raise
            durable.sync(self.staging)
        self.empty_trash()
        return area / FILES

    def abandon(self, staging_id: str) -> None:
        """Removes a staging area; one that is not there is no error."""
        with self.lock():
            self._to_trash(self.staging / staging_id)
        self.empty_trash()

    def drop_idle_staging(self, now: datetime) -> bool:
        """Takes away staging areas that nobody wrote to for IDLE_STAGING; whether there were any. Then
        `empty_trash()`."""
        oldest = (now - IDLE_STAGING).timestamp()
        idle = [area for area in self.staging.iterdir() if _last_change(area) < oldest]
        for area in idle:
            with self.lock():
                if _last_change(area) < oldest:
                    self._to_trash(area)
        return bool(idle)

    @contextmanager
    def open_staging(self, staging_id: str) -> Iterator[StagingArea | None]:
        """The staging area of this id, None when there is none."""
        path = self.staging / staging_id
        try:
            # The open descriptor keeps the inode number from being given to another directory meanwhile.
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield None
            return
        try:
            record = self.read_record(path)
            facts = os.fstat(descriptor)
            yield StagingArea(staging_id, path, record.kind, (facts.st_dev, facts.st_ino))
        finally:
            os.close(descriptor)

    def prepare(self, area: StagingArea, files: Sequence[ManifestFile], now: datetime) -> None:
        """Verifies a staging area against the manifest and makes it durable, manifest.json included.

        Takes as long as reading the bytes twice. Raises Conflict(ARTIFACT_MISMATCH), AtollError(STORAGE_FULL) and
        NotFound(STAGING_NOT_FOUND) when the area is staged again or abandoned meanwhile.
        """
        with needs_room(f"the store {self.root}"):
            try:
                manifest.verify(area.path / FILES, files)
                _drop_empty_folders(area.path / FILES)
                durable.sync_tree(area.path / FILES)
                self._write_record(area.path, ManifestRecord(kind=area.kind, files=tuple(files), sealed_at=now))
            except FileNotFoundError:
                if self._is_current(area):
                    raise Conflict(
                        f"files of the staging area {area.staging_id!r} vanished while it was sealed; write them again "
                        "and seal again",
                        reason=errors_pb2.REASON_ARTIFACT_MISMATCH,
                        field="staging_id",
                    ) from None
                raise staging_not_found(area.staging_id) from None

    def place(self, area: StagingArea, digest: str) -> bool:
        """Moves a prepared staging area to its digest; whatever was there goes to the trash. Call it under `lock()`.

        Returns False when the area is not there any more: another call sealed, replaced or abandoned it.
        """
        if not self._is_current(area):
            return False
        target = self.artifacts / digest
        with needs_room(f"the store {self.root}"):
            self._to_trash(target)
            area.path.rename(target)
            durable.sync(self.artifacts)
            durable.sync(self.staging)
        durable.make_read_only(target)
        return True

    def drop(self, area: StagingArea) -> None:
        """Removes a staging area whose content is there already. Call it under `lock()`."""
        if self._is_current(area):
            self._to_trash(area.path)

    def remove(self, digest: str) -> None:
        """Takes a sealed artifact out of its place in one rename. Call it under `lock()`; then `empty_trash()`."""
        self._to_trash(self.artifacts / digest)

    def empty_trash(self) -> None:
        """Deletes what was removed; safe at any time, also for two processes at once."""
        for entry in list(self.trash.iterdir()):
            durable.remove_tree(entry)

    def read_record(self, folder: Path) -> ManifestRecord:
        """The manifest.json of a staging area or an artifact. Raises ValueError when it is not one of ours."""
        return ManifestRecord.model_validate_json((folder / MANIFEST).read_bytes())

    def _write_record(self, folder: Path, record: ManifestRecord) -> None:
        durable.write_durably(folder / MANIFEST, record.model_dump_json(exclude_none=True).encode() + b"\n")

    def _is_current(self, area: StagingArea) -> bool:
        try:
            facts = area.path.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(facts.st_mode) and (facts.st_dev, facts.st_ino) == area.identity

    def _to_trash(self, path: Path) -> None:
        if not path.exists():
            return
        path.chmod(stat.S_IRWXU)  # moving a directory needs write permission on it
        path.rename(self.trash / new_id())
        durable.sync(path.parent)


def staging_not_found(staging_id: str) -> NotFound:
    return NotFound(
        f"no staging area {staging_id!r}: it was sealed, abandoned, staged again meanwhile, or never made; call "
        "StageArtifact and write the files again",
        reason=errors_pb2.REASON_STAGING_NOT_FOUND,
        field="staging_id",
    )


def _last_change(area: Path) -> float:
    """When anything below it last changed, seconds since 1970; for one that vanishes meanwhile: now or later."""
    try:
        newest = area.lstat().st_mtime
        for folder, folders, names in os.walk(area):
            newest = max([newest, *(Path(folder, name).lstat().st_mtime for name in [*folders, *names])])
    except FileNotFoundError:
        return math.inf
    return newest


def _drop_empty_folders(root: Path) -> None:
    """A manifest lists files only, so equal digests must not differ in empty directories."""
    for folder, _, _ in os.walk(root, topdown=False):
        if Path(folder) != root and not any(Path(folder).iterdir()):
            Path(folder).rmdir()
