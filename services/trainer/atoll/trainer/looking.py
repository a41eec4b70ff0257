"""What the registry says of a job and of the chain, and what may be written after having looked."""

from dataclasses import dataclass, replace

from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import job_record_pb2
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.common.errors import AtollError
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.job_queue import JobBody
from atoll.trainer.job_records import JobRecords, RecordedJob, StagedVersion
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.progress import LookAgain
from atoll.trainer.retries import Patience


@dataclass(frozen=True)
class Look:
    """What the registry said, and the token under which it may be acted upon."""

    token: int
    head: ChainVersion
    record: RecordedJob


class JobLooks:
    """Looks under the lease, and writes under the token of a look. Waits for both as long as it takes."""

    def __init__(self, records: JobRecords, chain: Chain, lease: LeaseKeeper, patience: Patience) -> None:
        self._records = records
        self._chain = chain
        self._lease = lease
        self._patience = patience

    async def look(self, body: JobBody) -> Look:
        """The job as it stands; one that the registry does not know is recorded."""
        token = await self._lease.token()
        # The head first: one that holds this job's samples is then never looked at as if the job were not committed.
        head = await self._patience.ask("head", self._chain.head)
        record = await self._patience.ask("job's record", lambda: self._records.get(body.job_id))
        if record is None:
            record = await self._put(RecordedJob(body, job_record_pb2.JOB_PHASE_RECORDED), token)
        return Look(token, head, record)

    async def put(self, look: Look, record: RecordedJob) -> None:
        """Writes the record. Raises LookAgain when it has ended meanwhile, Conflict (FENCED)."""
        written = await self._put(record, look.token)
        if written.phase != record.phase:
            raise LookAgain

    async def _put(self, record: RecordedJob, token: int) -> RecordedJob:
        try:
            return await self._patience.ask("job's record", lambda: self._records.put(record, token))
        except AtollError as error:
            if error.reason == errors_pb2.REASON_FENCED:
                self._lease.doubt(token)
            raise


def moved(
    record: RecordedJob, phase: JobPhase.ValueType, *, attempt: int, staged: StagedVersion | None = None
) -> RecordedJob:
    """The record in another phase, without what explained the one before."""
    unexplained = errors_pb2.REASON_UNSPECIFIED
    return replace(record, phase=phase, attempt=attempt, staged=staged, reason=unexplained, message="")
