"""Everything a teacher is told, from environment variables `ATOLL_TEACHER_*`."""

from pathlib import Path
from typing import Self

from atoll.common.settings import ServiceSettings
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict


class TeacherSettings(ServiceSettings):
    """A teacher scores on one engine: one that runs already, or its own.

    Example: ATOLL_TEACHER_MODEL_PATH=/models/teacher python -m atoll.teacher
    Example: ATOLL_TEACHER_ENGINE=http://127.0.0.1:30010 python -m atoll.teacher
    """

    model_config = SettingsConfigDict(env_prefix="ATOLL_TEACHER_", frozen=True, extra="forbid")

    port: int = Field(7430, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    engine: str | None = Field(None, description="base URL of the engine; without it the teacher starts its own")
    model_path: Path | None = Field(
        None, description="the model's directory; needed without ENGINE, else where the engine says it is"
    )
    engine_port: int = Field(30010, ge=1, le=65535, description="port of its own engine")
    start_timeout_s: float = Field(600.0, gt=0, description="how long the engine may take until it samples")
    stop_timeout_s: float = Field(30.0, gt=0, description="how long its own engine may take to stop")
    max_top_k: int = Field(256, ge=0, description="largest top_k that is accepted")
    in_flight_tokens: int = Field(16_384, ge=1, description="tokens of all sequences that the engine works on at once")
    call_tokens: int = Field(65_536, ge=1, description="tokens of one call that are read and not answered yet")

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.engine is None and self.model_path is None:
            raise ValueError("set ATOLL_TEACHER_ENGINE (base URL) or ATOLL_TEACHER_MODEL_PATH (a model directory)")
        return self
