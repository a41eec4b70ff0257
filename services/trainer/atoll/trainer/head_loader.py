"""Brings the head into the workers' memory, as often as it takes: one that does not load is no job's fault."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration, InvalidInput
from atoll.trainer.backend import BackendCrashed
from atoll.trainer.calls import NOT_LET_IN, not_let_in
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.commits import Committer
from atoll.trainer.decision import Action, to_hold
from atoll.trainer.job_records import JobRecords
from atoll.trainer.lease import LeaseKeeper
from atoll.trainer.loading import WorkerModel
from atoll.trainer.progress import LookAgain
from atoll.trainer.retries import Patience

log = structlog.get_logger(__name__)

TAKE_OVER_TRIES = 3
"""Workers may be killed while they load; a head that they never survive is somebody's to look at."""


class HeadLoader:
    """on_trainable: told whether the workers can be trained; on_commit: of a recovery's version."""

    def __init__(
        self,
        model: WorkerModel,
        chain: Chain,
        records: JobRecords,
        committer: Committer,
        lease: LeaseKeeper,
        patience: Patience,
        on_trainable: Callable[[bool], Awaitable[None]],
        on_commit: Callable[[ChainVersion], None],
    ) -> None:
        self._model = model
        self._chain = chain
        self._records = records
        self._committer = committer
        self._lease = lease
        self._patience = patience
        self._on_trainable = on_trainable
        self._on_commit = on_commit
        self._failed_loads = 0

    async def take_over(self) -> None:
        """Waits for the lease, then loads the head, after a recovery where it was live and nothing staged goes on from
        it, or where its bytes are gone.

        Raises BadConfiguration when that cannot be done: the process has never worked, somebody must look at it. An
        error of the registry's own is waited out.
        """
        crashes = 0
        while True:
            token = await self._lease.token()
            try:
                head = await self._patience.ask("head", self._chain.head)
                if to_hold(head) is Action.RECOVER:
                    if not await self._commit_staged_upon(head, token):
                        self._on_commit(await self._committer.recover(head, token))
                    continue
                if not await self._loaded(head, Action.LOAD_HEAD, token):
                    continue
            except LookAgain:
                continue
            except (BackendCrashed, InvalidInput) as error:
                crashes += 1
                if isinstance(error, BackendCrashed) and crashes < TAKE_OVER_TRIES:
                    log.error("the workers died while they loaded, trying again", version=head.number, error=str(error))
                    continue
                raise BadConfiguration(f"version {head.number} cannot be loaded: {error.message}") from error
            except AtollError as error:
                if error.reason == errors_pb2.REASON_FENCED:
                    self._lease.doubt(token)
                    continue
                if error.reason == errors_pb2.REASON_NOT_RESTORABLE:
                    raise BadConfiguration(error.message) from error
                if error.reason in NOT_LET_IN:
                    raise not_let_in(error) from error
                if isinstance(error, BadConfiguration):
                    raise
                log.error("the registry does not let the head be taken over, trying again", error=error.message)
                await asyncio.sleep(self._patience.max_s)
                continue
            await self._on_trainable(True)
            return

    async def _commit_staged_upon(self, head: ChainVersion, token: int) -> bool:
        """Whether a job had its version ready: committed, it keeps what a recovery would lose of the head's memory."""
        for job in await self._patience.ask("open jobs", self._records.open_jobs):
            if job.staged is None or job.staged.parent != head.number:
                continue
            try:
                return await self._committer.commit_staged(job, token)
            except AtollError as error:
                if error.reason in (errors_pb2.REASON_FENCED, errors_pb2.REASON_STORAGE_FULL):
                    raise
                # How the job ends is told when its turn comes.
                log.warning("what was staged is not committed", job_id=job.body.job_id, error=error.message)
                return False
        return False

    async def hold(self, head: ChainVersion, action: Action, token: int) -> None:
        """One try to load the head, or to append a recovery that can be loaded. What fails is logged and waited for.

        Raises LookAgain, Conflict (FENCED).
        """
        try:
            if not await self._loaded(head, action, token):
                return
        except AtollError as error:
            if error.reason == errors_pb2.REASON_FENCED:
                raise
            await self._on_trainable(False)
            log.error("the head does not load, trying again", version=head.number, error=error.message)
            await asyncio.sleep(self._patience.pause_s(self._failed_loads))
            self._failed_loads += 1
        else:
            await self._on_trainable(True)
            self._failed_loads = 0

    async def _loaded(self, head: ChainVersion, action: Action, token: int) -> bool:
        """False when there is another head instead: a recovery's, also where a durable head's bytes are gone."""
        if action is not Action.RECOVER:
            try:
                await self._model.load(head)
            except AtollError as error:
                if error.reason != errors_pb2.REASON_ARTIFACT_NOT_FOUND:
                    raise
                log.error("the head's bytes are gone", version=head.number, error=error.message)
            else:
                return True
        self._on_commit(await self._committer.recover(head, token))
        return False
