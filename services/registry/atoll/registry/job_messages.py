"""Job records as protobuf messages, both ways."""

from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.registry.v1 import job_record_pb2 as pb
from atoll.common.errors import InvalidInput
from atoll.common.structs import object_of, struct_from, timestamp_from
from atoll.registry.job_types import (
    JobBody,
    JobPhase,
    JobProgress,
    JobRecord,
    RollbackBody,
    StagedVersion,
    TrainingBody,
)

PHASE_TO_PROTO: dict[JobPhase, pb.JobPhase.ValueType] = {
    JobPhase.RECORDED: pb.JOB_PHASE_RECORDED,
    JobPhase.RUNNING: pb.JOB_PHASE_RUNNING,
    JobPhase.STAGED: pb.JOB_PHASE_STAGED,
    JobPhase.COMMITTED: pb.JOB_PHASE_COMMITTED,
    JobPhase.DROPPED: pb.JOB_PHASE_DROPPED,
    JobPhase.REFUSED: pb.JOB_PHASE_REFUSED,
    JobPhase.FAILED: pb.JOB_PHASE_FAILED,
    JobPhase.CANCELLED: pb.JOB_PHASE_CANCELLED,
}
PHASE_FROM_PROTO = {value: phase for phase, value in PHASE_TO_PROTO.items()}


def body_of(record: pb.JobRecord) -> JobBody:
    """Raises InvalidInput when the record says nothing about what to do."""
    kind = record.body.WhichOneof("kind")
    if kind == "training":
        training = record.body.training
        options = object_of(training.options, "record.body.training.options")
        return TrainingBody(training.family, options, tuple(training.sample_ids))
    if kind == "rollback":
        return RollbackBody(record.body.rollback.version)
    raise InvalidInput("record.body is unset, expected training or rollback", field="record.body")


def progress_of(record: pb.JobRecord) -> JobProgress:
    """What may change of a record. Raises InvalidInput for a phase or a reason that this release does not know."""
    phase = PHASE_FROM_PROTO.get(record.phase)
    if phase is None:
        raise InvalidInput(f"record.phase is {record.phase}, expected a JobPhase", field="record.phase")
    if record.reason not in Reason.values():
        raise InvalidInput(f"record.reason is {record.reason}, which this release does not know", field="record.reason")
    staged = None
    if record.HasField("staged"):
        staged = StagedVersion(
            parent=record.staged.parent,
            model_digest=record.staged.model_digest,
            checkpoint_digest=record.staged.checkpoint_digest or None,
            metrics=dict(record.staged.metrics),
            family_state=object_of(record.staged.family_state, "record.staged.family_state"),
        )
    return JobProgress(
        phase=phase,
        attempt=record.attempt,
        staged=staged,
        reason=record.reason,
        message=record.message,
        rejected_sample_ids=tuple(record.rejected_sample_ids),
    )


def record_message(record: JobRecord) -> pb.JobRecord:
    progress = record.progress
    return pb.JobRecord(
        scenario=record.scenario,
        job_id=record.job_id,
        body=_body_message(record.body),
        phase=PHASE_TO_PROTO[progress.phase],
        attempt=progress.attempt,
        staged=None if progress.staged is None else _staged_message(progress.staged),
        reason=progress.reason,
        message=progress.message,
        rejected_sample_ids=progress.rejected_sample_ids,
        version=record.version,
        fencing_token=record.fencing_token,
        create_time=timestamp_from(record.created_at),
        update_time=timestamp_from(record.updated_at),
        order=record.position,
    )


def _body_message(body: JobBody) -> pb.JobBody:
    if isinstance(body, RollbackBody):
        return pb.JobBody(rollback=pb.RollbackBody(version=body.version))
    options = None if body.options is None else struct_from(body.options)
    return pb.JobBody(training=pb.TrainingBody(family=body.family, options=options, sample_ids=body.sample_ids))


def _staged_message(staged: StagedVersion) -> pb.StagedVersion:
    return pb.StagedVersion(
        parent=staged.parent,
        model_digest=staged.model_digest,
        checkpoint_digest=staged.checkpoint_digest or "",
        metrics=staged.metrics,
        family_state=struct_from(staged.family_state),
    )
