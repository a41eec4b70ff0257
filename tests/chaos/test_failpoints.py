"""One kill at every boundary between two durable steps, in real processes.

Whatever dies there and starts again, the job is committed once and its samples are consumed once.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.deployment import BATCH, Shape
from tests.chaos.stage import Stage, stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
REACH_SECONDS = 90.0
LEASE_TTL_S = 3.0

TRAINING_POINTS = [
    ("trainer-1", "trainer.recorded"),
    ("trainer-1", "trainer.running"),
    ("trainer-1", "trainer.stepped"),
    ("trainer-1", "trainer.exported"),
    ("trainer-1", "trainer.sealed"),
    ("trainer-1", "trainer.staged"),
    ("trainer-1", "trainer.committed"),
    ("trainer-1", "trainer.published"),
    ("registry", "registry.recorded_recorded"),
    ("registry", "registry.recorded_running"),
    ("registry", "registry.placed"),
    ("registry", "registry.sealed"),
    ("registry", "registry.recorded_staged"),
    ("registry", "registry.committed"),
    ("gateway", "gateway.sample_recorded"),
    ("gateway", "gateway.report_recorded"),
    ("gateway", "gateway.batch_formed"),
    ("gateway", "gateway.submitted"),
    ("gateway", "gateway.settled"),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One deployment for all points; every second version is live."""
    settings = {"LEASE_TTL_S": str(LEASE_TTL_S), "CHECKPOINT_EVERY_N_VERSIONS": "2", "MAX_ATTEMPTS": "3"}
    shape = Shape(trainer_settings=settings, max_staleness=2)
    async with stage(tmp_path_factory.mktemp("failpoints"), tiny_models / "student", shape) as running:
        yield running


async def died_at(here: Stage, name: str, failpoint: str) -> None:
    """Waits for the process to die where it should, and starts it without the failpoint."""
    try:
        async with asyncio.timeout(REACH_SECONDS):
            status = await here.deployment[name].ended()
    except TimeoutError:
        raise AssertionError(f"{name} never reached {failpoint}") from None
    finally:
        await here.disarm(name)
    assert status == -9, f"{name} ended with {status}, expected a kill at {failpoint}"


@pytest.mark.parametrize(("name", "failpoint"), TRAINING_POINTS, ids=[point for _, point in TRAINING_POINTS])
async def test_a_kill_at_a_boundary_costs_no_sample_and_trains_none_twice(
    here: Stage, name: str, failpoint: str
) -> None:
    before = (await here.check()).versions
    await here.arm(name, failpoint)
    feeding = asyncio.create_task(here.feed(failpoint))
    await died_at(here, name, failpoint)
    receipts = await feeding
    await here.until(lambda: here.consumed().keys() >= set(receipts), "the batch is trained")
    registry = await here.check()
    new = registry.versions[len(before) :]
    assert [version.operation for version in new].count("training") == 1
    consumed = here.consumed()
    assert {receipt: consumed[receipt] for receipt in receipts} == dict.fromkeys(receipts, 1)
    assert len(receipts) == BATCH


@pytest.mark.parametrize("failpoint", ["trainer.rolled_back", "registry.recorded_recorded", "registry.committed"])
async def test_a_kill_in_a_rollback_makes_one_version_of_it(here: Stage, failpoint: str) -> None:
    await here.check()
    name = "trainer-1" if failpoint.startswith("trainer") else "registry"
    await here.arm(name, failpoint)
    asking = asyncio.create_task(here.client.rollback(0, f"request-{failpoint}"))
    await died_at(here, name, failpoint)
    job_id = await asking
    await here.until(lambda: here.observer.read()[1].jobs[job_id].phase == "committed", "the rollback")
    registry = await here.check()
    (version,) = [version for version in registry.versions if version.job_id == job_id]
    assert (version.operation, version.restores) == ("rollback", 0)


async def test_a_kill_behind_a_recovery_makes_one_version_of_it(here: Stage) -> None:
    await here.check()
    while not here.observer.read()[1].versions[-1].is_live:
        head = here.observer.head
        await here.feed(f"towards a live head, after {head}")
        await here.until_head(head + 1)
        await here.check()
    before = len(here.observer.read()[1].versions)
    process = here.deployment["trainer-1"]
    await process.kill()
    process.environment["ATOLL_FAILPOINT"] = "trainer.recovered"
    await process.start()
    await died_at(here, "trainer-1", "trainer.recovered")
    await here.feed("behind the recovery")
    await here.until_head(before + 1)
    new = (await here.check()).versions[before:]
    assert [version.operation for version in new] == ["recovery", "training"]


async def test_a_registry_that_dies_behind_a_lease_gives_it_to_its_holder_again(here: Stage) -> None:
    await here.check()
    await here.arm("registry", "registry.leased")
    # Stopped until its lease has lapsed, the holder acquires it anew.
    here.deployment["trainer-1"].signal(signal.SIGSTOP)
    await asyncio.sleep(1.5 * LEASE_TTL_S)
    here.deployment["trainer-1"].signal(signal.SIGCONT)
    await died_at(here, "registry", "registry.leased")
    receipts = await here.feed("behind the lease")
    await here.until(lambda: here.consumed().keys() >= set(receipts), "the batch is trained")
    await here.check()
