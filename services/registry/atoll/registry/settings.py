"""What an operator can set: environment variables ATOLL_REGISTRY_*."""

from pathlib import Path

from atoll.common.settings import ServiceSettings
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_settings import SettingsConfigDict


class BootScenario(BaseModel):
    """A scenario that exists once the registry serves.

    Example: {"scenario_id": "support", "family": "grpo", "options": {}, "base_model": "/models/small"}
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario_id: str
    family: str
    options: dict[str, JsonValue] = {}
    base_model: str
    max_staleness: int = 0


class RegistrySettings(ServiceSettings):
    """The registry's settings."""

    model_config = SettingsConfigDict(env_prefix="ATOLL_REGISTRY_")

    port: int = Field(7410, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    store: Path = Field(Path(".atoll/registry"), description="directory of artifacts, shared with trainer and engines")
    database_url: str | None = Field(
        None, description="SQLAlchemy URL; by default SQLite in the store: sqlite:///<store>/registry.db"
    )
    scenarios: tuple[BootScenario, ...] = Field((), description="created at start when they do not exist")
    keep_checkpoints: int = Field(2, ge=1, description="how many of a scenario's newest versions keep their bytes")

    @property
    def database(self) -> str:
        """The URL to open."""
        return self.database_url or f"sqlite:///{self.store.absolute() / 'registry.db'}"
