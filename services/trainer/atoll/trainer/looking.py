"""What the registry says of a job and of the chain, and what may be written after having looked."""

import asyncio
from dataclasses import dataclass, replace

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.registry.v1 import job_record_pb2
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.common.errors import AtollError
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.job_queue import JobBody
from atoll.trainer.job_records import JobRecords, RecordedJob, StagedVersion
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.progress import JobEnded, LookAgain
from atoll.trainer.retries import Patience

log = structlog.get_logger(__name__)


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
        """The job as it stands; one that the registry does not know is recorded. Raises nothing."""
        while True:
            try:
                return await self._look(body)
            except AtollError as error:
                # No fault of the job's: it neither ends by it, nor is it asked about without a pause.
                log.error("the registry does not tell how the job stands, asking again", error=error.message)
                await asyncio.sleep(self._patience.max_s)

    async def _look(self, body: JobBody) -> Look:
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

    async def put_waiting(self, look: Look, reason: Reason.ValueType, message: str) -> None:
        """Tells why the job waits, unless the registry's own disk is full too. Raises LookAgain, Conflict (FENCED)."""
        try:
            await self.put(look, replace(look.record, reason=reason, message=message))
        except AtollError as error:
            if error.reason != errors_pb2.REASON_STORAGE_FULL:
                raise
            log.warning("why the job waits is not recorded", error=error.message)

    async def put_end(self, look: Look, end: JobEnded) -> None:
        """Records how the job ends without a version. Raises LookAgain, Conflict (FENCED)."""
        record = moved(look.record, end.phase, attempt=look.record.attempt)
        await self.put(
            look, replace(record, reason=end.reason, message=end.message, rejected_sample_ids=end.sample_ids)
        )

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
