"""The trainer's gRPC edge: messages in and out, and nothing decided that `job_queue` does not know."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common import structs
from atoll.common.errors import Conflict, InvalidInput
from atoll.common.names import check_id, job_name
from atoll.common.pages import decode_number_token, encode_page_token, page_size
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.job_families import JobFamilies, not_trained_here
from atoll.trainer.job_queue import JobBody, JobQueue, JobRecord
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
        chain: Chain,
        families: JobFamilies,
        model: WorkerModel,
        facts: TrainerFacts,
        on_remembered: Callable[[], None],
    ) -> None:
        """on_remembered: called when a job of an earlier process was taken in, whose version may be served already."""
        self._queue = queue
        self._chain = chain
        self._families = families
        self._model = model
        self._facts = facts
        self._on_remembered = on_remembered

    async def SubmitJob(
        self, request: trainer_service_pb2.SubmitJobRequest, context: Context
    ) -> trainer_service_pb2.SubmitJobResponse:
        record = await self._submit(body_of(request))
        return trainer_service_pb2.SubmitJobResponse(job=job_message(record))

    async def GetJob(
        self, request: trainer_service_pb2.GetJobRequest, context: Context
    ) -> trainer_service_pb2.GetJobResponse:
        record = await self._known(request.job_id)
        return trainer_service_pb2.GetJobResponse(job=job_message(record))

    async def ListJobs(
        self, request: trainer_service_pb2.ListJobsRequest, context: Context
    ) -> trainer_service_pb2.ListJobsResponse:
        size = page_size(request.page_size)
        records = self._queue.newest_first(decode_number_token(request.page_token), size + 1)
        more = len(records) > size
        token = encode_page_token(str(records[size - 1].order)) if more else ""
        jobs = [job_message(record) for record in records[:size]]
        return trainer_service_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    async def WatchJob(
        self, request: trainer_service_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[trainer_service_pb2.WatchJobResponse]:
        await self._known(request.job_id)
        async for record in self._queue.watch(request.job_id, request.from_revision, HEARTBEAT_SECONDS):
            yield trainer_service_pb2.WatchJobResponse(job=job_message(record))

    async def CancelJob(
        self, request: trainer_service_pb2.CancelJobRequest, context: Context
    ) -> trainer_service_pb2.CancelJobResponse:
        await self._known(request.job_id)
        record = await self._queue.cancel(request.job_id)
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
        )

    async def _submit(self, body: JobBody) -> JobRecord:
        """The job as it stands; a new one is queued."""
        known = self._queue.find(body.job_id)
        if known is None:
            committed = await self._chain.version_of_job(body.job_id)
            # Another call may have queued it while the registry was asked.
            known = self._queue.find(body.job_id)
            if known is None and committed is not None:
                known = await self._remember(committed)
        if known is not None:
            refuse_other_body(known.body, body)
            return known
        if body.scenario != self._facts.scenario:
            raise not_trained_here("scenario", repr(body.scenario), repr(self._facts.scenario))
        self._families.of(body.family, body.options or {}, self._model.families)
        return await self._queue.submit(body)

    async def _known(self, job_id: str) -> JobRecord:
        """A job of this process, or one that the chain has. Raises NotFound (JOB_NOT_FOUND)."""
        check_id(job_id, "job_id")
        known = self._queue.find(job_id)
        if known is not None:
            return known
        committed = await self._chain.version_of_job(job_id)
        if committed is None or self._queue.find(job_id) is not None:
            return self._queue.get(job_id)
        return await self._remember(committed)

    async def _remember(self, committed: ChainVersion) -> JobRecord:
        body = JobBody(committed.job_id, self._facts.scenario, committed.family, None, committed.consumed_sample_ids)
        record = await self._queue.remember_committed(body, committed.number, committed.metrics)
        self._on_remembered()
        return record


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


def refuse_other_body(known: JobBody, given: JobBody) -> None:
    """Raises Conflict (JOB_ID_REUSED) naming the field that differs."""
    for field, before, now in (
        ("scenario", known.scenario, given.scenario),
        ("family", known.family, given.family),
        ("options", known.options, given.options),
        ("sample_ids", known.sample_ids, given.sample_ids),
    ):
        if before is not None and before != now:
            raise Conflict(
                f"job {given.job_id} was submitted with another {field}; give a new batch a new job_id",
                reason=errors_pb2.REASON_JOB_ID_REUSED,
                field=field,
            )


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
    )
