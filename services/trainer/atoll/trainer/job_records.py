"""What the registry remembers of jobs: durable, fenced, and the same for every trainer of the scenario."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.registry.v1 import job_record_pb2, job_record_service_pb2, job_record_service_pb2_grpc
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.common import structs
from atoll.common.errors import AtollError, Conflict
from atoll.trainer.calls import answer_of
from atoll.trainer.chain import CALL_SECONDS
from atoll.trainer.job_queue import JobBody
from pydantic import JsonValue

OPEN = frozenset({job_record_pb2.JOB_PHASE_RECORDED, job_record_pb2.JOB_PHASE_RUNNING, job_record_pb2.JOB_PHASE_STAGED})
"""Phases of a job that goes on; a record in any other phase never changes."""

NEVER = datetime.fromtimestamp(0, UTC)
PAGE_OF_OPEN_JOBS = 1_000
MAX_MESSAGE = 10_000
"""Characters of a message that the registry takes; the log has the rest."""


@dataclass(frozen=True)
class StagedVersion:
    """Sealed artifacts and all else that their commit needs.

    Example: StagedVersion(7, "ab...", "cd...", {"train/loss": 0.1}, {"baseline": 0.5})
    """

    parent: int
    model_digest: str
    checkpoint_digest: str
    """Empty for a live version."""
    metrics: Mapping[str, float]
    family_state: Mapping[str, JsonValue]


@dataclass(frozen=True)
class RecordedJob:
    """A job's record. Example: RecordedJob(JobBody("job-1f...", ...), JOB_PHASE_RUNNING, attempt=1, order=3)"""

    body: JobBody
    phase: JobPhase.ValueType
    attempt: int = 0
    """How often its steps were begun. In RUNNING, the attempt that takes them or died in them."""
    staged: StagedVersion | None = None
    """Set in STAGED and in no other phase."""
    reason: Reason.ValueType = errors_pb2.REASON_UNSPECIFIED
    message: str = ""
    rejected_sample_ids: tuple[str, ...] = ()
    version: int | None = None
    order: int = 0
    created_at: datetime = NEVER
    updated_at: datetime = NEVER

    @property
    def is_open(self) -> bool:
        return self.phase in OPEN


@dataclass(frozen=True)
class RecordPage:
    """Records, newest first; `next_token` is empty on the last page."""

    jobs: tuple[RecordedJob, ...]
    next_token: str


class JobRecords:
    """One scenario's records. Every method asks once and raises the registry's AtollError, Unavailable included."""

    def __init__(self, channel: grpc.aio.Channel, scenario: str) -> None:
        self._scenario = scenario
        self._stub = job_record_service_pb2_grpc.JobRecordServiceStub(channel)
        # The lease's holder is the only writer; within it, a cancel and the runner's next write exclude each other.
        self._writing = asyncio.Lock()

    async def get(self, job_id: str) -> RecordedJob | None:
        """None for a job that nobody recorded or committed."""
        request = job_record_service_pb2.GetJobRecordRequest(scenario=self._scenario, job_id=job_id)
        try:
            reply = await answer_of(self._stub.GetJobRecord(request, timeout=CALL_SECONDS))
        except AtollError as error:
            if error.reason == errors_pb2.REASON_JOB_NOT_FOUND:
                return None
            raise
        return recorded_job(reply.record)

    async def open_jobs(self) -> Sequence[RecordedJob]:
        """All jobs that have not ended, in the order in which they run."""
        found: list[RecordedJob] = []
        token = ""
        while True:
            request = job_record_service_pb2.ListJobRecordsRequest(
                scenario=self._scenario, open_only=True, page_size=PAGE_OF_OPEN_JOBS, page_token=token
            )
            reply = await answer_of(self._stub.ListJobRecords(request, timeout=CALL_SECONDS))
            found += map(recorded_job, reply.records)
            token = reply.next_page_token
            if not token:
                return found

    async def page(self, size: int, token: str) -> RecordPage:
        """A page of all jobs. Raises InvalidInput for another service's token."""
        request = job_record_service_pb2.ListJobRecordsRequest(
            scenario=self._scenario, page_size=size, page_token=token
        )
        reply = await answer_of(self._stub.ListJobRecords(request, timeout=CALL_SECONDS))
        return RecordPage(tuple(map(recorded_job, reply.records)), reply.next_page_token)

    async def put(self, job: RecordedJob, token: int) -> RecordedJob:
        """Writes a record under the fencing token; returns it as it stands, unchanged when it has ended meanwhile.

        Raises Conflict (FENCED, JOB_ID_REUSED, NOT_RESTORABLE), NotFound (VERSION_NOT_FOUND, ARTIFACT_NOT_FOUND).
        """
        async with self._writing:
            return await self._put(job, token)

    async def cancel(self, job_id: str, token: int) -> RecordedJob | None:
        """Ends a job that is not staged; None for an unknown one. Cancelling a cancelled one answers it again.

        Raises Conflict (JOB_NOT_CANCELLABLE, FENCED).
        """
        async with self._writing:
            known = await self.get(job_id)
            if known is None or known.phase == job_record_pb2.JOB_PHASE_CANCELLED:
                return known
            if known.phase in (job_record_pb2.JOB_PHASE_RECORDED, job_record_pb2.JOB_PHASE_RUNNING):
                reason, message = errors_pb2.REASON_JOB_CANCELLED, "cancelled by a caller"
                ended = replace(known, phase=job_record_pb2.JOB_PHASE_CANCELLED, reason=reason, message=message)
                # A job that ended since it was read stays as it ended.
                known = await self._put(ended, token)
                if known.phase == job_record_pb2.JOB_PHASE_CANCELLED:
                    return known
        raise Conflict(
            f"job {job_id} is {JobPhase.Name(known.phase).removeprefix('JOB_PHASE_')}; a job can be cancelled until "
            "its weights are staged",
            reason=errors_pb2.REASON_JOB_NOT_CANCELLABLE,
        )

    async def _put(self, job: RecordedJob, token: int) -> RecordedJob:
        request = job_record_service_pb2.PutJobRecordRequest(record=record_message(job), fencing_token=token)
        reply = await answer_of(self._stub.PutJobRecord(request, timeout=CALL_SECONDS))
        return recorded_job(reply.record)


