"""What can be set about an engine: environment variables ATOLL_ENGINE_*."""

from enum import StrEnum
from pathlib import Path
from typing import Self

from atoll.common.settings import ServiceSettings
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict


class Device(StrEnum):
    """What the engine computes on. AUTO: a GPU when the machine has one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class EngineSettings(ServiceSettings):
    """Serves either a model directory or the head of a scenario.

    Example: ATOLL_ENGINE_MODEL_PATH=/models/base ATOLL_ENGINE_PORT=30000 python -m atoll.engine
    Example: ATOLL_ENGINE_REGISTRY=127.0.0.1:7410 ATOLL_ENGINE_SCENARIO=support python -m atoll.engine
    """

    model_config = SettingsConfigDict(env_prefix="ATOLL_ENGINE_", frozen=True, extra="forbid")

    model_path: Path | None = Field(None, description="a Hugging Face model directory")
    weight_version: str = Field(
        "0:0", pattern=r"^\d+:\d+$", description="what model_path is called; 0:0 for weights that never change"
    )
    registry: str | None = Field(None, description="host:port of the registry that knows the scenario's head")
    scenario: str | None = Field(None, description="the scenario whose head is served")
    registry_timeout_s: float = Field(300.0, gt=0, description="how long to wait for the registry and the scenario")
    port: int = Field(30000, ge=1, le=65535)
    insecure: bool = Field(False, description="listen where other machines can connect; SGLang asks for no token")
    device: Device = Device.AUTO
    context_length: int | None = Field(None, ge=1, description="tokens of prompt and reply; None: the model's own")
    max_total_tokens: int = Field(16384, ge=1, description="size of the key-value cache on a CPU")
    max_running_requests: int = Field(32, ge=1, description="replies sampled together on a CPU; the others wait")
    threads: int = Field(1, ge=1, description="compute threads on a CPU; small models are slower with more")
    start_timeout_s: float = Field(600.0, gt=0, description="how long loading may take")
    stop_timeout_s: float = Field(30.0, gt=0, description="how long running replies may take after SIGTERM")
    die_with_parent: bool = Field(False, description="stop when the process that started this one is gone (Linux)")
    extra_args: str = Field("", description="more arguments for sglang.launch_server, quoted as for a shell")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model_path is None) == (self.registry is None):
            raise ValueError("set either ATOLL_ENGINE_MODEL_PATH or ATOLL_ENGINE_REGISTRY with ATOLL_ENGINE_SCENARIO")
        if (self.registry is None) != (self.scenario is None):
            raise ValueError("ATOLL_ENGINE_REGISTRY and ATOLL_ENGINE_SCENARIO are set together")
        return self
