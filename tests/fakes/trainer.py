"""A trainer that ends jobs as a test says, behind real gRPC."""

import asyncio
from collections.abc import AsyncIterator

from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common.errors import AtollError, Conflict, NotFound, Unavailable
from atoll.common.server import Context, GrpcServer

SERVICES = ("atoll.api.trainer.v1.TrainerService",)


class FakeTrainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Jobs wait as SUBMITTED until `move` says otherwise, or end at once as `ending` says.

    `submitted` lists the job ids of all SubmitJob calls, repeats included; `refusals` are raised by the calls to come.
    """

    def __init__(self, ending: job_pb2.JobState.ValueType | None = None, scenario: str = "math") -> None:
        self.ending = ending
        self.scenario = scenario
        self.holder = True
        """Whether it has the lease; without it jobs are refused."""
        self.submitted: list[str] = []
        self.requests: dict[str, trainer_service_pb2.SubmitJobRequest] = {}
        self.jobs: dict[str, job_pb2.Job] = {}
        self.refusals: list[AtollError] = []
        self.version = 0
        self.heartbeat_s = 10.0
        self._changed = asyncio.Event()

    def move(self, job_id: str, state: job_pb2.JobState.ValueType, message: str = "") -> None:
        """Puts a job into a state; COMMITTED takes the next version number."""
        job = self.jobs[job_id]
        job.state, job.message, job.revision = state, message, job.revision + 1
        if state == job_pb2.JOB_STATE_COMMITTED:
            self.version += 1
            job.version = self.version
        if state == job_pb2.JOB_STATE_DROPPED:
            job.reason = errors_pb2.REASON_STALE_SAMPLE
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, count: int) -> None:
        """Returns when `count` different jobs were submitted."""
        while len(self.jobs) < count:
            await asyncio.sleep(0.005)

    async def SubmitJob(
        self, request: trainer_service_pb2.SubmitJobRequest, context: Context
    ) -> trainer_service_pb2.SubmitJobResponse:
        self.submitted.append(request.job_id)
        self._check_holder()
        if self.refusals:
            raise self.refusals.pop(0)
        if request.job_id not in self.jobs:
            self.requests[request.job_id] = request
            self.jobs[request.job_id] = job_pb2.Job(
                job_id=request.job_id,
                scenario=request.scenario,
                state=job_pb2.JOB_STATE_SUBMITTED,
                sample_ids=request.sample_ids,
                revision=1,
            )
            if self.ending is not None:
                self.move(request.job_id, self.ending)
        return trainer_service_pb2.SubmitJobResponse(job=self.jobs[request.job_id])

    async def WatchJob(
        self, request: trainer_service_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[trainer_service_pb2.WatchJobResponse]:
        sent = -1
        while True:
            changed = self._changed
            job = self.jobs.get(request.job_id)
            if job is None:
                raise NotFound(f"no job {request.job_id}", reason=errors_pb2.REASON_JOB_NOT_FOUND)
            if job.revision > sent:
                sent = job.revision
                yield trainer_service_pb2.WatchJobResponse(job=job)
            try:
                async with asyncio.timeout(self.heartbeat_s):
                    await changed.wait()
            except TimeoutError:
                yield trainer_service_pb2.WatchJobResponse(job=job)

    def _check_holder(self) -> None:
        if not self.holder:
            raise Unavailable("the lease is held at 10.0.0.9:7200", reason=errors_pb2.REASON_NOT_LEASE_HOLDER)

    async def SubmitRollback(
        self, request: trainer_service_pb2.SubmitRollbackRequest, context: Context
    ) -> trainer_service_pb2.SubmitRollbackResponse:
        self._check_holder()
        if self.refusals:
            raise self.refusals.pop(0)
        job = self.jobs.setdefault(
            request.job_id,
            job_pb2.Job(
                job_id=request.job_id,
                scenario=request.scenario,
                state=job_pb2.JOB_STATE_SUBMITTED,
                restores=request.version,
                revision=1,
            ),
        )
        if job.restores != request.version:
            raise Conflict(f"{request.job_id} restores {job.restores}", reason=errors_pb2.REASON_JOB_ID_REUSED)
        return trainer_service_pb2.SubmitRollbackResponse(job=job)

    async def GetJob(
        self, request: trainer_service_pb2.GetJobRequest, context: Context
    ) -> trainer_service_pb2.GetJobResponse:
        if request.job_id not in self.jobs:
            raise NotFound(f"no job {request.job_id}", reason=errors_pb2.REASON_JOB_NOT_FOUND)
        return trainer_service_pb2.GetJobResponse(job=self.jobs[request.job_id])

    async def ListJobs(
        self, request: trainer_service_pb2.ListJobsRequest, context: Context
    ) -> trainer_service_pb2.ListJobsResponse:
        """Newest first, in pages; the token is how many came before."""
        newest = list(reversed(self.jobs.values()))
        start = int(request.page_token or 0)
        end = start + (request.page_size or 100)
        more = str(end) if end < len(newest) else ""
        return trainer_service_pb2.ListJobsResponse(jobs=newest[start:end], next_page_token=more)

    async def CancelJob(
        self, request: trainer_service_pb2.CancelJobRequest, context: Context
    ) -> trainer_service_pb2.CancelJobResponse:
        self._check_holder()
        job = (await self.GetJob(trainer_service_pb2.GetJobRequest(job_id=request.job_id), context)).job
        if job.state == job_pb2.JOB_STATE_STAGED:
            raise Conflict(f"{request.job_id} is STAGED", reason=errors_pb2.REASON_JOB_NOT_CANCELLABLE)
        self.move(request.job_id, job_pb2.JOB_STATE_CANCELLED)
        return trainer_service_pb2.CancelJobResponse(job=self.jobs[request.job_id])

    async def GetTrainer(
        self, request: trainer_service_pb2.GetTrainerRequest, context: Context
    ) -> trainer_service_pb2.GetTrainerResponse:
        return trainer_service_pb2.GetTrainerResponse(scenario=self.scenario, lease_holder=self.holder)


async def serve_trainer(trainer: FakeTrainer, port: int = 0) -> GrpcServer:
    """Starts it; `server.port` tells where. The caller stops it."""
    server = GrpcServer("127.0.0.1", port, None)
    trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server.grpc)
    await server.start(SERVICES)
    return server
