"""Versions that bring an earlier one back: a caller's rollback, and the recovery from a memory that is gone."""

import hashlib

from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import version_pb2
from atoll.common.errors import AtollError, Conflict
from atoll.trainer.chain import Chain, ChainVersion, NewVersion


def rollback(job_id: str, target: ChainVersion, head: ChainVersion) -> NewVersion:
    """The version that a rollback to `target` appends. Pure."""
    return NewVersion(
        job_id=job_id,
        expected_parent=head.number,
        operation=version_pb2.OPERATION_ROLLBACK,
        family=target.family,
        model_digest=target.model_digest,
        checkpoint_digest=target.checkpoint_digest,
        consumed_sample_ids=(),
        metrics={},
        family_state=target.family_state,
        restores=target.number,
    )


def recovery_job_id(scenario: str, head: int) -> str:
    """The same for every trainer that recovers from this head, so that it happens once."""
    return f"recovery-{hashlib.sha256(f'{scenario}/{head}'.encode()).hexdigest()[:32]}"


async def recovery(chain: Chain, head: ChainVersion) -> NewVersion:
    """The version that goes on from a live head: its weights, and all else from the newest checkpoint before it.

    Where the head's own bytes are gone it goes back to that checkpoint's weights. Raises Conflict (NOT_RESTORABLE) for
    a chain without a checkpoint whose bytes are there.
    """
    head_is_kept = await _is_there(chain, head.model_digest)
    for number in range(head.number - 1, -1, -1):
        target = await chain.version(number)
        needed = {target.checkpoint_digest, "" if head_is_kept else target.model_digest} - {""}
        if target.durable and all([await _is_there(chain, digest) for digest in needed]):
            break
    else:
        raise Conflict(
            f"no version before the live head {head.number} can be gone on from: the bytes of all checkpoints are gone;"
            " restore the store from a copy",
            reason=errors_pb2.REASON_NOT_RESTORABLE,
        )
    return NewVersion(
        job_id=recovery_job_id(chain.scenario, head.number),
        expected_parent=head.number,
        operation=version_pb2.OPERATION_RECOVERY,
        family=target.family,
        model_digest=head.model_digest if head_is_kept else target.model_digest,
        checkpoint_digest=target.checkpoint_digest,
        consumed_sample_ids=(),
        metrics={},
        family_state=target.family_state,
        restores=target.number,
    )


async def way_back(chain: Chain, head: ChainVersion) -> int | None:
    """The newest durable version before the head with other weights and all its bytes; None when there is none."""
    for number in range(head.number - 1, -1, -1):
        version = await chain.version(number)
        needed = {version.model_digest, version.checkpoint_digest} - {""}
        # A rollback to bytes that retention has removed would be refused, and its job id be used up.
        if version.durable and head.model_digest not in needed and all([await _is_there(chain, d) for d in needed]):
            return number
    return None


async def checkpoint_origin(chain: Chain, version: ChainVersion) -> ChainVersion:
    """The version whose checkpoint this one goes on from; itself when it made its own."""
    while version.restores is not None:
        version = await chain.version(version.restores)
    return version


async def _is_there(chain: Chain, digest: str) -> bool:
    try:
        await chain.artifact(digest)
    except AtollError as error:
        if error.reason == errors_pb2.REASON_ARTIFACT_NOT_FOUND:
            return False
        raise
    return True
