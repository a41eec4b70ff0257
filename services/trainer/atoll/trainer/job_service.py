"""The trainer's gRPC edge: messages in and out, and nothing decided that `jobs` does not know."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common import structs
from atoll.common.errors import InvalidInput
from atoll.common.names import check_id, job_name
from atoll.common.pages import page_size
from atoll.trainer.job_families import JobFamilies, not_trained_here
from atoll.trainer.job_queue import JobBody, JobQueue, JobRecord
from atoll.trainer.jobs import Jobs
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.loading import WorkerModel

SERVICE_NAME = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
HEARTBEAT_SECONDS = 10.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class TrainerFacts:
    """What GetTrainer tells. Example: TrainerFacts("chat", "grpo", "megatron", "tp2 dp1 cpu", ("http://...",))."""

    scenario: str
    family: str
    backend: str
    layout: str
    engines: tuple[str, ...]


class JobService(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Implements atoll.api.trainer.v1.TrainerService."""

    def __init__(
        self,
        queue: JobQueue,
        jobs: Jobs,
        lease: LeaseKeeper,
        families: JobFamilies,
        model: WorkerModel,
        facts: TrainerFacts,
    ) -> None:
        self._queue = queue
        self._jobs = jobs
        self._lease = lease
        self._families = families
        self._model = model
        self._facts = facts

    async def SubmitJob(
        self, request: trainer_service_pb2.SubmitJobRequest, context: Context
    ) -> trainer_service_pb2.SubmitJobResponse:
        record = await self._submit(body_of(request))
        return trainer_service_pb2.SubmitJobResponse(job=job_message(record))

    async def SubmitRollback(
        self, request: trainer_service_pb2.SubmitRollbackRequest, context: Context
    ) -> trainer_service_pb2.SubmitRollbackResponse:
        record = await self._submit(rollback_of(request))
        return trainer_service_pb2.SubmitRollbackResponse(job=job_message(record))

    async def GetJob(
        self, request: trainer_service_pb2.GetJobRequest, context: Context
    ) -> trainer_service_pb2.GetJobResponse:
        record = await self._jobs.get(check_id(request.job_id, "job_id"))
        return trainer_service_pb2.GetJobResponse(job=job_message(record))

    async def ListJobs(
        self, request: trainer_service_pb2.ListJobsRequest, context: Context
    ) -> trainer_service_pb2.ListJobsResponse:
        page = await self._jobs.page(page_size(request.page_size), request.page_token)
        jobs = [job_message(record) for record in page.jobs]
        return trainer_service_pb2.ListJobsResponse(jobs=jobs, next_page_token=page.next_token)

    async def WatchJob(
        self, request: trainer_service_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[trainer_service_pb2.WatchJobResponse]:
        # Only the holder of the lease learns of every change.
        self._lease.refuse_unless_held()
        await self._jobs.get(check_id(request.job_id, "job_id"))
        async for record in self._queue.watch(request.job_id, request.from_revision, HEARTBEAT_SECONDS):
            if not record.final:
                self._lease.refuse_unless_held()
            yield trainer_service_pb2.WatchJobResponse(job=job_message(record))

    async def CancelJob(
        self, request: trainer_service_pb2.CancelJobRequest, context: Context
    ) -> trainer_service_pb2.CancelJobResponse:
        record = await self._jobs.cancel(check_id(request.job_id, "job_id"))
        return trainer_service_pb2.CancelJobResponse(job=job_message(record))

    async def GetTrainer(
        self, request: trainer_service_pb2.GetTrainerRequest, context: Context
    ) -> trainer_service_pb2.GetTrainerResponse:
        facts = self._facts
        return trainer_service_pb2.GetTrainerResponse(
            scenario=facts.scenario,
            family=facts.family,
            backend=facts.backend,
            layout=facts.layout,
            engines=facts.engines,
            loaded_version=self._model.loaded_number or 0,
            lease_holder=self._lease.held(),
            holder_address=self._lease.holder_address,
        )

    async def _submit(self, body: JobBody) -> JobRecord:
        """The job as it stands; a new one is queued."""

        async def refuse() -> None:
            if body.scenario != self._facts.scenario:
                raise not_trained_here("scenario", repr(body.scenario), repr(self._facts.scenario))
            if body.restores is None:
                await self._families.find(body.family, body.options, self._model.families)

        return await self._jobs.submit(body, refuse)


def body_of(request: trainer_service_pb2.SubmitJobRequest) -> JobBody:
    """Reads a submission. Raises InvalidInput naming the field."""
    check_id(request.job_id, "job_id")
    check_id(request.scenario, "scenario")
    if not request.sample_ids:
        raise InvalidInput("sample_ids is empty, expected the samples of the batch", field="sample_ids")
    seen: set[str] = set()
    for index, sample_id in enumerate(request.sample_ids):
        check_id(sample_id, f"sample_ids[{index}]")
        if sample_id in seen:
            raise InvalidInput(f"sample_ids[{index}] is {sample_id!r} a second time", field=f"sample_ids[{index}]")
        seen.add(sample_id)
    options = structs.object_of(request.options, "options")
    return JobBody(request.job_id, request.scenario, request.family, options, tuple(request.sample_ids))


def rollback_of(request: trainer_service_pb2.SubmitRollbackRequest) -> JobBody:
    """Reads a rollback. Raises InvalidInput naming the field."""
    check_id(request.job_id, "job_id")
    check_id(request.scenario, "scenario")
    if request.version < 0:
        raise InvalidInput(f"version is {request.version}, expected the number of a version", field="version")
    return JobBody.rollback(request.job_id, request.scenario, request.version)


def job_message(record: JobRecord) -> job_pb2.Job:
    """A record as it travels."""
    return job_pb2.Job(
        name=job_name(record.body.scenario, record.body.job_id),
        job_id=record.body.job_id,
        scenario=record.body.scenario,
        family=record.body.family,
        state=record.state,
        reason=record.reason,
        message=record.message,
        sample_ids=record.body.sample_ids,
        rejected_sample_ids=record.rejected_sample_ids,
        attempt=record.attempt,
        version=record.version,
        metrics=record.metrics,
        create_time=structs.timestamp_from(record.created_at),
        update_time=structs.timestamp_from(record.updated_at),
        revision=record.revision,
        restores=record.body.restores,
    )
