import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import NotFound
from atoll.trainer.job_queue import JobBody, JobCancelled, JobQueue, JobRecord


def body(job_id: str) -> JobBody:
    return JobBody(job_id, "chat", "grpo", {}, (f"{job_id}-sample",))


def told(job_id: str, order: int = 1, state: job_pb2.JobState.ValueType = job_pb2.JOB_STATE_SUBMITTED) -> JobRecord:
    """A job as the registry tells it."""
    now = datetime.now(UTC)
    return JobRecord(body(job_id), order, state, 0, now, now)


async def test_a_watcher_sees_every_state_in_order_and_ends_with_the_job() -> None:
    queue = JobQueue()
    await queue.take_in(told("a"))

    async def watch() -> list[JobRecord]:
        return [record async for record in queue.watch("a", 0, heartbeat_s=60)]

    watching = asyncio.create_task(watch())
    states = [job_pb2.JOB_STATE_ADMITTED, job_pb2.JOB_STATE_RUNNING, job_pb2.JOB_STATE_FAILED]
    for state in states:
        await asyncio.sleep(0.01)
        await queue.advance("a", state)
    seen = await asyncio.wait_for(watching, 5)
    assert [record.state for record in seen] == [job_pb2.JOB_STATE_SUBMITTED, *states]
    revisions = [record.revision for record in seen]
    assert revisions == sorted(set(revisions))


async def test_a_watch_resumes_after_a_revision() -> None:
    queue = JobQueue()
    seen = (await queue.take_in(told("a"))).revision
    last = await queue.advance("a", job_pb2.JOB_STATE_FAILED)
    assert [record async for record in queue.watch("a", seen, 60)] == [last]


async def test_a_watcher_that_saw_a_revision_of_another_holder_whose_clock_was_ahead_is_told_the_end() -> None:
    queue = JobQueue()
    running = await queue.take_in(told("a"))
    watching = queue.watch("a", running.revision + 1_000_000, heartbeat_s=60)
    assert await anext(watching) == running
    ended = await queue.advance("a", job_pb2.JOB_STATE_FAILED)
    async with asyncio.timeout(1.0):
        assert [record async for record in watching] == [ended]
    await queue.take_in(told("b"))
    await queue.take_in(told("c"))
    assert [record async for record in queue.watch("a", ended.revision + 1, 60)] == [ended]


async def test_a_watch_repeats_the_last_answer_when_nothing_happens() -> None:
    queue = JobQueue()
    record = await queue.take_in(told("a"))
    watching = queue.watch("a", record.revision, heartbeat_s=0.01)
    assert await anext(watching) == record
    assert await anext(watching) == record


async def test_revisions_grow_over_a_restart() -> None:
    first = await JobQueue().take_in(told("a"))
    await asyncio.sleep(0.002)
    assert (await JobQueue().take_in(told("a"))).revision > first.revision


async def test_a_caller_that_goes_away_while_it_submits_leaves_a_job_that_runs() -> None:
    queue = JobQueue()
    async with queue._changed:  # whoever is told of changes holds it
        submitting = asyncio.create_task(queue.take_in(told("job-1")))
        await asyncio.sleep(0)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
    async with asyncio.timeout(1.0):
        assert (await queue.next_job()).body == body("job-1")


async def test_a_cancelled_job_is_skipped_and_cannot_be_moved() -> None:
    queue = JobQueue()
    await queue.take_in(told("a"))
    await queue.take_in(told("b", 2))
    cancelled = await queue.end_cancelled(told("a", 1, job_pb2.JOB_STATE_CANCELLED))
    assert await queue.end_cancelled(told("a", 1, job_pb2.JOB_STATE_CANCELLED)) == cancelled
    assert (await queue.next_job()).body.job_id == "b"
    with pytest.raises(JobCancelled):
        await queue.advance("a", job_pb2.JOB_STATE_RUNNING)


async def test_jobs_run_in_the_order_in_which_they_were_recorded() -> None:
    queue = JobQueue()
    for name, order in (("c", 3), ("a", 1), ("b", 2)):
        await queue.take_in(told(name, order))
    assert [(await queue.next_job()).body.job_id for _ in "abc"] == list("abc")


async def test_a_job_that_has_ended_or_committed_is_known_and_not_run() -> None:
    queue = JobQueue()
    states = (job_pb2.JOB_STATE_FAILED, job_pb2.JOB_STATE_COMMITTED, job_pb2.JOB_STATE_SUBMITTED)
    for order, state in enumerate(states):
        await queue.take_in(told("abc"[order], order, state))
    assert queue.unfinished() == {"c"}
    assert (await queue.next_job()).body.job_id == "c"


async def test_serving_a_version_ends_every_job_committed_up_to_it() -> None:
    queue = JobQueue()
    for number, name in enumerate("abc", start=1):
        await queue.take_in(replace(told(name, number, job_pb2.JOB_STATE_COMMITTED), version=number))
    assert await queue.mark_served(2)
    states = [queue.get(name).state for name in "abc"]
    assert states == [job_pb2.JOB_STATE_SERVED, job_pb2.JOB_STATE_SERVED, job_pb2.JOB_STATE_COMMITTED]
    assert not await queue.mark_served(2)
    late = replace(told("d", 4, job_pb2.JOB_STATE_COMMITTED), version=1)
    assert queue.as_served(late).state == job_pb2.JOB_STATE_SERVED


async def test_a_reason_stands_only_as_long_as_the_state_it_explains() -> None:
    queue = JobQueue()
    await queue.take_in(told("a"))
    await queue.advance("a", job_pb2.JOB_STATE_DEFERRED, reason=errors_pb2.REASON_STORAGE_FULL, message="no room")
    staged = await queue.advance("a", job_pb2.JOB_STATE_STAGED)
    assert (staged.reason, staged.message) == (errors_pb2.REASON_UNSPECIFIED, "")


def test_an_unknown_job_is_not_found() -> None:
    with pytest.raises(NotFound):
        JobQueue().get("a")
