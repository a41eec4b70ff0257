"""At start: finishes what a crash left between the store and the database, and refuses what it does not know.

A digest's directory, its row, and what that means:

    directory  row        cause                               action
    yes        none       died between rename and row         verify, then write the row (or remove)
    yes        removed    died between row and rename         remove
    yes        removed    same, but sealed after the removal  verify, then revive the row
    no         there      lost outside Atoll                  mark removed; refuse when a scenario has nothing left

A scenario has something left while its head's model is there, or the model and checkpoint of a durable version: the
trainer then commits a recovery.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import sqlalchemy as sa
import structlog
from atoll.common.errors import AtollError, BadConfiguration
from atoll.common.names import check_id
from atoll.registry import durable, manifest, tables
from atoll.registry.artifacts import Artifacts
from atoll.registry.database import Database
from atoll.registry.retention import VersionBytes
from atoll.registry.retention_facts import read_facts
from atoll.registry.scenarios import IMPORT_AREA
from atoll.registry.store import FILES, MANIFEST, UNFINISHED, Store
from atoll.registry.types import utc_now

log = structlog.get_logger(__name__)

_ARTIFACTS = tables.artifacts
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OWN = frozenset({"staging", "artifacts", "trash", ".lock", ".import-lock", "lost+found"})
_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")
_SHOWN = 10


def recover(database: Database, store: Store, artifacts: Artifacts, database_file: Path | None) -> None:
    """Brings store and database together. database_file: the SQLite file, which may lie in the store.

    Raises BadConfiguration naming files that Atoll did not write, and scenarios that have nothing left to restore;
    deletes and marks nothing then.
    """
    allowed = set(_OWN)
    if database_file is not None and database_file.absolute().parent == store.root:
        allowed |= {database_file.name + suffix for suffix in _SQLITE_SUFFIXES}
    with store.lock():
        foreign = sorted(_foreign(store, allowed))
        if foreign:
            more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
            raise BadConfiguration(
                f"the store {store.root} holds what Atoll did not write: {', '.join(foreign[:_SHOWN])}{more}; nothing "
                "was deleted: move it away, or set ATOLL_REGISTRY_STORE to another directory",
                field="ATOLL_REGISTRY_STORE",
            )
        for unfinished in store.staging.glob(f"{UNFINISHED}*"):
            durable.remove_tree(unfinished)
        placed = {entry.name for entry in store.artifacts.iterdir()}
        with database.read() as connection:
            rows = connection.execute(sa.select(_ARTIFACTS.c.digest, _ARTIFACTS.c.removed_at)).all()
        removed_at = {row.digest: row.removed_at for row in rows}
        for digest in sorted(placed):
            if digest not in removed_at or removed_at[digest] is not None:
                _decide(store, artifacts, digest)
        _settle_lost(database, {digest for digest, time in removed_at.items() if time is None} - placed)
    store.empty_trash()


def _foreign(store: Store, allowed: set[str]) -> Iterable[str]:
    for entry in store.root.iterdir():
        if entry.name not in allowed:
            yield entry.name
    for entry in store.artifacts.iterdir():
        if not _DIGEST.fullmatch(entry.name) or not entry.is_dir():
            yield f"artifacts/{entry.name}"
        else:
            yield from _foreign_inside(store, entry)
    for entry in store.staging.iterdir():
        if entry.name.startswith(UNFINISHED):
            continue
        if not entry.is_dir() or not _is_staging_id(entry.name):
            yield f"staging/{entry.name}"
        else:
            yield from _foreign_inside(store, entry)


def _foreign_inside(store: Store, folder: Path) -> Iterable[str]:
    for entry in folder.iterdir():
        if entry.name not in (FILES, MANIFEST, MANIFEST + ".new"):
            yield entry.relative_to(store.root).as_posix()
    name = folder.relative_to(store.root).as_posix()
    try:
        record = store.read_record(folder)
    except (ValueError, OSError):
        yield f"{name} (no {MANIFEST} of ours)"
        return
    if folder.parent == store.artifacts:
        files = {file.path for file in record.files or ()}
        present = (
            path.relative_to(folder / FILES).as_posix() for path in (folder / FILES).rglob("*") if not _is_folder(path)
        )
        yield from (f"{name}/{FILES}/{path}" for path in present if path not in files)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_staging_id(name: str) -> bool:
    try:
        return name == IMPORT_AREA or bool(check_id(name, "staging_id"))
    except AtollError:
        return False


def _decide(store: Store, artifacts: Artifacts, digest: str) -> None:
    """What becomes of bytes in place without a row that vouches for them."""
    record = store.read_record(store.artifacts / digest)
    known = artifacts.find(digest)
    removed_at = None if known is None else known.removed_at
    files, sealed_at = record.files or (), record.sealed_at
    if sealed_at is None or (removed_at is not None and sealed_at <= removed_at):
        store.remove(digest)
        log.info("removal finished", digest=digest)
        return
    try:
        if manifest.digest_of(files) != digest:
            raise BadConfiguration(f"the manifest of {digest} has another digest")
        manifest.verify(store.files_of(digest), files)
    except AtollError as error:
        store.remove(digest)
        log.warning("artifact without a row removed", digest=digest, why=error.message)
        return
    durable.make_read_only(store.artifacts / digest)
    artifacts.record(digest, record.kind, files, sealed_at)
    log.info("artifact without a row adopted", digest=digest)


def _settle_lost(database: Database, lost: set[str]) -> None:
    if not lost:
        return
    now = utc_now()
    with database.write() as connection:
        for digest in sorted(lost):
            connection.execute(_ARTIFACTS.update().where(_ARTIFACTS.c.digest == digest).values(removed_at=now))
        facts = read_facts(connection, free=0)
        there = {artifact.digest for artifact in facts.artifacts}
        heads: dict[str, VersionBytes] = {}
        for version in facts.versions:
            if version.scenario not in heads or heads[version.scenario].number < version.number:
                heads[version.scenario] = version
        headless = {head.scenario: head for head in heads.values() if head.model_digest not in there}
        restorable = {v.scenario for v in facts.versions if v.is_durable and there.issuperset(v.digests)}
        stuck = [head for name, head in sorted(headless.items()) if name not in restorable]
        if stuck:
            names = ", ".join(f"{head}: {head.model_digest}" for head in stuck)
            raise BadConfiguration(
                f"the store has lost the model of a head, and no version that could be restored is left: {names}; "
                "restore these directories of artifacts/ from a backup, or point ATOLL_REGISTRY_STORE at the right "
                "directory",
                field="ATOLL_REGISTRY_STORE",
            )
    log.warning("artifacts lost outside Atoll, marked removed", digests=sorted(lost))
    for head in headless.values():
        log.warning("the head has no model: engines cannot load it until the trainer recovers", version=str(head))
