"""From pydantic's findings to one refusal that names the field."""

from collections.abc import Sequence
from typing import TypeVar

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from pydantic import BaseModel, JsonValue, Tag, ValidationError

M = TypeVar("M", bound=BaseModel)

TEXT, LIST, OBJECT = Tag("<text>"), Tag("<list>"), Tag("<object>")
"""Tags of a union's members. Pydantic puts them into the path of a finding, and the brackets tell them from fields."""


def kind_of(value: object) -> str:
    """Discriminator of a union by JSON type; anything that is neither a list nor an object is held to be a text."""
    if isinstance(value, list):
        return LIST.tag
    return OBJECT.tag if isinstance(value, dict) else TEXT.tag


def validated(schema: type[M], body: dict[str, JsonValue]) -> M:
    """The body as the schema's object. Raises InvalidInput with the first finding, UNKNOWN_FIELD before others."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        findings = error.errors(include_url=False, include_context=False)
    for finding in findings:
        if finding["type"] == "extra_forbidden":
            field = dotted(finding["loc"])
            raise InvalidInput(
                f"{field} is not a field of this request", field=field, reason=errors_pb2.REASON_UNKNOWN_FIELD
            )
    first = findings[0]
    field = dotted(first["loc"])
    if first["type"] == "missing":
        raise InvalidInput(f"{field} is missing", field=field)
    problem = first["msg"].removeprefix("Value error, ")
    given = repr(first["input"])
    shown = given if len(given) <= 80 else given[:77] + "..."
    raise InvalidInput(f"{field}: {problem}; got {shown}" if field else problem, field=field)


def dotted(location: Sequence[int | str]) -> str:
    """Example: ("messages", 0, "content", "<text>") becomes "messages.0.content"."""
    return ".".join(str(part) for part in location if not str(part).startswith(("<", "[key]")))
