"""Everything a teacher is told, from environment variables `ATOLL_TEACHER_*`."""

from pathlib import Path
from typing import Self

from atoll.common.settings import ServiceSettings
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict


class TeacherSettings(ServiceSettings):
    """A teacher scores on engines that run already, or on one of its own.

    Example: ATOLL_TEACHER_MODEL_PATH=/models/teacher python -m atoll.teacher
    Example: ATOLL_TEACHER_ENGINES='["http://10.0.0.5:30010", "http://10.0.0.6:30010"]' python -m atoll.teacher
    """

    model_config = SettingsConfigDict(env_prefix="ATOLL_TEACHER_", frozen=True, extra="forbid")

    port: int = Field(7430, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    engines: tuple[str, ...] = Field(
        (), description="base URLs of engines of one model, as a JSON list; without them the teacher starts its own"
    )
    model_path: Path | None = Field(
        None, description="the model's directory; needed without ENGINES, else where the first engine says it is"
    )
    engine_port: int = Field(30010, ge=1, le=65535, description="port of its own engine")
    start_timeout_s: float = Field(600.0, gt=0, description="how long an engine may take until it samples")
    stop_timeout_s: float = Field(30.0, gt=0, description="how long its own engine may take to stop")
    max_top_k: int = Field(256, ge=0, description="largest top_k that is accepted")
    in_flight_tokens: int = Field(16_384, ge=1, description="tokens that one engine works on at once")
    call_bytes: int = Field(64 << 20, ge=1, description="memory for what one call has sent and not taken as results")
    max_calls: int = Field(64, ge=1, description="calls of Score and ScoreBatch at once")
    engine_timeout_s: float = Field(120.0, gt=0, description="how long an engine may be silent about one sequence")
    engine_wait_s: float = Field(
        300.0, ge=0, description="how long sequences wait while no engine serves before they fail, to be sent again"
    )
    watch_s: float = Field(5.0, gt=0, description="seconds between looks at an engine that serves")
    probe_tolerance: float = Field(
        0.1, gt=0, description="nats, in the mean, by which engines of one model may differ on the probe"
    )
    max_restarts: int = Field(5, ge=0, description="restarts of its own engine within RESTART_WINDOW_S")
    restart_window_s: float = Field(1800.0, gt=0, description="see MAX_RESTARTS")
    restart_pause_s: float = Field(1.0, gt=0, description="first pause before a restart; doubles up to a minute")

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if not self.engines and self.model_path is None:
            raise ValueError(
                "set ATOLL_TEACHER_ENGINES (a JSON list of base URLs) or ATOLL_TEACHER_MODEL_PATH (a model directory)"
            )
        if len(set(self.engines)) != len(self.engines):
            raise ValueError("ATOLL_TEACHER_ENGINES names an engine twice")
        return self
