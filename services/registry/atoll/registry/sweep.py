"""Carries out the retention plan: rows first, then bytes; a crash between the two is finished at the next start."""

from datetime import datetime

import sqlalchemy as sa
import structlog
from atoll.registry import tables
from atoll.registry.database import Database
from atoll.registry.retention import StoredArtifact, VersionBytes, plan
from atoll.registry.store import Store
from atoll.registry.types import utc_now

log = structlog.get_logger(__name__)

_VERSIONS = tables.versions
_ARTIFACTS = tables.artifacts


class Sweeper:
    """Removes what the `latest` policy lets go."""

    def __init__(self, database: Database, store: Store, keep: int) -> None:
        self._database = database
        self._store = store
        self._keep = keep

    def sweep(self) -> tuple[str, ...]:
        """Removes artifacts and returns their digests. Safe to run at any time, in several processes."""
        # Most commits let nothing go: they are told so without a lock that seals and commits wait for.
        with self._database.read() as connection:
            if not self._plan(connection, utc_now()):
                return ()
        with self._store.lock():
            digests = self._mark()
            for digest in digests:
                self._store.remove(digest)
        if digests:
            self._store.empty_trash()
            log.info("artifacts removed", digests=digests)
        return digests

    def _mark(self) -> tuple[str, ...]:
        now = utc_now()
        with self._database.write() as connection:
            # Locked before the versions are read: a commit that uses one of them is visible already, or waits and then
            # finds it removed.
            connection.execute(
                sa.select(_ARTIFACTS.c.digest)
                .where(_ARTIFACTS.c.removed_at.is_(None))
                .order_by(_ARTIFACTS.c.digest)
                .with_for_update()
            ).all()
            digests = self._plan(connection, now)
            for digest in digests:
                connection.execute(_ARTIFACTS.update().where(_ARTIFACTS.c.digest == digest).values(removed_at=now))
        return digests

    def _plan(self, connection: sa.Connection, now: datetime) -> tuple[str, ...]:
        query = sa.select(_ARTIFACTS.c.digest, _ARTIFACTS.c.sealed_at).where(_ARTIFACTS.c.removed_at.is_(None))
        artifacts = [StoredArtifact(row.digest, row.sealed_at) for row in connection.execute(query)]
        return plan(_versions(connection), artifacts, now, self._keep)


def _versions(connection: sa.Connection) -> list[VersionBytes]:
    """Versions that have bytes, through their model or their checkpoint: as many as retention keeps, not the chain."""
    stored = sa.select(_ARTIFACTS.c.digest).where(_ARTIFACTS.c.removed_at.is_(None))
    query = sa.select(
        _VERSIONS.c.scenario_id,
        _VERSIONS.c.number,
        _VERSIONS.c.parent,
        _VERSIONS.c.model_digest,
        _VERSIONS.c.checkpoint_digest,
        _VERSIONS.c.created_at,
    ).where(_VERSIONS.c.model_digest.in_(stored) | _VERSIONS.c.checkpoint_digest.in_(stored))
    return [VersionBytes(*row) for row in connection.execute(query)]
