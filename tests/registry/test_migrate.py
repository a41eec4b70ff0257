from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.registry import database as database_module
from atoll.registry.database import Database
from atoll.registry.migrate import VERSION_TABLE, migrate
from atoll.registry.tables import metadata


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'registry.db'}"


def test_the_migrations_build_the_tables(url: str) -> None:
    database = Database(url)
    migrate(database)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, metadata) == []


def test_migrating_again_changes_nothing_and_many_may_do_it_at_once(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: migrate(Database(url)), range(4))) == [None] * 4
    migrate(Database(url))


def test_a_database_of_a_newer_release_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    database = Database(url)
    migrate(database)
    with database.write() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(BadConfiguration, match=r"has schema 9999, this release knows 0002 at most.*newer release"):
        migrate(Database(url))
    with database.read() as connection:
        assert connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == "9999"


def test_connections_are_durable_and_check_references(url: str) -> None:
    with Database(url).read() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 2]
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_a_transaction_that_raises_is_undone(url: str) -> None:
    database = Database(url)
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
        raise ZeroDivisionError
    with database.read() as connection:
        assert not sa.inspect(connection).has_table("t")


def test_a_full_database_is_said_and_the_transaction_undone(url: str) -> None:
    database = Database(url)
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE t (x BLOB)"))
    with pytest.raises(AtollError) as refused, database.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=10")
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))
        connection.execute(sa.text("INSERT INTO t VALUES (zeroblob(1000000))"))
    assert refused.value.reason == errors_pb2.REASON_STORAGE_FULL
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM t")).scalar_one() == 0


def test_a_disk_that_takes_no_writes_is_worth_asking_again(url: str) -> None:
    database = Database(url)
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
    with pytest.raises(Unavailable, match="does not take writes"), database.write() as connection:
        connection.exec_driver_sql("PRAGMA query_only=ON")
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))


def test_a_stuck_writer_makes_the_next_one_unavailable(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 50)
    with (
        Database(url).write(),
        pytest.raises(Unavailable, match=r"was locked for 0 s"),
        Database(url).write(),
    ):
        pytest.fail("two writers at once")


@pytest.mark.parametrize("text", ["", "nonsense", "nosuch://host/db", "sqlite:////proc/nowhere/registry.db"])
def test_a_url_that_cannot_be_opened_is_refused(text: str) -> None:
    with pytest.raises(BadConfiguration):
        migrate(Database(text))
