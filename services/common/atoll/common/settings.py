"""Settings from environment variables, checked before anything starts."""

import os
from typing import TypeVar

from atoll.common.errors import BadConfiguration
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError


class ServiceSettings(BaseSettings):
    """What every service has. A subclass sets `env_prefix`, e.g. ATOLL_REGISTRY_."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on")
    token: SecretStr | None = Field(
        None,
        validation_alias="ATOLL_TOKEN",
        description="bearer token that callers send and that calls carry",
    )
    log_level: str = Field("info", validation_alias="ATOLL_LOG_LEVEL")

    @property
    def token_text(self) -> str | None:
        """The token, None when there is none. An empty variable is an error, not an open door."""
        return None if self.token is None else self.token.get_secret_value()


S = TypeVar("S", bound=ServiceSettings)


def load_settings(kind: type[S]) -> S:
    """Reads the settings from the environment.

    Raises BadConfiguration naming every variable that is missing, ill-typed or unknown under the prefix.
    """
    prefix = str(kind.model_config.get("env_prefix", ""))
    known = {prefix + name.upper() for name, field in kind.model_fields.items() if field.validation_alias is None}
    problems = [
        f"{name}: no such setting; known: {', '.join(sorted(known))}"
        for name in sorted(os.environ)
        if prefix and name.startswith(prefix) and name not in known
    ]
    try:
        settings = kind()
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            path = ".".join(str(part) for part in item["loc"])
            name = path if path.isupper() else prefix + path.upper()
            problems.append(f"{name}: {item['msg']}")
        raise BadConfiguration("; ".join(problems)) from None
    except SettingsError as error:
        # Only its words tell which value it could not read.
        field = next((name for name in kind.model_fields if f'"{name}"' in str(error)), "")
        problems.append(f"{prefix}{field.upper()}: is not JSON, as lists and objects must be: {error.__cause__}")
        raise BadConfiguration("; ".join(problems)) from None
    if settings.token_text is not None and not settings.token_text.strip():
        problems.append("ATOLL_TOKEN: is empty; give it a value or unset it")
    if problems:
        raise BadConfiguration("; ".join(problems))
    return settings
