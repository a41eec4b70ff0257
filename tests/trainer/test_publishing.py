"""Publishing against an engine over real HTTP: whatever happens to it, it ends up with the head."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.api.trainer.v1.trainer_service_pb2 import ListJobsRequest
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion
from atoll.trainer.publishing import served_number
from atoll.trainer.refused_head import automatic_rollback_id

from tests.trainer.world import Stub, World, pair, until, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def trained(here: World) -> None:
    """A trainer that has committed and published one version."""
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED


async def test_an_engine_that_serves_the_head_is_left_alone(here: World) -> None:
    await here.start()
    await asyncio.sleep(0.3)
    assert here.engine.updates == []


async def test_an_engine_that_restarted_with_old_weights_is_updated(here: World) -> None:
    await trained(here)
    here.engine.served = here.engine.reported = "1:0"
    await eventually(lambda: here.engine.served == "1:1")


async def test_an_engine_with_old_weights_is_updated_at_boot(here: World) -> None:
    await trained(here)
    await here.stop()
    here.engine.served = here.engine.reported = "1:0"
    await here.start()
    await eventually(lambda: here.engine.served == "1:1")


async def test_an_engine_that_only_says_it_serves_the_head_is_found_out(here: World) -> None:
    await trained(here)
    await here.stop()
    here.engine.served = "1:0"
    await here.start()
    await eventually(lambda: here.engine.served == "1:1")


async def test_an_engine_that_a_killed_publisher_left_paused_goes_on(here: World) -> None:
    here.engine.paused = True
    await here.start()
    await eventually(lambda: not here.engine.paused)


async def test_a_publish_that_the_engine_refuses_is_repeated_and_the_commit_stands(here: World) -> None:
    stub = await here.start()
    here.engine.refuse_updates = 4
    await stub.SubmitJob(here.job("job-0", pair("a")))
    committed = await until(stub, "job-0", job_pb2.JOB_STATE_COMMITTED, job_pb2.JOB_STATE_SERVED)
    assert (committed.version, committed.reason) == (1, errors_pb2.REASON_UNSPECIFIED)
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert here.engine.refuse_updates == 0


async def test_jobs_go_on_while_no_engine_answers_and_are_served_once_one_does(here: World) -> None:
    stub = await here.start()
    port = int(here.engine.base_url.rpartition(":")[2])
    await here.engine.stop()
    for number in range(2):
        await stub.SubmitJob(here.job(f"job-{number}", pair(f"s{number}", versions=(f"1:{number}",))))
        assert (await until(stub, f"job-{number}", job_pb2.JOB_STATE_COMMITTED)).version == number + 1
    await here.engine.start(port)
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert (await until(stub, "job-1")).state == job_pb2.JOB_STATE_SERVED
    assert here.engine.served == "1:2"


@pytest.mark.parametrize(
    ("versions", "min_engines", "number"),
    [
        (("1:3", "1:2"), 1, 3),
        (("1:3", "1:2"), 2, 2),
        (("1:3", None), 2, None),
        (("2:9", "1:2"), 1, 2),
        ((None,), 1, None),
    ],
)
def test_a_version_is_served_once_enough_engines_have_it_or_a_later_one(
    versions: tuple[str | None, ...], min_engines: int, number: int | None
) -> None:
    seen = {str(n): None if text is None else WeightVersion.parse(text) for n, text in enumerate(versions)}
    head = ChainVersion(3, 2, WeightVersion(1, 3))
    assert served_number(seen, head, min_engines) == number


async def test_a_head_that_no_engine_loads_is_rolled_back_by_itself_and_what_it_goes_back_to_is_served(
    here: World,
) -> None:
    here.settings = here.settings.model_copy(update={"publish_timeout_s": 0.3})
    stub = await here.start()
    here.engine.refuse_updates = 1_000_000
    await stub.SubmitJob(here.job("job-0", pair("a")))
    back = automatic_rollback_id("chat", 1)
    await eventually_known(stub, back)
    rolled_back = await until(stub, back, job_pb2.JOB_STATE_COMMITTED)
    assert (rolled_back.version, rolled_back.restores) == (2, 0)
    here.engine.refuse_updates = 0
    assert (await until(stub, back)).state == job_pb2.JOB_STATE_SERVED
    assert here.engine.served == "2:2"
    assert set(here.engine.refused) >= {"1:1"}
    # The commit stands, and nothing is rolled back a second time.
    assert [version.weight_version for version in await here.registry.versions()] == ["1:0", "1:1", "2:2"]
    await stub.SubmitJob(here.job("job-1", pair("b", versions=("2:2",))))
    assert (await until(stub, "job-1")).version == 3


async def test_a_head_that_no_engine_loads_goes_back_past_a_version_whose_bytes_are_gone(here: World) -> None:
    here.settings = here.settings.model_copy(update={"publish_timeout_s": 1.0})
    stub = await here.start()
    await stub.SubmitJob(here.job("job-0", pair("a")))
    await until(stub, "job-0")
    here.engine.refuse_updates = 1_000_000
    await stub.SubmitJob(here.job("job-1", pair("b", versions=("1:1",))))
    await until(stub, "job-1", job_pb2.JOB_STATE_COMMITTED)
    await here.registry.lose((await here.registry.versions())[1].checkpoint_digest)
    back = automatic_rollback_id("chat", 2)
    await eventually_known(stub, back)
    rolled_back = await until(stub, back, job_pb2.JOB_STATE_COMMITTED)
    assert (rolled_back.version, rolled_back.restores) == (3, 0)


async def eventually_known(stub: Stub, job_id: str) -> None:
    async with asyncio.timeout(10):
        while job_id not in {job.job_id for job in (await stub.ListJobs(ListJobsRequest())).jobs}:
            await asyncio.sleep(0.02)
