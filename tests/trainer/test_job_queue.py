import asyncio

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import Conflict, NotFound
from atoll.trainer.job_queue import JobBody, JobCancelled, JobQueue, JobRecord


def body(job_id: str) -> JobBody:
    return JobBody(job_id, "chat", "grpo", {}, (f"{job_id}-sample",))


async def test_a_watcher_sees_every_state_in_order_and_ends_with_the_job() -> None:
    queue = JobQueue()
    await queue.submit(body("a"))

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
    seen = (await queue.submit(body("a"))).revision
    last = await queue.advance("a", job_pb2.JOB_STATE_FAILED)
    assert [record async for record in queue.watch("a", seen, 60)] == [last]
    assert [record async for record in queue.watch("a", last.revision, 60)] == []


async def test_a_watch_repeats_the_last_answer_when_nothing_happens() -> None:
    queue = JobQueue()
    record = await queue.submit(body("a"))
    watching = queue.watch("a", record.revision, heartbeat_s=0.01)
    assert await anext(watching) == record
    assert await anext(watching) == record


async def test_revisions_grow_over_a_restart() -> None:
    first = await JobQueue().submit(body("a"))
    await asyncio.sleep(0.002)
    assert (await JobQueue().submit(body("a"))).revision > first.revision


async def test_a_caller_that_goes_away_while_it_submits_leaves_a_job_that_runs() -> None:
    queue = JobQueue()
    async with queue._changed:  # whoever is told of changes holds it
        submitting = asyncio.create_task(queue.submit(body("job-1")))
        await asyncio.sleep(0)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
    async with asyncio.timeout(1.0):
        assert (await queue.next_job()).body == body("job-1")


async def test_a_cancelled_job_is_skipped_and_cannot_be_moved() -> None:
    queue = JobQueue()
    await queue.submit(body("a"))
    await queue.submit(body("b"))
    cancelled = await queue.cancel("a")
    assert (cancelled.state, cancelled.reason) == (job_pb2.JOB_STATE_CANCELLED, errors_pb2.REASON_JOB_CANCELLED)
    assert await queue.cancel("a") == cancelled
    assert (await queue.next_job()).body.job_id == "b"
    with pytest.raises(JobCancelled):
        await queue.advance("a", job_pb2.JOB_STATE_RUNNING)


@pytest.mark.parametrize("state", [job_pb2.JOB_STATE_STAGED, job_pb2.JOB_STATE_COMMITTED, job_pb2.JOB_STATE_DROPPED])
async def test_a_job_is_not_cancelled_once_it_is_staged(state: job_pb2.JobState.ValueType) -> None:
    queue = JobQueue()
    await queue.submit(body("a"))
    await queue.advance("a", state)
    with pytest.raises(Conflict) as refused:
        await queue.cancel("a")
    assert refused.value.reason == errors_pb2.REASON_JOB_NOT_CANCELLABLE


async def test_serving_a_version_ends_every_job_committed_up_to_it() -> None:
    queue = JobQueue()
    for number, name in enumerate("abc", start=1):
        await queue.remember_committed(body(name), number, {})
    await queue.mark_served(2)
    states = [queue.get(name).state for name in "abc"]
    assert states == [job_pb2.JOB_STATE_SERVED, job_pb2.JOB_STATE_SERVED, job_pb2.JOB_STATE_COMMITTED]


async def test_a_reason_stands_only_as_long_as_the_state_it_explains() -> None:
    queue = JobQueue()
    await queue.submit(body("a"))
    await queue.advance("a", job_pb2.JOB_STATE_DEFERRED, reason=errors_pb2.REASON_STORAGE_FULL, message="no room")
    staged = await queue.advance("a", job_pb2.JOB_STATE_STAGED)
    assert (staged.reason, staged.message) == (errors_pb2.REASON_UNSPECIFIED, "")


async def test_pages_go_from_the_newest_job_to_the_oldest() -> None:
    queue = JobQueue()
    for name in "abcde":
        await queue.submit(body(name))
    first = queue.newest_first(None, 2)
    rest = queue.newest_first(first[-1].order, 10)
    assert [record.body.job_id for record in [*first, *rest]] == list("edcba")


def test_an_unknown_job_is_not_found() -> None:
    with pytest.raises(NotFound):
        JobQueue().get("a")
