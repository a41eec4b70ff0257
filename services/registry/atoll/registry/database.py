"""The engine factory and the two kinds of transaction. SQLite by default; PostgreSQL is another URL."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.registry.room import storage_full
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

_WRITES = "atoll_writes"
BUSY_TIMEOUT_MS = 10_000
"""How long a writer waits for another process's commit; a commit takes one fsync, so this is a stuck disk."""


class Database:
    """Short transactions on one database. Thread-safe; never called on the event loop."""

    def __init__(self, url: str) -> None:
        """Raises BadConfiguration for a URL that names no database we can open."""
        try:
            self._engine = sa.create_engine(url)
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
        except (sa.exc.ArgumentError, ImportError, OSError) as error:
            raise BadConfiguration(
                f"ATOLL_REGISTRY_DATABASE_URL cannot be used: {error}", field="ATOLL_REGISTRY_DATABASE_URL"
            ) from None
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @property
    def file(self) -> Path | None:
        """The SQLite file, None for a server or memory."""
        name = self._engine.url.database
        on_disk = self._engine.dialect.name == "sqlite" and name and name != ":memory:"
        return Path(name) if on_disk and name else None

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that changes nothing."""
        with _translated(self.shown_url), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that is durable when the block ends and undone when it raises.

        On SQLite it holds the write lock from its first statement, so what it read stays true; elsewhere lock the rows
        you decide on. Raises AtollError(STORAGE_FULL) and Unavailable.
        """
        with _translated(self.shown_url), self._engine.connect() as connection:
            connection = connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    def close(self) -> None:
        self._engine.dispose()


def _prepare_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # sqlite3 would begin late and by itself; the begin event does it
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A deferred transaction that reads and then writes fails at once when another process wrote in between.
    immediate = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def _translated(shown_url: str) -> Iterator[None]:
    """Failures of the database, not of the caller, as errors that a caller can act on."""
    try:
        yield
    except sa.exc.OperationalError as error:
        refusal = _refusal(error, shown_url)
        if refusal is None:
            raise
        raise refusal from error


def _refusal(error: sa.exc.OperationalError, shown_url: str) -> AtollError | None:
    if isinstance(error.orig, sqlite3.OperationalError):
        code = error.orig.sqlite_errorcode & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return storage_full(f"the database {shown_url}")
        if code == sqlite3.SQLITE_BUSY:
            return Unavailable(f"the database {shown_url} was locked for {BUSY_TIMEOUT_MS / 1000:.0f} s")
        if code == sqlite3.SQLITE_CANTOPEN:
            return BadConfiguration(f"cannot open the database {shown_url}: {error.orig}")
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY):
            # The disk's trouble, not the caller's: whoever waits for the commit asks again.
            return Unavailable(f"the database {shown_url} does not take writes: {error.orig}")
        return None
    if error.connection_invalidated or isinstance(error, sa.exc.DisconnectionError):
        return Unavailable(f"the database {shown_url} does not answer")
    return None
