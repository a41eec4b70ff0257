"""`atoll versions`: the chain of a scenario, newest first, as the registry tells it."""

from datetime import UTC
from typing import cast

import grpc
from atoll.api.registry.v1 import scenario_service_pb2 as scenarios
from atoll.api.registry.v1 import scenario_service_pb2_grpc, version_service_pb2_grpc
from atoll.api.registry.v1 import version_service_pb2 as versions
from atoll.api.registry.v1.version_pb2 import Operation, Version
from atoll.cli.registry_api import registry_channel
from atoll.common.errors import InvalidInput
from google.protobuf.json_format import MessageToDict
from rich.table import Table

CALL_SECONDS = 10.0
REWARD_METRIC = "reward/mean"
"""As the trainer calls it in every version that it commits."""


async def read_versions(registry: str, scenario: str | None, token: str | None) -> list[Version]:
    """Every version of a scenario, newest first. scenario: None takes the only one there is.

    registry: host:port. Raises AtollError: the registry's refusal, Unavailable, or InvalidInput when a scenario must
    be named.
    """
    async with registry_channel(registry, token) as channel:
        name = scenario or await _only_scenario(channel)
        stub = version_service_pb2_grpc.VersionServiceStub(channel)
        found: list[Version] = []
        request = versions.ListVersionsRequest(scenario=name)
        while True:
            page = await stub.ListVersions(request, timeout=CALL_SECONDS)
            found.extend(page.versions)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token


async def _only_scenario(channel: grpc.aio.Channel) -> str:
    stub = scenario_service_pb2_grpc.ScenarioServiceStub(channel)
    answer = await stub.ListScenarios(scenarios.ListScenariosRequest(page_size=20), timeout=CALL_SECONDS)
    names = [scenario.scenario_id for scenario in answer.scenarios]
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise InvalidInput(f"name a scenario with --scenario; the registry has: {known}", field="scenario")
    return names[0]


def version_as_json(version: Version) -> dict[str, object]:
    """The message in proto3 JSON with its field names; numbers of 64 bits are texts, as proto3 JSON has them."""
    return cast(dict[str, object], MessageToDict(version, preserving_proto_field_name=True))


def versions_table(chain: list[Version]) -> Table:
    """One row a version; a metric that a version does not have is a dash."""
    table = Table(title=f"versions of {chain[0].scenario}" if chain else "no versions", title_justify="left")
    for column in ("version", "parent", "made by", "weights", "checkpoint", "samples", "reward", "job", "created"):
        table.add_column(column, justify="right" if column in ("parent", "samples", "reward") else "left")
    for version in chain:
        reward = version.metrics.get(REWARD_METRIC)
        table.add_row(
            version.weight_version,
            str(version.parent) if version.HasField("parent") else "-",
            Operation.Name(version.operation).removeprefix("OPERATION_").lower(),
            version.model_digest[:12],
            version.checkpoint_digest[:12] or "-",
            str(len(version.consumed_sample_ids)),
            "-" if reward is None else f"{reward:.3f}",
            version.job_id[:16] or "-",
            version.create_time.ToDatetime(tzinfo=UTC).strftime("%Y-%m-%d %H:%M:%S"),
        )
    return table
