"""Artifacts: the store's directories and the database's rows, kept in step.

Order of a seal: bytes durable, rename, row. Order of a removal: row, rename, delete. `recovery.py` finishes either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput
from atoll.common.failpoints import reached
from atoll.registry import manifest, tables
from atoll.registry.artifact_rows import artifact_not_found
from atoll.registry.database import Database
from atoll.registry.store import Store, staging_not_found
from atoll.registry.types import Artifact, Kind, ManifestFile, utc_now

_ROWS = tables.artifacts
_FILES = tables.artifact_files


@dataclass(frozen=True)
class ArtifactPage:
    """Artifacts without their files, newest first; `next_key` continues, None on the last page."""

    artifacts: tuple[Artifact, ...]
    next_key: str | None


class Artifacts:
    """Stages, seals, finds and reads artifacts."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self.store = store

    def seal(self, staging_id: str, files: Sequence[ManifestFile]) -> Artifact:
        """Verifies a staging area, makes it durable and moves it into place; the same content again returns it.

        Raises InvalidInput, NotFound(STAGING_NOT_FOUND), Conflict(ARTIFACT_MISMATCH), AtollError(STORAGE_FULL).
        """
        ordered = manifest.check_files(files)
        digest = manifest.digest_of(ordered)
        with self.store.open_staging(staging_id) as area:
            if area is None:
                return self._sealed_before(digest, staging_id)
            now = utc_now()
            self.store.prepare(area, ordered, now)
            with self.store.lock():
                known = self.find(digest)
                if known is not None and known.kind != area.kind:
                    raise Conflict(
                        f"artifact {digest} was sealed as {known.kind}, not {area.kind}",
                        reason=errors_pb2.REASON_ARTIFACT_MISMATCH,
                        field="files",
                    )
                if known is not None and known.removed_at is None and self.store.files_of(digest).is_dir():
                    # The row's time is renewed, so that retention lets the caller commit what it sealed just now.
                    artifact = self.record(digest, area.kind, ordered, now)
                    self.store.drop(area)
                elif self.store.place(area, digest):
                    reached("registry.placed")
                    artifact = self.record(digest, area.kind, ordered, now)
                else:
                    return self._sealed_before(digest, staging_id)
        reached("registry.sealed")
        self.store.empty_trash()
        return artifact

    def record(self, digest: str, kind: Kind, files: Sequence[ManifestFile], sealed_at: datetime) -> Artifact:
        """Writes the row of bytes that are in place, or revives that of a removed artifact. Call it under the store's
        lock."""
        total_size = sum(file.size for file in files)
        with self._database.write() as connection:
            revived = connection.execute(
                _ROWS.update().where(_ROWS.c.digest == digest).values(sealed_at=sealed_at, removed_at=None)
            )
            if revived.rowcount == 0:
                connection.execute(
                    _ROWS.insert().values(digest=digest, kind=kind, total_size=total_size, sealed_at=sealed_at)
                )
                rows = [{"digest": digest, "path": f.path, "size": f.size, "sha256": f.sha256} for f in files]
                connection.execute(_FILES.insert(), rows)
        return Artifact(digest, kind, tuple(files), total_size, sealed_at, None)

    def get(self, digest: str) -> Artifact:
        """An artifact whose bytes are there. Raises InvalidInput and NotFound(ARTIFACT_NOT_FOUND)."""
        artifact = self.find(manifest.check_digest(digest, "digest"))
        if artifact is None:
            raise artifact_not_found(digest, "it was never sealed", "digest")
        if artifact.removed_at is not None:
            raise artifact_not_found(digest, f"retention removed it at {artifact.removed_at.isoformat()}", "digest")
        return artifact

    def find(self, digest: str) -> Artifact | None:
        """The artifact of this digest with its files, removed or not; None when it was never sealed."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(_ROWS).where(_ROWS.c.digest == digest)).one_or_none()
            files = connection.execute(sa.select(_FILES).where(_FILES.c.digest == digest)).all()
        if row is None:
            return None
        ordered = sorted((ManifestFile(f.path, f.size, f.sha256) for f in files), key=lambda f: f.path.encode())
        return _artifact(row, tuple(ordered))

    def list_page(self, kind: Kind | None, limit: int, after: str | None) -> ArtifactPage:
        """after: `next_key` of the page before, None for the first. Raises InvalidInput for another key."""
        query = sa.select(_ROWS).order_by(_ROWS.c.sealed_at.desc(), _ROWS.c.digest).limit(limit + 1)
        if kind is not None:
            query = query.where(_ROWS.c.kind == kind)
        if after is not None:
            sealed_at, digest = _parse_key(after)
            older = _ROWS.c.sealed_at < sealed_at
            query = query.where(older | ((_ROWS.c.sealed_at == sealed_at) & (_ROWS.c.digest > digest)))
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        artifacts = tuple(_artifact(row, ()) for row in rows[:limit])
        last = artifacts[-1] if len(rows) > limit else None
        return ArtifactPage(artifacts, None if last is None else f"{last.sealed_at.isoformat()} {last.digest}")

    def open_file(self, digest: str, path: str, offset: int) -> BinaryIO:
        """A file of an artifact, positioned at `offset`. The caller closes it; a removal meanwhile does not hurt.

        Raises InvalidInput and NotFound(ARTIFACT_NOT_FOUND).
        """
        artifact = self.get(digest)
        file = next((file for file in artifact.files if file.path == path), None)
        if file is None:
            raise InvalidInput(f"path is {path[:120]!r}, which is not a file of artifact {digest}", field="path")
        if not 0 <= offset <= file.size:
            raise InvalidInput(f"offset is {offset}, expected 0..{file.size}", field="offset")
        try:
            stream = (self.store.files_of(digest) / path).open("rb")
        except FileNotFoundError:
            raise artifact_not_found(digest, "retention is removing it", "digest") from None
        stream.seek(offset)
        return stream

    def _sealed_before(self, digest: str, staging_id: str) -> Artifact:
        known = self.find(digest)
        if known is None or known.removed_at is not None:
            raise staging_not_found(staging_id)
        return known


def _artifact(row: sa.Row[tuple[object, ...]], files: tuple[ManifestFile, ...]) -> Artifact:
    values = row._mapping
    return Artifact(
        digest=values["digest"],
        kind=Kind(values["kind"]),
        files=files,
        total_size=values["total_size"],
        sealed_at=values["sealed_at"],
        removed_at=values["removed_at"],
    )


def _parse_key(key: str) -> tuple[datetime, str]:
    time, _, digest = key.partition(" ")
    try:
        return datetime.fromisoformat(time), digest
    except ValueError:
        raise InvalidInput("page_token was not made by this service", field="page_token") from None