def record_message(job: RecordedJob) -> job_record_pb2.JobRecord:
    """A record as it travels to the registry."""
    body = job.body
    if body.restores is not None:
        kind = job_record_pb2.JobBody(rollback=job_record_pb2.RollbackBody(version=body.restores))
    else:
        options = None if body.options is None else structs.struct_from(body.options, "options")
        training = job_record_pb2.TrainingBody(family=body.family, options=options, sample_ids=body.sample_ids)
        kind = job_record_pb2.JobBody(training=training)
    staged = None
    if job.staged is not None:
        staged = job_record_pb2.StagedVersion(
            parent=job.staged.parent,
            model_digest=job.staged.model_digest,
            checkpoint_digest=job.staged.checkpoint_digest,
            metrics=job.staged.metrics,
            family_state=structs.struct_from(job.staged.family_state, "family_state"),
        )
    return job_record_pb2.JobRecord(
        scenario=body.scenario,
        job_id=body.job_id,
        body=kind,
        phase=job.phase,
        attempt=job.attempt,
        staged=staged,
        reason=job.reason,
        message=job.message.replace("\0", " ")[:MAX_MESSAGE],
        rejected_sample_ids=job.rejected_sample_ids,
    )


def recorded_job(message: job_record_pb2.JobRecord) -> RecordedJob:
    """A record as the registry tells it."""
    training, restores = message.body.training, None
    if message.body.HasField("rollback"):
        restores = message.body.rollback.version
    options = structs.object_of(training.options, "options") if training.HasField("options") else None
    staged = None
    if message.HasField("staged"):
        staged = StagedVersion(
            parent=message.staged.parent,
            model_digest=message.staged.model_digest,
            checkpoint_digest=message.staged.checkpoint_digest,
            metrics=dict(message.staged.metrics),
            family_state=structs.object_of(message.staged.family_state, "family_state"),
        )
    return RecordedJob(
        body=JobBody(message.job_id, message.scenario, training.family, options, tuple(training.sample_ids), restores),
        phase=message.phase,
        attempt=message.attempt,
        staged=staged,
        reason=message.reason,
        message=message.message,
        rejected_sample_ids=tuple(message.rejected_sample_ids),
        version=message.version if message.HasField("version") else None,
        order=message.order,
        created_at=message.create_time.ToDatetime(tzinfo=UTC),
        updated_at=message.update_time.ToDatetime(tzinfo=UTC),
    )
