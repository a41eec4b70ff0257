"""Which weights to boot with: the registry's head of a scenario. No trainer is needed."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import (
    artifact_service_pb2,
    artifact_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
)
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, BadConfiguration
from atoll.common.intact import refuse_damaged
from atoll.common.rpc_errors import from_rpc_error

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
CALL_SECONDS = 10.0

# A stack starts its services side by side, so the registry may be down and the scenario not yet created.
_MAY_COME = (
    errors_pb2.REASON_SERVICE_UNAVAILABLE,
    errors_pb2.REASON_NOT_READY,
    errors_pb2.REASON_SCENARIO_NOT_FOUND,
    errors_pb2.REASON_VERSION_NOT_FOUND,
)


@dataclass(frozen=True)
class Weights:
    """What an engine boots with. Example: Weights(Path("/store/artifacts/3f..."), "1:7")."""

    model_path: Path
    weight_version: str

    def log_fields(self) -> dict[str, str]:
        return {"model_path": str(self.model_path), "weight_version": self.weight_version}


async def scenario_head(registry: str, scenario: str, token: str | None, timeout_s: float) -> Weights:
    """The head of the scenario; waits up to `timeout_s` for a registry and a scenario that are still coming.

    Raises:
        BadConfiguration: they did not come, the registry refused for another reason, or the head's files are damaged.
    """
    deadline = time.monotonic() + timeout_s
    async with open_channel(registry, token) as channel:
        while True:
            try:
                return await _ask(channel, scenario)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
                if error.reason not in _MAY_COME or time.monotonic() >= deadline:
                    raise _refusal(registry, scenario, error) from None
                log.info("waiting for the registry", registry=registry, scenario=scenario, why=error.message)
                await asyncio.sleep(RETRY_SECONDS)


async def _ask(channel: grpc.aio.Channel, scenario: str) -> Weights:
    versions = version_service_pb2_grpc.VersionServiceStub(channel)
    artifacts = artifact_service_pb2_grpc.ArtifactServiceStub(channel)
    head = await versions.GetVersion(version_service_pb2.GetVersionRequest(scenario=scenario), timeout=CALL_SECONDS)
    answer = await artifacts.GetArtifact(
        artifact_service_pb2.GetArtifactRequest(digest=head.version.model_digest), timeout=CALL_SECONDS
    )
    location = Path(answer.artifact.location)
    await asyncio.to_thread(refuse_damaged, location, answer.artifact.files)
    return Weights(location, head.version.weight_version)


def _refusal(registry: str, scenario: str, error: AtollError) -> BadConfiguration:
    return BadConfiguration(
        f"the registry at {registry} has no head of scenario {scenario!r} to serve: {error.code}: {error.message}"
    )
