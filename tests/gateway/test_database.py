"""The database is durable, migrates forward by itself, and refuses what it cannot be."""

import sqlite3
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.common.names import new_id
from atoll.gateway.database import Database, insert_if_absent
from atoll.gateway.tables import METADATA, keys
from psycopg import sql
from sqlalchemy import event, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from tests.gateway.fork_server import process_context
from tests.gateway.store_world import url_of
from tests.postgres import PostgresServer


@pytest.mark.usefixtures("both_databases")
def test_the_migrations_build_the_declared_tables(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    database.close()


def test_the_tables_can_be_declared_on_postgresql() -> None:
    for table in METADATA.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]


def test_every_connection_logs_ahead_and_syncs_fully(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))
    with database.reading() as one, database.reading() as other:
        for connection in (one, other):
            found = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
            assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
    database.close()


def test_a_database_of_a_newer_atoll_is_refused_and_left_alone(tmp_path: Path) -> None:
    Database(url_of(tmp_path)).close()
    with sqlite3.connect(tmp_path / "gateway.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(BadConfiguration, match=r"9999.*newer"):
        Database(url_of(tmp_path))
    with sqlite3.connect(tmp_path / "gateway.db") as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "no url at all", "nosuchdialect://x/y", "mysql://h/d"]
)
def test_a_url_that_cannot_keep_samples_is_refused(url: str) -> None:
    with pytest.raises(BadConfiguration, match="database_url"):
        Database(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gateway.db").write_text("this is a letter, not a database" * 100)
    with pytest.raises(BadConfiguration, match="cannot open"):
        Database(url_of(tmp_path))


def _open_and_tell_key(url: str, answers: "Queue[bytes]") -> None:
    database = Database(url)
    answers.put(database.key("receipts"))
    database.close()


@pytest.mark.usefixtures("both_databases")
def test_processes_that_open_an_empty_database_at_once_agree_on_it(tmp_path: Path) -> None:
    context = process_context()
    answers = context.Queue()
    children = [context.Process(target=_open_and_tell_key, args=(url_of(tmp_path), answers)) for _ in range(4)]
    for child in children:
        child.start()
    found = {answers.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert len(found) == 1 and len(found.pop()) == 32


@pytest.mark.usefixtures("both_databases")
def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))
    with pytest.raises(RuntimeError), database.writing() as connection:
        insert_if_absent(connection, keys, {"name": "x", "value": b"1"})
        raise RuntimeError
    with database.reading() as connection:
        assert connection.execute(select(keys)).all() == []
    database.close()


def test_a_full_store_is_told_as_such(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))

    def limit(connection: sqlite3.Connection, _entry: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size: no page more

    event.listen(database.engine, "connect", limit)
    database.engine.dispose()
    with pytest.raises(AtollError) as refusal, database.writing() as connection:
        insert_if_absent(connection, keys, {"name": "x", "value": b"1" * 1_000_000})
    assert refusal.value.reason == errors_pb2.REASON_STORAGE_FULL
    database.close()


def test_a_store_that_another_process_holds_too_long_is_unavailable(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))

    def impatient(connection: sqlite3.Connection, _entry: object) -> None:
        connection.execute("PRAGMA busy_timeout = 50")

    event.listen(database.engine, "connect", impatient)
    database.engine.dispose()
    other = sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"), database.writing():
        pass
    other.execute("ROLLBACK")
    other.close()
    with database.writing():
        pass
    database.close()


def test_a_server_that_is_not_there_is_named_at_the_start() -> None:
    with pytest.raises(BadConfiguration, match="cannot open the database"):
        Database("postgresql://atoll:secret@127.0.0.1:1/gateway")


@pytest.mark.slow
async def test_a_server_that_stops_is_unavailable_and_found_when_it_is_back(postgres: PostgresServer) -> None:
    name = new_id()
    database = Database(postgres.create(name))
    with database.writing() as connection:
        insert_if_absent(connection, keys, {"name": "x", "value": b"1"})
    all_of = sql.SQL("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = {}")
    with pytest.raises(Unavailable), database.writing() as connection:
        postgres.execute(all_of.format(sql.Literal(name)))
        insert_if_absent(connection, keys, {"name": "y", "value": b"1"})
    with database.reading() as connection:
        assert [row.name for row in connection.execute(select(keys))] == ["x"]
    database.close()
    postgres.drop(name)


@pytest.mark.usefixtures("both_databases")
def test_a_reading_sees_one_moment_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))
    with database.reading() as reader:
        assert reader.execute(select(keys)).all() == []
        with database.writing() as writer:
            insert_if_absent(writer, keys, {"name": "x", "value": b"1"})
        assert reader.execute(select(keys)).all() == []
    database.close()
