"""Reads a request body: strict JSON, with the offending field named where there is one.

>>> parse_object(b'{"score": 1.5}')
{'score': 1.5}
"""

import json

import orjson
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.common.structs import check_json
from pydantic import JsonValue


def parse_object(body: bytes) -> dict[str, JsonValue]:
    """The JSON object in a body.

    Raises InvalidInput: INVALID_JSON, or INVALID_FIELD naming a number that is not finite or a text that is not
    Unicode, neither of which JSON has and both of which common writers produce.
    """
    try:
        value: JsonValue = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _parse_loosely(body, error)
        check_json(value)
    if not isinstance(value, dict):
        raise InvalidInput(
            f"the body is a JSON {type(value).__name__}, expected an object", reason=errors_pb2.REASON_INVALID_JSON
        )
    return value


def _parse_loosely(body: bytes, reason: orjson.JSONDecodeError) -> JsonValue:
    """Reads NaN, Infinity and halves of characters, so that the refusal can say where they stand."""
    try:
        value: JsonValue = json.loads(body)
    except RecursionError:
        raise InvalidInput("the body is nested too deeply", reason=errors_pb2.REASON_INVALID_JSON) from None
    except ValueError:
        raise InvalidInput(f"the body is not JSON: {reason}", reason=errors_pb2.REASON_INVALID_JSON) from None
    return value
