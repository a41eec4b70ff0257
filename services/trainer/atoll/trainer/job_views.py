"""A job's record as watchers see it."""

from collections.abc import Mapping

from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import job_record_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.trainer.job_queue import JobRecord
from atoll.trainer.job_records import RecordedJob

STATE_OF_PHASE = {
    job_record_pb2.JOB_PHASE_RECORDED: job_pb2.JOB_STATE_SUBMITTED,
    job_record_pb2.JOB_PHASE_RUNNING: job_pb2.JOB_STATE_RUNNING,
    job_record_pb2.JOB_PHASE_STAGED: job_pb2.JOB_STATE_STAGED,
    job_record_pb2.JOB_PHASE_COMMITTED: job_pb2.JOB_STATE_COMMITTED,
    job_record_pb2.JOB_PHASE_DROPPED: job_pb2.JOB_STATE_DROPPED,
    job_record_pb2.JOB_PHASE_REFUSED: job_pb2.JOB_STATE_REFUSED,
    job_record_pb2.JOB_PHASE_FAILED: job_pb2.JOB_STATE_FAILED,
    job_record_pb2.JOB_PHASE_CANCELLED: job_pb2.JOB_STATE_CANCELLED,
}


def view_of(recorded: RecordedJob, metrics: Mapping[str, float] | None = None) -> JobRecord:
    """What the registry tells of a job, with the metrics of its version where there is one."""
    state = STATE_OF_PHASE[recorded.phase]
    if recorded.is_open and recorded.reason == errors_pb2.REASON_STORAGE_FULL:
        state = job_pb2.JOB_STATE_DEFERRED
    staged = {} if recorded.staged is None else recorded.staged.metrics
    return JobRecord(
        body=recorded.body,
        order=recorded.order,
        state=state,
        # Of this trainer or another, before or after a restart: it grows.
        revision=int(recorded.updated_at.timestamp() * 1_000),
        created_at=recorded.created_at,
        updated_at=recorded.updated_at,
        reason=recorded.reason,
        message=recorded.message,
        rejected_sample_ids=recorded.rejected_sample_ids,
        attempt=max(1, recorded.attempt),
        version=recorded.version,
        metrics=metrics or metrics_of_end(recorded) or staged,
    )


def metrics_of_end(recorded: RecordedJob) -> Mapping[str, float]:
    """Metrics of a job that made no version."""
    if recorded.phase == job_record_pb2.JOB_PHASE_DROPPED:
        return {"staleness/samples_dropped": float(len(recorded.body.sample_ids))}
    return {}
