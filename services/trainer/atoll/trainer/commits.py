"""The commit point, for each kind of version: trained, rolled back to, recovered."""

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import version_pb2
from atoll.common.errors import AtollError, BadConfiguration, Conflict
from atoll.common.failpoints import reached
from atoll.trainer.chain import Chain, ChainVersion, NewVersion
from atoll.trainer.job_queue import JobBody
from atoll.trainer.job_records import RecordedJob
from atoll.trainer.loading import intact_directory
from atoll.trainer.progress import LookAgain
from atoll.trainer.recovery import recovery, rollback
from atoll.trainer.retries import Patience

log = structlog.get_logger(__name__)

ASK_AGAIN = frozenset({errors_pb2.REASON_PARENT_NOT_HEAD, errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY})
"""Refusals of a commit after which the registry is asked what happened."""


class Committer:
    """Commits under a fencing token. Every method may raise LookAgain, Conflict (FENCED) and the commit's refusals."""

    def __init__(self, chain: Chain, patience: Patience) -> None:
        self._chain = chain
        self._patience = patience

    async def commit_staged(self, record: RecordedJob, token: int) -> bool:
        """Commits what the record holds ready, whoever staged it. False when its bytes are not there any more."""
        staged = record.staged
        assert staged is not None, "decided to commit a job that is not staged"
        new = NewVersion(
            job_id=record.body.job_id,
            expected_parent=staged.parent,
            operation=version_pb2.OPERATION_TRAINING,
            family=record.body.family,
            model_digest=staged.model_digest,
            checkpoint_digest=staged.checkpoint_digest,
            consumed_sample_ids=record.body.sample_ids,
            metrics=staged.metrics,
            family_state=staged.family_state,
        )
        try:
            await self._commit(new, token)
        except AtollError as error:
            if error.reason == errors_pb2.REASON_ARTIFACT_NOT_FOUND:
                log.warning("what was staged is gone", error=error.message)
                return False
            raise
        reached("trainer.committed")
        return True

    async def roll_back(self, body: JobBody, head: ChainVersion, token: int) -> None:
        """Commits the version that a rollback asks for. Raises Conflict (NOT_RESTORABLE) when its files are damaged."""
        number = body.restores
        assert number is not None, "decided to roll back a job that trains"
        target = await self._patience.ask("version to restore", lambda: self._chain.version(number))
        for digest in filter(None, (target.model_digest, target.checkpoint_digest)):
            # A head that nobody can load would stand until the publish time-out.
            try:
                await intact_directory(self._chain, self._patience, digest)
            except BadConfiguration as damage:
                raise Conflict(
                    f"version {number} cannot be brought back: {damage.message}, or name another version",
                    reason=errors_pb2.REASON_NOT_RESTORABLE,
                    field="version",
                ) from damage
        version = await self._commit(rollback(body.job_id, target, head), token)
        reached("trainer.rolled_back")
        log.info("rolled back", version=version.number, restores=number)

    async def recover(self, head: ChainVersion, token: int) -> ChainVersion:
        """Commits a version that goes on from a live head whose memory is gone; `recovery` says from what."""
        new = await self._patience.ask("what to recover", lambda: recovery(self._chain, head))
        version = await self._commit(new, token)
        reached("trainer.recovered")
        kept = new.model_digest == head.model_digest
        log.warning("recovered", version=version.number, head=head.number, restores=new.restores, kept_weights=kept)
        return version

    async def _commit(self, new: NewVersion, token: int) -> ChainVersion:
        try:
            return await self._patience.ask("commit", lambda: self._chain.commit(new, token))
        except AtollError as error:
            if error.reason in ASK_AGAIN:
                log.warning("commit refused", error=error.message)
                raise LookAgain from error
            raise
