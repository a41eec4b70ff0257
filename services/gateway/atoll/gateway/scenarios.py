"""What the registry says about scenarios, kept in memory: bindings once, heads as they change."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
import structlog
from atoll.api.registry.v1 import (
    scenario_pb2,
    scenario_service_pb2_grpc,
    version_pb2,
    version_service_pb2_grpc,
)
from atoll.api.registry.v1 import scenario_service_pb2 as scenario_calls
from atoll.api.registry.v1 import version_service_pb2 as version_calls
from atoll.common.errors import AtollError
from atoll.common.names import check_id
from atoll.common.rpc_errors import from_rpc_error
from atoll.common.structs import object_of
from atoll.families.catalog import AnyFamily, make_family

log = structlog.get_logger(__name__)

CALL_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""A watch that is silent for three heartbeats is taken for broken."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class BoundScenario:
    """A scenario and its family. Example: BoundScenario("math", "grpo", family, max_staleness=0)"""

    scenario_id: str
    family_reference: str
    """As the registry names it."""
    family: AnyFamily
    max_staleness: int


@dataclass(frozen=True)
class Head:
    """The newest version of a scenario. Example: Head(number=3, weight_version="1:3", parent_weight_version="1:2")"""

    number: int
    weight_version: str
    parent_weight_version: str | None


class ScenarioDirectory:
    """Bindings never change, so they are asked for once; heads are followed with WatchVersions."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._scenarios = scenario_service_pb2_grpc.ScenarioServiceStub(channel)
        self._versions = version_service_pb2_grpc.VersionServiceStub(channel)
        self._bound: dict[str, BoundScenario] = {}
        self._failed: dict[str, str] = {}
        self._heads: dict[str, Head] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def get(self, scenario: str) -> BoundScenario:
        """The binding of a scenario; from now on its head is followed.

        Raises InvalidInput, NotFound(SCENARIO_NOT_FOUND), Unavailable, and what the family says about its options.
        """
        known = self._bound.get(scenario)
        if known is not None:
            return known
        check_id(scenario, "scenario")
        request = scenario_calls.GetScenarioRequest(scenario_id=scenario)
        try:
            answer = await self._scenarios.GetScenario(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return self._bind(answer.scenario)

    async def list(self) -> list[BoundScenario]:
        """Every scenario that can be used, by id; `failed` tells of the others. Raises Unavailable."""
        found: list[BoundScenario] = []
        token = ""
        while True:
            request = scenario_calls.ListScenariosRequest(page_token=token)
            try:
                answer = await self._scenarios.ListScenarios(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            for scenario in answer.scenarios:
                try:
                    found.append(self._bind(scenario))
                except AtollError as error:
                    self._failed[scenario.scenario_id] = error.message
            token = answer.next_page_token
            if not token:
                return found

    def known(self) -> Sequence[str]:
        """Scenarios whose binding was read."""
        return sorted(self._bound)

    def failed(self) -> Mapping[str, str]:
        """Scenarios whose family or options cannot be used, and why."""
        return dict(self._failed)

    def head(self, scenario: str) -> Head | None:
        """The newest version as last heard; None before the registry has answered."""
        return self._heads.get(scenario)

    async def stop(self) -> None:
        """Ends the watches."""
        tasks = list(self._watches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _bind(self, scenario: scenario_pb2.Scenario) -> BoundScenario:
        known = self._bound.get(scenario.scenario_id)
        if known is not None:
            return known
        family = make_family(scenario.family, object_of(scenario.options, "options"))
        bound = BoundScenario(scenario.scenario_id, scenario.family, family, scenario.max_staleness)
        self._bound[bound.scenario_id] = bound
        self._watches[bound.scenario_id] = asyncio.create_task(self._follow(bound.scenario_id))
        return bound

    async def _follow(self, scenario: str) -> None:
        """Keeps the head of one scenario, whatever happens to the registry."""
        revision = 0
        while True:
            try:
                if revision == 0:
                    revision = await self._read_head(scenario)
                request = version_calls.WatchVersionsRequest(scenario=scenario, from_revision=revision)
                watch = self._versions.WatchVersions(request)
                while True:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        answer = await watch.read()
                    if not isinstance(answer, version_calls.WatchVersionsResponse):
                        break
                    if answer.HasField("version"):
                        await self._take(answer.version)
                    revision = max(revision, answer.revision)
            except (grpc.RpcError, AtollError, TimeoutError) as error:
                failure = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
                log.warning("head not followed", scenario=scenario, error=str(failure))
                # A compacted revision is answered by reading the head again.
                revision = 0
            await asyncio.sleep(RETRY_SECONDS)

    async def _read_head(self, scenario: str) -> int:
        answer = await self._versions.GetVersion(
            version_calls.GetVersionRequest(scenario=scenario), timeout=CALL_SECONDS
        )
        await self._take(answer.version)
        return answer.version.revision

    async def _take(self, version: version_pb2.Version) -> None:
        known = self._heads.get(version.scenario)
        if known is not None and known.number >= version.number:
            return
        parent: str | None = None
        if version.HasField("parent"):
            if known is not None and known.number == version.parent:
                parent = known.weight_version
            else:
                request = version_calls.GetVersionRequest(scenario=version.scenario, number=version.parent)
                parent = (await self._versions.GetVersion(request, timeout=CALL_SECONDS)).version.weight_version
        self._heads[version.scenario] = Head(version.number, version.weight_version, parent)
        log.info("head", scenario=version.scenario, weight_version=version.weight_version)
