"""Carries out the retention plan: rows first, then bytes; a crash between the two is finished at the next start."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
import structlog
from atoll.registry import tables
from atoll.registry.database import Database
from atoll.registry.retention import Plan, Rules, plan
from atoll.registry.retention_facts import read_facts
from atoll.registry.room import storage_low
from atoll.registry.settings import RegistrySettings
from atoll.registry.store import Store
from atoll.registry.types import utc_now

log = structlog.get_logger(__name__)

_ARTIFACTS = tables.artifacts


@dataclass(frozen=True)
class Disk:
    """A filesystem, bytes. Example: Disk(capacity=10**12, free=4 * 10**11)."""

    capacity: int
    free: int


def disk_of(path: Path) -> Disk:
    usage = shutil.disk_usage(path)
    return Disk(usage.total, usage.free)


class Sweeper:
    """Removes what the policy lets go and what the bounds ask for. disk: measures the store's filesystem."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: RegistrySettings,
        disk: Callable[[Path], Disk] = disk_of,
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._measure = disk
        self._is_short = False

    def disk(self) -> Disk:
        """The store's filesystem now."""
        return self._measure(self._store.root)

    def plan(self) -> Plan:
        """What a sweep would do now."""
        with self._database.read() as connection:
            return self._plan(connection)

    def sweep(self) -> tuple[str, ...]:
        """Removes artifacts and returns their digests; idle staging areas go too. Safe to run at any time, in several
        processes."""
        if self._store.drop_idle_staging(utc_now()):
            self._store.empty_trash()
        # Most commits let nothing go: they are told so without a lock that seals and commits wait for.
        planned = self.plan()
        self._tell(planned)
        if not planned.removed:
            return ()
        with self._store.lock():
            digests = self._mark()
            for digest in digests:
                self._store.remove(digest)
        if digests:
            self._store.empty_trash()
            log.info("artifacts removed", digests=digests)
        return digests

    def ensure_room(self, staging_id: str) -> None:
        """Lets a writer begin only above `min_free_space`, after it tried to get there.

        staging_id: the writer's own area; what an earlier attempt left in it goes first. Raises
        AtollError(STORAGE_FULL) with the time after which to ask again.
        """
        if self._has_room():
            return
        self._store.abandon(staging_id)
        self.sweep()
        if not self._has_room():
            disk = self.disk()
            raise storage_low(self._store.root, disk.free, self._settings.min_free_bytes(disk.capacity))

    def _has_room(self) -> bool:
        disk = self.disk()
        return disk.free >= self._settings.min_free_bytes(disk.capacity)

    def _mark(self) -> tuple[str, ...]:
        with self._database.write() as connection:
            # Locked before the versions are read: a commit that uses one of them is visible already, or waits and then
            # finds it removed.
            connection.execute(
                sa.select(_ARTIFACTS.c.digest)
                .where(_ARTIFACTS.c.removed_at.is_(None))
                .order_by(_ARTIFACTS.c.digest)
                .with_for_update()
            ).all()
            digests, now = self._plan(connection).removed, utc_now()
            for digest in digests:
                connection.execute(_ARTIFACTS.update().where(_ARTIFACTS.c.digest == digest).values(removed_at=now))
        return digests

    def _plan(self, connection: sa.Connection) -> Plan:
        disk = self.disk()
        settings = self._settings
        rules = Rules(
            settings.retention_policy,
            settings.keep_checkpoints,
            settings.max_storage_bytes(disk.capacity),
            settings.min_free_bytes(disk.capacity),
        )
        return plan(read_facts(connection, disk.free), rules, utc_now())

    def _tell(self, planned: Plan) -> None:
        """Says once that a bound cannot be met, and once that it is met again."""
        is_short = planned.short_of > 0
        if is_short and not self._is_short:
            log.warning(
                "a storage bound cannot be met: everything that is left is needed",
                short_of_bytes=planned.short_of,
                store=str(self._store.root),
                todo="free space on the filesystem, unpin versions, change the bound, or move the store",
            )
        elif self._is_short and not is_short:
            log.info("the storage bounds are met again")
        self._is_short = is_short
