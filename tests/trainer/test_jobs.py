"""Jobs over several holders of the lease: what one of them learns of what another one did."""

from dataclasses import replace
from datetime import UTC, datetime
from unittest import mock

from atoll.api.registry.v1 import job_record_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import Unavailable
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.job_queue import JobBody, JobQueue
from atoll.trainer.job_records import JobRecords, RecordedJob
from atoll.trainer.job_views import view_of
from atoll.trainer.jobs import Jobs
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.retries import Patience

RECORDED = RecordedJob(
    JobBody("job-0", "chat", "grpo", {}, ("a",)),
    job_record_pb2.JOB_PHASE_RECORDED,
    order=1,
    updated_at=datetime.now(UTC),
)


async def test_a_registry_that_goes_away_while_a_new_holder_looks_around_is_waited_for() -> None:
    queue = JobQueue()
    await queue.take_in(view_of(RECORDED))
    away = Unavailable("the registry restarts")
    committed = replace(RECORDED, phase=job_record_pb2.JOB_PHASE_COMMITTED, version=1)
    made = ChainVersion(1, 0, WeightVersion(1, 1), "job-0", metrics={"train/loss": 0.5})
    records, chain = mock.AsyncMock(spec=JobRecords), mock.AsyncMock(spec=Chain)
    records.open_jobs.side_effect = [away, ()]
    records.get.side_effect = [away, committed]
    chain.version_of_job.side_effect = [away, made]
    jobs = Jobs(queue, records, chain, mock.Mock(spec=LeaseKeeper), Patience(0.001, 0.002), lambda: None)
    await jobs.take_up()
    ended = queue.get("job-0")
    assert (ended.state, ended.version, ended.metrics) == (job_pb2.JOB_STATE_COMMITTED, 1, {"train/loss": 0.5})
