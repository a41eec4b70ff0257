"""Ends batches: what a job's last word means for its samples, in one transaction."""

from datetime import UTC, datetime

import structlog
from atoll.common.failpoints import reached
from atoll.gateway.database import Database, lock_scenario, microseconds
from atoll.gateway.records import BatchState, JobOutcome, SampleState
from atoll.gateway.tables import batches, reports, sample_claims
from sqlalchemy import delete, select, update

log = structlog.get_logger(__name__)


def settle(database: Database, job_id: str, outcome: JobOutcome) -> bool:
    """Ends an open batch; a batch that has ended stays as it is. Blocks: call it from a worker thread.

    COMMITTED consumes the samples. DROPPED, REFUSED and FAILED settle them with the reason. CANCELLED puts samples
    and reports back, with the next epoch, so that the batch that BatchForming makes of them has another job id: an id
    that ended never runs again. Returns whether this call ended the batch.
    """
    with database.writing() as connection:
        scenario = connection.scalar(select(batches.c.scenario).where(batches.c.job_id == job_id))
        if scenario is None:
            return False
        lock_scenario(connection, scenario)
        ended = connection.execute(
            update(batches)
            .where(batches.c.job_id == job_id, batches.c.state == BatchState.OPEN.value)
            .values(
                state=outcome.state.value,
                code=outcome.code,
                reason=outcome.reason,
                version=outcome.version,
                settled_us=microseconds(datetime.now(UTC)),
            )
        )
        if ended.rowcount == 0:
            return False
        held = sample_claims.c.job_id == job_id
        if outcome.state is BatchState.CANCELLED:
            connection.execute(delete(sample_claims).where(held))
            connection.execute(
                update(reports).where(reports.c.job_id == job_id).values(job_id=None, epoch=reports.c.epoch + 1)
            )
        else:
            committed = outcome.state is BatchState.COMMITTED
            state = SampleState.CONSUMED if committed else SampleState.SETTLED
            connection.execute(
                update(sample_claims).where(held).values(state=state.value, code=outcome.code, reason=outcome.reason)
            )
    reached("gateway.settled")
    log.info("batch ended", job=job_id, scenario=scenario, state=outcome.state.value, reason=outcome.reason)
    return True
