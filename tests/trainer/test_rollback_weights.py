"""Rollback and recovery with real Megatron workers: what comes back is all that training goes on from, bit for bit."""

import asyncio
from pathlib import Path

import pytest
from atoll.api.registry.v1 import version_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2

from tests.trainer.lines import Line, finish, lines

pytestmark = pytest.mark.slow


async def straight(line: Line) -> None:
    """Jobs 0 and 1."""
    async with line.trainer() as (stub, _):
        for number in range(2):
            await stub.SubmitJob(line.job(number))
            assert (await finish(stub, f"job-{number}")).state == job_pb2.JOB_STATE_SERVED


async def back(line: Line) -> None:
    """Job 0, another one, back to where job 0 led, and job 1's content from there."""
    async with line.trainer() as (stub, _):
        for number, content in ((0, 0), (1, 7)):
            await stub.SubmitJob(line.job(number, content=content))
            assert (await finish(stub, f"job-{number}")).state == job_pb2.JOB_STATE_SERVED
        rollback = trainer_service_pb2.SubmitRollbackRequest(job_id="back", scenario=line.scenario, version=1)
        await stub.SubmitRollback(rollback)
        assert (await finish(stub, "back")).state == job_pb2.JOB_STATE_SERVED
        await stub.SubmitJob(line.job(2, "2:3", content=1))
        assert (await finish(stub, "job-2")).version == 4


async def test_training_on_from_a_rollback_is_bit_equal_to_the_chain_that_never_left(
    tiny_models: Path, tmp_path: Path
) -> None:
    async with lines(("straight", "back"), tiny_models / "student", tmp_path) as made:
        await asyncio.gather(straight(made[0]), back(made[1]))
        chains = [await line.chain() for line in made]
        assert made[1].engine.served == "2:4"
    expected, found = chains[0][2], chains[1][4]
    assert found.model_digest == expected.model_digest != chains[1][2].model_digest
    # Optimizer, random-number states and what the families remember.
    assert found.checkpoint_digest == expected.checkpoint_digest


async def test_a_live_head_is_gone_on_from_after_its_trainer_was_killed(tiny_models: Path, tmp_path: Path) -> None:
    async with lines(("live",), tiny_models / "student", tmp_path, checkpoint_every=2) as (line,):
        async with line.trainer() as (stub, process):
            for number in range(3):
                await stub.SubmitJob(line.job(number))
                assert (await finish(stub, f"job-{number}")).state == job_pb2.JOB_STATE_SERVED
            process.kill()
            process.wait(10)
        async with line.trainer() as (stub, _):
            await stub.SubmitJob(line.job(3))
            job = await finish(stub, "job-3")
        assert (job.state, job.version) == (job_pb2.JOB_STATE_SERVED, 5)
        chain = await line.chain()
        recovery = chain[4]
        assert (recovery.operation, recovery.restores) == (version_pb2.OPERATION_RECOVERY, 2)
        assert recovery.model_digest == chain[3].model_digest
        assert line.engine.served == "2:5"
