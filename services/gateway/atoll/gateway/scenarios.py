"""What the registry says about scenarios, kept in memory: bindings once, heads as they change."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
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
from atoll.gateway.head import Head
from atoll.gateway.head_reading import head_of

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


class ScenarioDirectory:
    """Bindings never change, so they are asked for once; heads are followed with WatchVersions."""

    def __init__(self, channel: grpc.aio.Channel, on_head: Callable[[], None] = lambda: None) -> None:
        """on_head: called after the head of a scenario has changed."""
        self._on_head = on_head
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
                # The others can be used; why this one cannot is remembered.
                with contextlib.suppress(AtollError):
                    found.append(self._bind(scenario))
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
        try:
            family = make_family(scenario.family, object_of(scenario.options, "options"))
        except AtollError as error:
            self._failed[scenario.scenario_id] = error.message
            raise
        self._failed.pop(scenario.scenario_id, None)
        bound = BoundScenario(scenario.scenario_id, scenario.family, family, scenario.max_staleness)
        self._bound[bound.scenario_id] = bound
        self._watches[bound.scenario_id] = asyncio.create_task(self._follow(bound.scenario_id))
        return bound

    async def _follow(self, scenario: str) -> None:
        """Keeps the head of one scenario, whatever happens to the registry."""
        while True:
            try:
                # Anew after every break: a revision may have been compacted meanwhile.
                await self._watch(scenario, await self._read_head(scenario))
            except (grpc.RpcError, TimeoutError) as error:
                failure = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
                log.warning("head not followed", scenario=scenario, error=str(failure) or type(failure).__name__)
            except Exception as defect:
                log.error("head not followed", scenario=scenario, exc_info=defect)
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self, scenario: str, revision: int) -> None:
        """Takes every version past a revision until the registry ends the stream or is silent."""
        request = version_calls.WatchVersionsRequest(scenario=scenario, from_revision=revision)
        watch = self._versions.WatchVersions(request)
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    answer = await watch.read()
                if not isinstance(answer, version_calls.WatchVersionsResponse):
                    return
                if answer.HasField("version"):
                    await self._take(answer.version)
        finally:
            watch.cancel()

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

        async def read(number: int) -> version_pb2.Version:
            request = version_calls.GetVersionRequest(scenario=version.scenario, number=number)
            return (await self._versions.GetVersion(request, timeout=CALL_SECONDS)).version

        self._heads[version.scenario] = await head_of(version, known, read)
        log.info("head", scenario=version.scenario, weight_version=version.weight_version)
        self._on_head()
