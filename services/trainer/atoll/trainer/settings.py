"""Everything a trainer is told, once, from environment variables `ATOLL_TRAINER_*`."""

from pathlib import Path
from typing import Literal

from atoll.common.settings import ServiceSettings
from pydantic import Field
from pydantic_settings import SettingsConfigDict


class TrainerSettings(ServiceSettings):
    """One trainer trains one scenario.

    Example: ATOLL_TRAINER_SCENARIO=chat ATOLL_TRAINER_REGISTRY=127.0.0.1:7410 ATOLL_TRAINER_GATEWAY=127.0.0.1:7100
    ATOLL_TRAINER_ENGINES='["http://127.0.0.1:30000"]' ATOLL_TRAINER_RUN_DIR=run/trainer
    """

    model_config = SettingsConfigDict(env_prefix="ATOLL_TRAINER_", frozen=True, extra="forbid")

    port: int = Field(7420, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    scenario: str = Field(description="the scenario to train")
    registry: str = Field(description="host:port of the registry")
    gateway: str = Field(description="host:port of the gateway's gRPC side, which rows are pulled from")
    teacher: str | None = Field(None, description="host:port of the teacher service, for families that ask one")
    engines: tuple[str, ...] = Field((), description="base URLs of the engines to publish to, as a JSON list")
    run_dir: Path = Field(description="directory for the workers' logs")

    backend: Literal["megatron"] = Field("megatron", description="what computes")
    workers: Literal["local", "ray"] = Field("local", description="ranks as processes of this machine or as Ray actors")
    ray_address: str | None = Field(
        None,
        validation_alias="RAY_ADDRESS",
        min_length=1,
        description="Ray cluster to join where workers is ray; without it a private Ray is started",
    )
    ray_namespace: str = Field("atoll", validation_alias="ATOLL_RAY_NAMESPACE", min_length=1)
    ray_actor_name: str = Field(
        "atoll-train-bridge",
        validation_alias="ATOLL_RAY_ACTOR_NAME",
        min_length=1,
        description="name of the actor that tells a joined cluster where this driver is",
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that share one copy of the model")
    pipeline_parallel: int = Field(1, ge=1, description="stages of consecutive layers that one copy is cut into")
    context_parallel: int = Field(1, ge=1, description="ranks that split every row of a copy by its tokens")
    data_parallel: int = Field(1, ge=1, description="copies of the model, which split the rows")
    seq_length: int = Field(4096, ge=2, description="longest row, prompt and response, that is trained; tokens")
    micro_batch_tokens: int = Field(8192, ge=1, description="packed tokens that go through the model at once")
    learning_rate: float = Field(1e-6, gt=0, description="of every optimizer step of the actor; a schedule's peak")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="what the rate does after the warm-up"
    )
    lr_warmup_steps: int = Field(0, ge=0, description="optimizer steps in which the rate rises to learning_rate")
    lr_decay_steps: int | None = Field(
        None, ge=1, description="optimizer step, counted from the first, at which linear and cosine reach lr_minimum"
    )
    lr_minimum: float = Field(0.0, ge=0, description="rate at the end of the decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="largest global gradient norm; 0 turns clipping off")
    seed: int = Field(0, ge=0)
    score_centering: bool = Field(False, description="corrects the drift towards the engine's distribution")
    score_centering_top_k: int = Field(128, ge=1, description="ids of its head; at most what the gateway captures")
    score_centering_min_tail_mass: float = Field(1e-6, gt=0, lt=1, description="smaller tails are taken for it")

    address: str | None = Field(
        None, min_length=1, description="host:port that others reach this trainer at; by default the one it listens on"
    )
    lease_ttl_s: float = Field(
        15.0, ge=1, le=3600, description="seconds after which another trainer takes over from one that died"
    )
    checkpoint_every_n_versions: int = Field(
        1, ge=1, description="versions whose number it divides are checkpoints, the others keep their weights alone"
    )
    publish_timeout_s: float = Field(
        600.0,
        ge=0,
        description="seconds after which a head that engines refuse and none loads is rolled back; 0: never",
    )
    max_attempts: int = Field(3, ge=1, description="crashes after which a job is FAILED")
    step_timeout_s: float = Field(3600.0, gt=0, description="seconds a job's training may take before it is a crash")
    min_engines: int = Field(1, ge=1, description="engines that must answer with a version for it to be SERVED")
    publish_poll_s: float = Field(2.0, gt=0, description="seconds between looks at an engine that serves the head")
    retry_initial_s: float = Field(0.2, gt=0, description="first pause before something unreachable is asked again")
    retry_max_s: float = Field(15.0, gt=0, description="longest such pause")
