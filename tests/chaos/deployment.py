"""All of Atoll as processes in one directory: a registry, a gateway, trainers with Megatron workers, engines."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.cli.ports import free_ports

from tests.chaos.process import Process

SCENARIO = "chaos"
TOKEN = "chaos-token"
"""Asked for by every service, so every call between them carries it."""
GROUPS = 2
GROUP_SIZE = 2
BATCH = GROUPS * GROUP_SIZE
"""Samples of one training job."""
UP_SECONDS = 240.0
"""Half a minute on an idle machine."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Shape:
    """What is deployed. Example: Shape(trainers=2, engines=2, trainer_settings={"LEASE_TTL_S": "4"})"""

    trainers: int = 1
    engines: int = 1
    real_engine: bool = False
    """SGLang in place of the fake engine."""
    max_staleness: int = 1
    pause_s: float = 0.02
    """Seconds that a fake engine takes for a token; a publish then falls into running replies."""
    keep_checkpoints: int = 4
    trainer_settings: Mapping[str, str] = field(default_factory=dict)
    """Names without their prefix ATOLL_TRAINER_."""
    gateway_settings: Mapping[str, str] = field(default_factory=dict)
    registry_settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a process runs and is reached: another network namespace needs a command to get there.

    Example: Place("10.9.0.2", ("nsenter", "--net=/proc/4711/ns/net"))
    """

    host: str = LOOPBACK
    enter: Sequence[str] = ()


class Deployment:
    """Processes by name: registry, gateway, trainer-1, ..., engine-1, ... They keep their ports over restarts."""

    def __init__(
        self, directory: Path, model: Path, shape: Shape, place_of: Callable[[str], Place] = lambda _: Place()
    ) -> None:
        self.directory = directory
        self.model = model
        self.shape = shape
        self._place_of = place_of
        for part in ("logs", "trainer-runs"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        self.trainer_names = [f"trainer-{n + 1}" for n in range(shape.trainers)]
        self.engine_names = [f"engine-{n + 1}" for n in range(shape.engines)]
        named = ["registry", "gateway", "gateway-grpc", *self.trainer_names, *self.engine_names]
        self._ports = dict(zip(named, free_ports(len(named)), strict=True))
        self.processes = {
            "registry": self._process("registry", "atoll.registry", self._registry()),
            "gateway": self._process("gateway", "atoll.gateway", self._gateway()),
            **{name: self._process(name, "atoll.trainer.driver", self._trainer(name)) for name in self.trainer_names},
            **{name: self._engine(name) for name in self.engine_names},
        }

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def registry_database(self) -> Path:
        return self.store / "registry.db"

    @property
    def gateway_database(self) -> Path:
        return self.directory / "gateway.db"

    @property
    def gateway_url(self) -> str:
        return f"http://{self.address('gateway')}"

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://{self.address(name)}" for name in self.engine_names]

    def address(self, name: str) -> str:
        """host:port; "gateway-grpc" is the gateway's gRPC side."""
        return f"{self._place_of(name).host}:{self._ports[name]}"

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    async def start(self) -> None:
        """Returns when everything accepts connections."""
        for process in self.processes.values():
            await process.start()
        await self.wait_until_up()

    async def wait_until_up(self, seconds: float = UP_SECONDS) -> None:
        await asyncio.gather(*(process.wait_until_up(seconds) for process in self.processes.values()))

    async def stop(self) -> None:
        """Ends everything, registry last."""
        others = [process for name, process in self.processes.items() if name != "registry"]
        await asyncio.gather(*(process.terminate() for process in others))
        await self.processes["registry"].terminate()

    def _process(self, name: str, module: str, settings: Mapping[str, str], *arguments: str) -> Process:
        place = self._place_of(name)
        # Torch is slower on two threads than on one for matrices this small.
        environment = {"ATOLL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **settings}
        command = [*place.enter, sys.executable, "-m", module, *arguments]
        log = self.directory / "logs" / f"{name}.log"
        return Process(name, command, environment, log, (place.host, self._ports[name]))

    def _registry(self) -> dict[str, str]:
        scenario = {
            "scenario_id": SCENARIO,
            "family": "grpo",
            "options": {"groups_per_step": GROUPS, "n_samples_per_prompt": GROUP_SIZE},
            "base_model": str(self.model),
            "max_staleness": self.shape.max_staleness,
        }
        return {
            "ATOLL_REGISTRY_HOST": self._place_of("registry").host,
            "ATOLL_REGISTRY_PORT": str(self._ports["registry"]),
            "ATOLL_REGISTRY_STORE": str(self.store),
            "ATOLL_REGISTRY_SCENARIOS": json.dumps([scenario]),
            "ATOLL_REGISTRY_KEEP_CHECKPOINTS": str(self.shape.keep_checkpoints),
            **{f"ATOLL_REGISTRY_{name}": value for name, value in self.shape.registry_settings.items()},
        }

    def _gateway(self) -> dict[str, str]:
        return {
            "ATOLL_GATEWAY_HOST": self._place_of("gateway").host,
            "ATOLL_GATEWAY_PORT": str(self._ports["gateway"]),
            "ATOLL_GATEWAY_GRPC_PORT": str(self._ports["gateway-grpc"]),
            "ATOLL_GATEWAY_DATABASE_URL": f"sqlite:///{self.gateway_database}",
            "ATOLL_GATEWAY_REGISTRY": self.address("registry"),
            "ATOLL_GATEWAY_TRAINER": ",".join(self.address(name) for name in self.trainer_names),
            "ATOLL_GATEWAY_ENGINES": json.dumps(self.engine_urls),
            "ATOLL_GATEWAY_DEFAULT_SCENARIO": SCENARIO,
            **{f"ATOLL_GATEWAY_{name}": value for name, value in self.shape.gateway_settings.items()},
        }

    def _trainer(self, name: str) -> dict[str, str]:
        return {
            "ATOLL_TRAINER_HOST": self._place_of(name).host,
            "ATOLL_TRAINER_PORT": str(self._ports[name]),
            "ATOLL_TRAINER_SCENARIO": SCENARIO,
            "ATOLL_TRAINER_REGISTRY": self.address("registry"),
            "ATOLL_TRAINER_GATEWAY": self.address("gateway-grpc"),
            "ATOLL_TRAINER_ENGINES": json.dumps(self.engine_urls),
            "ATOLL_TRAINER_RUN_DIR": str(self.directory / "trainer-runs" / name),
            "ATOLL_TRAINER_LEARNING_RATE": "1e-3",
            "ATOLL_TRAINER_SEQ_LENGTH": "512",
            "ATOLL_TRAINER_PUBLISH_POLL_S": "0.5",
            "ATOLL_TRAINER_RETRY_MAX_S": "2",
            **{f"ATOLL_TRAINER_{key}": value for key, value in self.shape.trainer_settings.items()},
        }

    def _engine(self, name: str) -> Process:
        host, port = self._place_of(name).host, str(self._ports[name])
        if self.shape.real_engine:
            settings = {
                "ATOLL_ENGINE_HOST": host,
                "ATOLL_ENGINE_PORT": port,
                "ATOLL_ENGINE_REGISTRY": self.address("registry"),
                "ATOLL_ENGINE_SCENARIO": SCENARIO,
                "ATOLL_ENGINE_CONTEXT_LENGTH": "512",
            }
            return self._process(name, "atoll.engine", settings)
        where = ("--host", host, "--port", port, "--registry", self.address("registry"), "--scenario", SCENARIO)
        return self._process(name, "tests.fakes.weight_engine", {}, *where, "--pause-s", str(self.shape.pause_s))
