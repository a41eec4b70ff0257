"""Real Megatron workers, a real registry, a real driver process that is killed with SIGKILL in the middle of a step.

The fast lane has its two halves: every crash point in one process (`test_every_crash`), and real workers that go on
from a checkpoint bit for bit (`test_megatron_checkpoint`).
"""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2

from tests.trainer.lines import Line, finish, lines

pytestmark = pytest.mark.slow

JOBS = 2


async def calm(line: Line) -> None:
    async with line.trainer() as (stub, _):
        for number in range(JOBS):
            await stub.SubmitJob(line.job(number))
            job = await finish(stub, f"job-{number}")
            assert job.state == job_pb2.JOB_STATE_SERVED, job


async def killed(line: Line) -> None:
    async with line.trainer() as (stub, process):
        await stub.SubmitJob(line.job(0))
        assert (await finish(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        for worker in workers:
            worker.suspend()  # the step cannot end before the kill, however slow this machine is
        await stub.SubmitJob(line.job(1))
        async for reply in stub.WatchJob(trainer_service_pb2.WatchJobRequest(job_id="job-1")):
            if reply.job.state == job_pb2.JOB_STATE_RUNNING:
                break
        for worker in workers:
            worker.resume()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert alive == [], "workers outlived the driver"
    assert [version.number for version in await line.chain()] == [0, 1]
    async with line.trainer() as (stub, _):
        first = (await stub.SubmitJob(line.job(0))).job
        assert first.version == 1
        for number in range(1, JOBS):
            await stub.SubmitJob(line.job(number))
            job = await finish(stub, f"job-{number}")
            assert job.state == job_pb2.JOB_STATE_SERVED, job


async def test_a_trainer_killed_in_mid_step_reaches_the_weights_of_one_that_was_not(
    tiny_models: Path, tmp_path: Path
) -> None:
    async with lines(("calm", "killed"), tiny_models / "student", tmp_path) as made:
        await asyncio.gather(calm(made[0]), killed(made[1]))
        chains = [await line.chain() for line in made]
    for chain in chains:
        assert [(version.number, version.job_id) for version in chain] == [
            (0, ""),
            *((number + 1, f"job-{number}") for number in range(JOBS)),
        ]
    weights = [[version.model_digest for version in chain] for chain in chains]
    assert len(set(weights[0])) == JOBS + 1
    assert weights[0] == weights[1]
    assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= set(chains[0][1].metrics)
    assert [line.engine.served for line in made] == ["1:2", "1:2"]
