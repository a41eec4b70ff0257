"""The gateway's database: SQLite by default, PostgreSQL where several machines share it."""

import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import alembic.command
import alembic.config
import alembic.script
import psycopg
from alembic.runtime.migration import MigrationContext
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.gateway.tables import keys, scenario_locks
from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_MS = 30_000
"""How long a writer waits for another process's transaction; ours take milliseconds."""

CONNECT_SECONDS = 10
"""How long a server may take to accept a connection."""

_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x61746F6C6C  # "atoll", any number that only we use
_READ_ONLY = "atoll_read_only"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Database:
    """Transactions on one database. Methods block: call them from a worker thread."""

    def __init__(self, url: str) -> None:
        """Opens the database and migrates it forward. Raises BadConfiguration."""
        self.engine = _open(url)
        # SQLite has one writer at a time and lets the others poll for their turn; here they queue.
        is_sqlite = self.engine.dialect.name == "sqlite"
        self._turn: AbstractContextManager[object] = threading.Lock() if is_sqlite else nullcontext()
        self._snapshot = {_READ_ONLY: True} if is_sqlite else {"isolation_level": "REPEATABLE READ"}
        try:
            self._migrate()
        except DBAPIError as error:
            self.engine.dispose()
            raise BadConfiguration(f"cannot open the database {self.engine.url!r}: {error.orig}") from None

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that may write, committed at the end. Raises AtollError(STORAGE_FULL), Unavailable."""
        with self._turn, translated_failures(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A snapshot, which no writer waits for. Raises Unavailable."""
        with translated_failures(), self.engine.connect().execution_options(**self._snapshot) as connection:
            yield connection

    def key(self, name: str) -> bytes:
        """The 32-byte secret of this name, made by whoever asks first."""
        with self.writing() as connection:
            insert_if_absent(connection, keys, {"name": name, "value": secrets.token_bytes(32)})
            value = connection.execute(select(keys.c.value).where(keys.c.name == name)).scalar_one()
        return bytes(value)

    def _migrate(self) -> None:
        config = alembic.config.Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        known = {script.revision for script in alembic.script.ScriptDirectory.from_config(config).walk_revisions()}
        with self.engine.connect() as connection, connection.begin():
            # Several gateways may start on an empty database at once; SQLite's BEGIN IMMEDIATE does the same.
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            current = MigrationContext.configure(connection).get_current_revision()
            if current is not None and current not in known:
                raise BadConfiguration(
                    f"the database {self.engine.url!r} is at schema {current}, which this version of Atoll does not "
                    "know: it was opened by a newer one; run that one, or give this one another database",
                    field="database_url",
                )
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")


def lock_scenario(connection: Connection, scenario: str) -> None:
    """Makes other writers of this scenario wait until the transaction ends."""
    insert_if_absent(connection, scenario_locks, {"scenario": scenario})
    table = scenario_locks
    connection.execute(select(table.c.scenario).where(table.c.scenario == scenario).with_for_update()).one()


def insert_if_absent(connection: Connection, table: object, row: dict[str, object]) -> None:
    """Inserts a row unless its primary key is there."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    connection.execute(insert(table).values(row).on_conflict_do_nothing())  # type: ignore[arg-type]


def microseconds(moment: datetime) -> int:
    """A timezone-aware time as it is stored."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def moment_of(stored: int) -> datetime:
    """The time that `microseconds` stored."""
    return _EPOCH + timedelta(microseconds=stored)


@contextmanager
def translated_failures() -> Iterator[None]:
    """Turns a failing store into a refusal; integrity errors pass, since only the caller knows what they mean."""
    try:
        yield
    except DBAPIError as error:
        refusal = _refusal_of(error)
        if refusal is None:
            raise
        raise refusal from error
    except PoolTimeout as error:
        raise Unavailable(f"the gateway's database is busy: {error}") from error


def _refusal_of(error: DBAPIError) -> AtollError | None:
    original = error.orig
    if isinstance(original, sqlite3.Error):
        # Errors that Python's own module raises carry no SQLite code.
        name = original.sqlite_errorname if hasattr(original, "sqlite_errorname") else ""
        if name == "SQLITE_FULL":
            return _storage_full(str(original))
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY")):
            return Unavailable(f"the gateway's database does not take writes: {original} ({name})")
        return None
    if isinstance(original, psycopg.errors.DiskFull):
        return _storage_full(str(original))
    if isinstance(original, psycopg.OperationalError | psycopg.InterfaceError):
        return Unavailable(f"the gateway's database does not answer: {original}")
    return None


def _storage_full(detail: str) -> AtollError:
    return AtollError(
        f"the gateway's database has no room: {detail}; nothing was stored, free space and try again",
        reason=errors_pb2.REASON_STORAGE_FULL,
        retry_after_s=10.0,
    )


def _open(url: str) -> Engine:
    try:
        parsed = make_url(url)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        if not is_sqlite and parsed.get_backend_name() != "postgresql":
            raise BadConfiguration(
                f"database_url is {url!r}, expected sqlite:///<file> or postgresql://<user>@<host>/<database>",
                field="database_url",
            )
        if is_sqlite and parsed.database in (None, "", ":memory:"):
            raise BadConfiguration(
                f"database_url is {url!r}, which is lost when the process ends; name a file, e.g. sqlite:///gateway.db",
                field="database_url",
            )
        if is_sqlite and parsed.database is not None:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if is_sqlite:
            engine = create_engine(parsed, pool_size=8, max_overflow=16)
        else:
            # Row locks and the statements after them must see what others committed meanwhile.
            engine = create_engine(
                parsed,
                pool_size=8,
                max_overflow=16,
                pool_pre_ping=True,
                isolation_level="READ COMMITTED",
                connect_args={"connect_timeout": CONNECT_SECONDS},
            )
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError, OSError) as error:
        raise BadConfiguration(f"database_url cannot be used: {error}", field="database_url") from None
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    if not isinstance(connection, sqlite3.Connection):
        raise BadConfiguration("SQLite is used through Python's own module only: write sqlite:///...")
    # The module would begin transactions by itself, deferred and late; we say BEGIN.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise BadConfiguration(f"the file system of the database does not do write-ahead logging (mode {mode})")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writer fails at once when another writer came first.
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
