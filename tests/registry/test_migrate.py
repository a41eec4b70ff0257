from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.registry import database as database_module
from atoll.registry import migrate as migrate_module
from atoll.registry.database import Database
from atoll.registry.job_records import JobRecords
from atoll.registry.job_types import JobPhase, TrainingBody
from atoll.registry.migrate import VERSION_TABLE, migrate
from atoll.registry.tables import metadata


@pytest.fixture
def url(empty_database: str) -> str:
    return empty_database


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
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


def test_connections_are_durable_and_check_references(sqlite_url: str) -> None:
    with Database(sqlite_url).read() as connection:
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


def test_a_full_database_is_said_and_the_transaction_undone(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE t (x BLOB)"))
    with pytest.raises(AtollError) as refused, database.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=10")
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))
        connection.execute(sa.text("INSERT INTO t VALUES (zeroblob(1000000))"))
    assert refused.value.reason == errors_pb2.REASON_STORAGE_FULL
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM t")).scalar_one() == 0


def test_a_disk_that_takes_no_writes_is_worth_asking_again(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
    with pytest.raises(Unavailable, match="does not take writes"), database.write() as connection:
        connection.exec_driver_sql("PRAGMA query_only=ON")
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))


def test_a_stuck_writer_makes_the_next_one_unavailable(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 50)
    with (
        Database(sqlite_url).write(),
        pytest.raises(Unavailable, match=r"was locked for 0 s"),
        Database(sqlite_url).write(),
    ):
        pytest.fail("two writers at once")


@pytest.mark.parametrize("text", ["", "nonsense", "nosuch://host/db", "sqlite:////proc/nowhere/registry.db"])
def test_a_url_that_cannot_be_opened_is_refused(text: str) -> None:
    with pytest.raises(BadConfiguration):
        migrate(Database(text))


def test_jobs_that_an_older_release_committed_get_their_records(url: str) -> None:
    database = Database(url)
    config = Config()
    config.set_main_option("script_location", str(Path(migrate_module.__file__).with_name("migrations")))
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for statement in (
            "INSERT INTO scenarios VALUES ('support', 'grpo', '{}', '/base', 0, 1, 2, 3, 7)",
            f"INSERT INTO artifacts VALUES ('{'f' * 64}', 'model', 1, 5, NULL)",
            *(
                f"INSERT INTO versions VALUES ('support', {number}, {parent}, '{operation}', 1, {job}, 'grpo', "
                f"'{'f' * 64}', NULL, '{{}}', '{{}}', {number + 1}, {number + 10})"
                for number, parent, operation, job in (
                    (0, "NULL", "creation", "NULL"),
                    (1, 0, "training", "'job-a'"),
                    (2, 1, "training", "'job-b'"),
                )
            ),
            "INSERT INTO consumed_samples VALUES ('support', 's-2', 2, 1), ('support', 's-1', 2, 0)",
        ):
            connection.exec_driver_sql(statement)
    migrate(database)
    records = JobRecords(database)
    newest, first = records.list_page("support", open_only=False, limit=10, after=None)
    assert (newest.job_id, newest.position, newest.version, newest.progress.phase) == (
        "job-b",
        2,
        2,
        JobPhase.COMMITTED,
    )
    assert newest.body == TrainingBody("grpo", None, ("s-1", "s-2"))
    assert (first.job_id, first.body) == ("job-a", TrainingBody("grpo", None, ()))
