"""The bridge: a named Ray actor through which whoever is on the cluster finds the driver and asks how it is."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import ray
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from ray.actor import ActorHandle

HEALTH_SECONDS = 10.0
START_SECONDS = 60.0
TAKE_OVER_PAUSE_SECONDS = 0.2

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class BridgeFacts:
    """Whose bridge it is.

    Example: ``BridgeFacts("chat", "127.0.0.1:7420", 4711)``
    """

    scenario: str
    address: str
    """host:port of the driver's gRPC, as the driver's machine reaches it."""
    pid: int
    """The driver's process."""


@dataclass(frozen=True)
class Bridge:
    """A bridge to publish. Example: ``Bridge("atoll-train-bridge", "chat", "127.0.0.1:7420")``"""

    name: str
    scenario: str
    address: str


class BridgeActor:
    """Runs on the driver's machine, takes no CPU from the ranks, and ends with the driver's connection to Ray."""

    def __init__(self, facts: BridgeFacts) -> None:
        self._facts = facts

    def facts(self) -> BridgeFacts:
        """Whose bridge it is."""
        return self._facts

    def healthy(self) -> bool:
        """Whether the driver takes jobs: the gRPC health check, asked from beside it."""
        with grpc.insecure_channel(self._facts.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS
                )
            except grpc.RpcError:
                return False
        serving: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
        return serving


def publish_bridge(bridge: Bridge) -> ActorHandle:
    """Publishes the bridge in the namespace of this process's connection, and returns once it answers; it goes with the
    handle.

    A bridge of the same scenario is taken over: workers are started by whoever holds the scenario's lease, and the
    holder before may still be there, stopped. Raises ValueError when a bridge of another scenario has the name, and
    what Ray raises.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    kind = ray.remote(num_cpus=0, max_restarts=-1)(BridgeActor)
    facts, deadline = BridgeFacts(bridge.scenario, bridge.address, os.getpid()), time.monotonic() + START_SECONDS
    while True:
        try:
            actor = kind.options(name=bridge.name, scheduling_strategy=here).remote(facts)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            _end_predecessor(bridge)
            # Ray forgets the name of a killed actor a moment later.
            time.sleep(TAKE_OVER_PAUSE_SECONDS)
        else:
            ray.get(actor.facts.remote(), timeout=START_SECONDS)
            return actor


def _end_predecessor(bridge: Bridge) -> None:
    """Kills the bridge that has the name. Raises ValueError when it is another scenario's."""
    try:
        actor = ray.get_actor(bridge.name)
    except ValueError:
        return
    try:
        other = ray.get(actor.facts.remote(), timeout=START_SECONDS)
    except RayActorError:
        return
    if other.scenario != bridge.scenario:
        raise ValueError(
            f"the driver of scenario {other.scenario} at {other.address} has published the actor {bridge.name} in this "
            "namespace; set another ATOLL_RAY_ACTOR_NAME or ATOLL_RAY_NAMESPACE"
        )
    log.warning("taking the bridge over", scenario=other.scenario, address=other.address, pid=other.pid)
    ray.kill(actor)
