"""Settings of the gateway: environment variables ATOLL_GATEWAY_*."""

from atoll.common.settings import ServiceSettings
from pydantic import Field
from pydantic_settings import SettingsConfigDict


class GatewaySettings(ServiceSettings):
    """Example: ATOLL_GATEWAY_REGISTRY=127.0.0.1:7101 ATOLL_GATEWAY_ENGINES='["http://127.0.0.1:30000"]'."""

    model_config = SettingsConfigDict(env_prefix="ATOLL_GATEWAY_", frozen=True, extra="forbid", populate_by_name=True)

    port: int = Field(8100, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    grpc_port: int = Field(7100, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    database_url: str = Field("sqlite:///gateway.db", description="SQLAlchemy URL of samples, reports and batches")
    registry: str = Field(description="host:port of the registry")
    trainer: str | None = Field(
        None, description="host:port of the trainer, several with commas between; unset: batches are formed and wait"
    )
    engines: tuple[str, ...] = Field((), description="base URLs of the serving engines, as a JSON list")
    default_scenario: str | None = Field(None, description="scenario of a request that names none")
    capture_top_k: int = Field(
        0, ge=0, description="most likely ids recorded with every token, at least; score centering needs its top_k"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="how long the sampling of one chat request may take")
    max_chats: int = Field(1024, ge=1, description="chats answered at once; one more is told to try again")
