"""The engine factory and the two kinds of transaction. SQLite by default; PostgreSQL is another URL."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import sqlalchemy as sa
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.registry.room import storage_full
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

_WRITES = "atoll_writes"
BUSY_TIMEOUT_MS = 10_000
"""How long a writer waits for another process's commit; a commit takes one fsync, so this is a stuck disk."""

_IDLE_TRANSACTION_MS = 60_000
"""A registry whose machine died in a transaction must not hold its row locks until TCP gives up."""

_POSTGRES_OPTIONS = (
    f"-c lock_timeout={BUSY_TIMEOUT_MS} -c idle_in_transaction_session_timeout={_IDLE_TRANSACTION_MS} "
    "-c synchronous_commit=on"
)


class Database:
    """Short transactions on one database. Thread-safe; never called on the event loop."""

    def __init__(self, url: str) -> None:
        """Raises BadConfiguration for a URL that names no database we can open."""
        try:
            self._engine = _open(url)
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
        except (sa.exc.ArgumentError, ImportError, OSError) as error:
            raise BadConfiguration(
                f"ATOLL_REGISTRY_DATABASE_URL cannot be used: {error}", field="ATOLL_REGISTRY_DATABASE_URL"
            ) from None
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
            self._reads = self._engine
        else:
            # What several statements of a read see belongs together, as it does on SQLite.
            self._reads = self._engine.execution_options(isolation_level="REPEATABLE READ")

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
        with _translated(self.shown_url), self._reads.connect() as connection, connection.begin():
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


def _open(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "postgresql":
        return sa.create_engine(parsed)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    options = " ".join(filter(None, (str(parsed.query.get("options", "")), _POSTGRES_OPTIONS)))
    return sa.create_engine(
        parsed,
        # Row locks and the statements after them must see what others committed meanwhile.
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        max_overflow=30,
        connect_args={"options": options, "connect_timeout": 10},
    )


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
    except sa.exc.DBAPIError as error:
        refusal = _refusal(error, shown_url)
        if refusal is None:
            raise
        raise refusal from error
    except sa.exc.TimeoutError as error:  # no connection came free
        raise Unavailable(f"the database {shown_url} is busy") from error


def _refusal(error: sa.exc.DBAPIError, shown_url: str) -> AtollError | None:
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
    if not isinstance(error.orig, psycopg.Error):
        return None
    if isinstance(error.orig, psycopg.errors.DiskFull):
        return storage_full(f"the database {shown_url}")
    if isinstance(error.orig, psycopg.OperationalError | psycopg.InterfaceError):
        # Away, restarting, out of connections, locked for too long, a deadlock that it broke: all pass.
        return Unavailable(f"the database {shown_url} does not take this now: {error.orig}")
    return None
