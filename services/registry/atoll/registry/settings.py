"""What an operator can set: environment variables ATOLL_REGISTRY_*."""

from pathlib import Path
from typing import Self

from atoll.common.settings import ServiceSettings
from atoll.registry.retention import Policy
from pydantic import BaseModel, ByteSize, ConfigDict, Field, JsonValue, model_validator
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
    keep_checkpoints: int = Field(
        2, ge=1, description="how many checkpoints of a scenario the policy keeps, the head's among them"
    )
    retention_policy: Policy = Field(Policy.LATEST, description="which ones: latest, or best_reward")
    max_storage_fraction: float = Field(0.80, gt=0, le=1, description="of the filesystem, for all artifacts")
    max_storage: ByteSize | None = Field(None, description="the same in bytes, e.g. 200GB; in place of the fraction")
    min_free_space_fraction: float = Field(
        0.10, ge=0, lt=1, description="of the filesystem, left free; below it nothing new is staged"
    )
    min_free_space: ByteSize | None = Field(None, description="the same in bytes; in place of the fraction")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        for name in ("max_storage", "min_free_space"):
            if {name, f"{name}_fraction"} <= self.model_fields_set:
                raise ValueError(f"{name} and {name}_fraction are both set; keep one of them")
        return self

    def max_storage_bytes(self, capacity: int) -> int:
        """How many bytes all artifacts may take on a filesystem of `capacity` bytes."""
        return int(capacity * self.max_storage_fraction) if self.max_storage is None else int(self.max_storage)

    def min_free_bytes(self, capacity: int) -> int:
        """How many bytes of the filesystem are to stay free."""
        return int(capacity * self.min_free_space_fraction) if self.min_free_space is None else int(self.min_free_space)

    @property
    def database(self) -> str:
        """The URL to open."""
        return self.database_url or f"sqlite:///{self.store.absolute() / 'registry.db'}"
