"""The part of OpenAI's chat completion request that the gateway answers; everything else is refused by name.

Example: ChatRequest(model="math", messages=[{"role": "user", "content": "2+2?"}], temperature=0.7, n=2)
"""

from typing import Annotated, Literal

from atoll.gateway.schema_errors import LIST, TEXT, kind_of
from pydantic import BaseModel, ConfigDict, Discriminator, Field, model_validator

ROLES = ("developer", "system", "user", "assistant")


class _Strict(BaseModel):
    """No coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TextPart(_Strict):
    """Example: {"type": "text", "text": "2+2?"}"""

    type: Literal["text"]
    text: str


Content = Annotated[Annotated[str, TEXT] | Annotated[list[TextPart], LIST, Field(min_length=1)], Discriminator(kind_of)]
Stop = Annotated[Annotated[str, TEXT] | Annotated[list[str], LIST], Discriminator(kind_of)]


class ChatMessage(_Strict):
    """One turn. `developer` is OpenAI's newer word for `system` and rendered as that."""

    role: Literal["developer", "system", "user", "assistant"]
    content: Content

    @property
    def template_message(self) -> dict[str, str]:
        """What the chat template sees. Parts are joined by line breaks: templates of text models take one text."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Strict):
    """Example: {"include_usage": true}"""

    include_usage: bool = False


class ChatRequest(_Strict):
    """Body of POST /v1/chat/completions. Defaults are OpenAI's: what is sampled does not depend on the model's files.

    `model` is a scenario or `<scenario>@<version number>`. Without a limit the answer ends with the context.
    """

    model: str | None = Field(None, min_length=1, max_length=128)
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = Field(None, max_length=256)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )

    @property
    def token_limit(self) -> int | None:
        """Most tokens to sample, None when the request sets no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def logit_bias_by_id(self) -> dict[int, float]:
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    @model_validator(mode="after")
    def _values_fit_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit: give one")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if len(self.stop_strings) > 4 or "" in self.stop_strings:
            raise ValueError("stop takes one to four texts that are not empty")
        if any(not (token.isascii() and token.isdigit() and len(token) < 10) for token in self.logit_bias or {}):
            raise ValueError("logit_bias maps token ids, written as texts of digits, to numbers")
        return self
