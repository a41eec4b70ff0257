"""Takes one training job to its end: submit, watch, and say what the trainer said."""

import asyncio
from collections.abc import Callable

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common.errors import REASON_PREFIX, AtollError, InvalidInput, Unavailable
from atoll.common.failpoints import reached
from atoll.common.rpc_errors import from_rpc_error
from atoll.common.structs import struct_from
from atoll.gateway.records import Batch, BatchState, JobOutcome, Settlement
from atoll.gateway.trainers import Stub, Trainers

SUBMIT_SECONDS = 30.0
SILENCE_SECONDS = 30.0
"""A watch that is silent for three heartbeats is taken for broken: submitting again is harmless."""
STANDSTILL_SECONDS = 15.0
"""A job that has not changed for so long may stand still because its trainer lost the lease: submitting it again, which
is harmless, finds the one that has it."""

_ENDED = {
    job_pb2.JOB_STATE_COMMITTED: BatchState.COMMITTED,
    job_pb2.JOB_STATE_SERVED: BatchState.COMMITTED,
    job_pb2.JOB_STATE_DROPPED: BatchState.DROPPED,
    job_pb2.JOB_STATE_REFUSED: BatchState.REFUSED,
    job_pb2.JOB_STATE_FAILED: BatchState.FAILED,
    job_pb2.JOB_STATE_CANCELLED: BatchState.CANCELLED,
}
"""States after which the batch is settled. COMMITTED is the commit point: publishing never undoes it."""


_USUALLY = {
    BatchState.DROPPED: errors_pb2.REASON_STALE_SAMPLE,
    BatchState.REFUSED: errors_pb2.REASON_BATCH_REFUSED,
    BatchState.FAILED: errors_pb2.REASON_TRAINING_CRASHED,
    BatchState.CANCELLED: errors_pb2.REASON_JOB_CANCELLED,
}
"""What a job ended for when it does not say: every settled sample has a reason."""


class TrainerClient:
    """Example: TrainerClient(Trainers(["127.0.0.1:7200"], token))"""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers

    async def run(self, batch: Batch, on_change: Callable[[job_pb2.Job], None]) -> JobOutcome:
        """Returns how the job ended. Repeatable at any time: the job id names the batch.

        on_change: told the job after every change. Raises Unavailable or another AtollError when no trainer answers, or
        one forgot the job; then run it again. A job that the trainer refuses to queue is REFUSED.
        """
        request = trainer_service_pb2.SubmitJobRequest(
            job_id=batch.job_id,
            scenario=batch.scenario,
            family=batch.family,
            options=struct_from(batch.options),
            sample_ids=[row.receipt for row in batch.rows],
        )

        async def submit(trainer: Stub) -> tuple[Stub, job_pb2.Job]:
            return trainer, (await trainer.SubmitJob(request, timeout=SUBMIT_SECONDS)).job

        try:
            while True:
                trainer, job = await self._trainers.ask(batch.scenario, submit)
                reached("gateway.submitted")
                on_change(job)
                if job.state in _ENDED:
                    return outcome_of(job)
                ended = await self._watch(trainer, batch.job_id, on_change)
                if ended is not None:
                    return outcome_of(ended)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except AtollError as refusal:
            permanent = isinstance(refusal, InvalidInput) or refusal.reason == errors_pb2.REASON_JOB_ID_REUSED
            if not permanent:
                raise
            return JobOutcome(BatchState.REFUSED, Settlement(refusal.code, refusal.message))

    async def _watch(self, trainer: Stub, job_id: str, on_change: Callable[[job_pb2.Job], None]) -> job_pb2.Job | None:
        """The job in one of its ending states; None when it is time to ask who holds the lease now."""
        watch = trainer.WatchJob(trainer_service_pb2.WatchJobRequest(job_id=job_id))
        revision, changed = -1, asyncio.get_running_loop().time()
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    answer = await watch.read()
                if not isinstance(answer, trainer_service_pb2.WatchJobResponse):
                    raise Unavailable(f"the trainer ended the watch of {job_id} before the job was final")
                on_change(answer.job)
                if answer.job.state in _ENDED:
                    return answer.job
                now = asyncio.get_running_loop().time()
                if answer.job.revision != revision:
                    revision, changed = answer.job.revision, now
                elif self._trainers.several and now - changed > STANDSTILL_SECONDS:
                    return None
        except TimeoutError:
            raise Unavailable(f"the trainer said nothing about {job_id} for {SILENCE_SECONDS:.0f} s") from None
        finally:
            watch.cancel()


def outcome_of(job: job_pb2.Job) -> JobOutcome:
    """What a job in one of its ending states means. A job that made a version needs no reason."""
    state = _ENDED[job.state]
    if state is BatchState.COMMITTED:
        return JobOutcome(state, version=job.version if job.HasField("version") else None)
    code = errors_pb2.Reason.Name(job.reason or _USUALLY[state]).removeprefix(REASON_PREFIX).lower()
    rejected = f" (samples {', '.join(job.rejected_sample_ids)})" if job.rejected_sample_ids else ""
    return JobOutcome(state, Settlement(code, f"{job.message}{rejected}"))


def state_word(job: job_pb2.Job) -> str:
    """Example: "running"."""
    return job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
