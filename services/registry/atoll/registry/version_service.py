"""gRPC: VersionService."""

import asyncio
from collections.abc import AsyncIterator, Callable

from atoll.api.registry.v1 import version_service_pb2 as pb
from atoll.api.registry.v1.version_service_pb2_grpc import VersionServiceServicer
from atoll.common.errors import InvalidInput
from atoll.common.pages import decode_number_token, encode_page_token, page_size
from atoll.common.server import Context
from atoll.common.structs import object_of
from atoll.registry.chain import Chain
from atoll.registry.messages import OPERATION_FROM_PROTO, fit_page, version_message
from atoll.registry.types import VersionContent
from atoll.registry.watch import CommitSignal, watch


class VersionRpc(VersionServiceServicer):
    """Translates; `Chain` decides. committed: called after every commit, to wake watches and retention."""

    def __init__(self, chain: Chain, signal: CommitSignal, committed: Callable[[], None]) -> None:
        self._chain = chain
        self._signal = signal
        self._committed = committed

    async def CommitVersion(self, request: pb.CommitVersionRequest, context: Context) -> pb.CommitVersionResponse:
        operation = OPERATION_FROM_PROTO.get(request.operation)
        if operation is None:
            raise InvalidInput(
                f"operation is {request.operation}, expected OPERATION_TRAINING, _ROLLBACK or _RECOVERY",
                field="operation",
            )
        content = VersionContent(
            scenario=request.scenario,
            job_id=request.job_id,
            parent=request.expected_parent,
            operation=operation,
            family=request.family,
            model_digest=request.model_digest,
            checkpoint_digest=request.checkpoint_digest or None,
            consumed_sample_ids=tuple(request.consumed_sample_ids),
            metrics=dict(request.metrics),
            family_state=object_of(request.family_state, "family_state"),
            restores=request.restores if request.HasField("restores") else None,
        )
        version = await asyncio.to_thread(self._chain.commit, content, request.fencing_token)
        self._committed()
        return pb.CommitVersionResponse(version=version_message(version))

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        which = request.WhichOneof("which")
        number = request.number if which == "number" else None
        job_id = request.job_id if which == "job_id" else None
        version = await asyncio.to_thread(self._chain.get, request.scenario, number=number, job_id=job_id)
        return pb.GetVersionResponse(version=version_message(version))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        limit = page_size(request.page_size)
        before = decode_number_token(request.page_token)
        found = await asyncio.to_thread(self._chain.list_page, request.scenario, limit + 1, before)
        messages = fit_page(found[:limit], version_message)
        more = len(messages) < len(found)
        token = encode_page_token(str(messages[-1].number)) if more else ""
        return pb.ListVersionsResponse(versions=messages, next_page_token=token)

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        async for event in watch(self._chain, self._signal, request.scenario, request.from_revision):
            version = None if event.version is None else version_message(event.version)
            yield pb.WatchVersionsResponse(version=version, revision=event.revision)
