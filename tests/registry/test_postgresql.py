"""What only a database server can do to a registry. The other tests run on PostgreSQL too, in the slow lane."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from atoll.common.errors import AtollError, Unavailable
from atoll.registry import database as database_module
from atoll.registry import tables
from atoll.registry.app import Registry
from atoll.registry.database import Database
from atoll.registry.job_types import JobPhase, JobProgress, RollbackBody
from atoll.registry.migrate import VERSION_TABLE
from atoll.registry.settings import RegistrySettings
from atoll.registry.types import Operation

from tests.postgres import PostgresServer
from tests.registry.material import SCENARIO, content, seal
from tests.registry.test_restoring import commit, restoring

pytestmark = pytest.mark.parametrize("settings", ["postgresql"], indirect=True)
TTL = timedelta(seconds=15)


def code_of(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except AtollError as error:
        return error.code


def test_the_migrations_build_the_tables_here_too(registry: Registry) -> None:
    with registry.database.read() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, tables.metadata) == []


def test_a_job_and_a_rollback_from_the_lease_to_the_sweep(registry: Registry, settings: RegistrySettings) -> None:
    assert settings.database.startswith("postgresql://")
    one, two = commit(registry, 0), commit(registry, 1)
    token = registry.leases.acquire(SCENARIO, "trainer", "one", "one:1", TTL).fencing_token
    registry.job_records.put(SCENARIO, "back", RollbackBody(1), JobProgress(JobPhase.RECORDED), token)
    assert code_of(lambda: registry.chain.commit(restoring(Operation.ROLLBACK, two, one, job_id="back"))) == "fenced"
    back = registry.chain.commit(restoring(Operation.ROLLBACK, two, one, job_id="back"), token)
    record = registry.job_records.get(SCENARIO, "back")
    assert (record.version, record.progress.phase, str(back.weight_version)) == (3, JobPhase.COMMITTED, "2:3")
    seal(registry, b"waits for its commit")
    assert registry.sweeper.sweep() == ()
    reopened = Registry(settings)
    assert reopened.chain.get(SCENARIO) == back
    reopened.close()


def test_of_many_commits_on_one_head_one_wins(registry: Registry) -> None:
    model = seal(registry, b"model").digest
    wanted = [content(0, model, job_id=f"job-{i}", consumed_sample_ids=(f"s-{i}",)) for i in range(6)]
    together = threading.Barrier(len(wanted))

    def race(index: int) -> str:
        together.wait()
        return code_of(lambda: registry.chain.commit(wanted[index]).number)

    with ThreadPoolExecutor(len(wanted)) as pool:
        assert sorted(pool.map(race, range(len(wanted)))) == ["1", *["parent_not_head"] * 5]


def test_of_many_who_want_a_lease_one_gets_it(registry: Registry) -> None:
    together = threading.Barrier(6)

    def race(index: int) -> tuple[str, int]:
        together.wait()
        lease = registry.leases.acquire(SCENARIO, "trainer", f"holder-{index}", "somewhere:1", TTL)
        return lease.holder, lease.fencing_token

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(race, range(6)))) == 1


def test_retention_waits_for_a_commit_that_brings_content_back(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of an old digest and the sweep that would remove it: whichever is first, the head keeps its bytes."""
    old = commit(registry, 0)
    for parent in (1, 2, 3):
        commit(registry, parent)
    with registry.database.write() as connection:
        artifacts = tables.artifacts
        # Committing: the row is locked and the version is not visible yet.
        connection.execute(
            sa.select(artifacts).where(artifacts.c.digest == old.content.model_digest).with_for_update()
        ).one()
        with ThreadPoolExecutor(1) as pool:
            sweep = pool.submit(registry.sweeper.sweep)
            with pytest.raises(TimeoutError):
                sweep.result(0.3)
            version = content(4, old.content.model_digest)
            connection.execute(
                tables.versions.insert().values(
                    scenario_id=SCENARIO,
                    number=5,
                    parent=4,
                    operation="training",
                    incarnation=1,
                    job_id="late",
                    family="grpo",
                    model_digest=version.model_digest,
                    metrics={},
                    family_state={},
                    revision=6,
                    created_at=old.created_at,
                )
            )
            connection.execute(tables.scenarios.update().values(head=5, revision=6))
            connection.commit()
            swept = sweep.result(10)
    assert old.content.model_digest not in swept
    assert old.content.checkpoint_digest in swept


def test_connections_that_the_server_cut_are_replaced(registry: Registry, settings: RegistrySettings) -> None:
    registry.chain.get(SCENARIO)
    with sa.create_engine(settings.database.replace("postgresql:", "postgresql+psycopg:")).connect() as connection:
        connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    assert registry.chain.get(SCENARIO).number == 0


def test_a_server_that_is_away_and_a_row_that_stays_locked_are_worth_asking_again(
    registry: Registry, settings: RegistrySettings, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable), Database(f"postgresql://postgres@/none?host={postgres.directory}/none").read():
        pytest.fail("there is no server")
    monkeypatch.setattr(database_module, "_POSTGRES_OPTIONS", "-c lock_timeout=100")
    impatient = Database(settings.database)
    lock = sa.select(tables.scenarios).with_for_update()
    with registry.database.write() as connection:
        connection.execute(lock)
        with pytest.raises(Unavailable, match="lock timeout"), impatient.write() as other:
            other.execute(lock)
    impatient.close()
