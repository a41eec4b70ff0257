"""Plain values inside messages: JSON as google.protobuf.Struct and Value and back, times as Timestamp.

A Struct's numbers are all doubles. Whole numbers come back as the int that was written, so that strict options take
them and the same body is the same value over HTTP and gRPC.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime

from atoll.common.errors import InvalidInput
from google.protobuf import struct_pb2, timestamp_pb2
from pydantic import JsonValue

MAX_EXACT = 2**53
"""Above it, neighbouring integers share a double: such a number stays a float."""

MAX_DEPTH = 28
"""Deeper values are refused: protobuf's parsers stop at 100 nested messages, and a level of a Struct takes three."""


def object_of(struct: struct_pb2.Struct, field: str = "") -> dict[str, JsonValue]:
    """The JSON object of a Struct. Raises InvalidInput naming `field` for a number that is not finite."""
    return {key: _plain(item, f"{field}.{key}" if field else key, 1) for key, item in struct.fields.items()}


def value_of(value: struct_pb2.Value, field: str = "") -> JsonValue:
    """The JSON value of a Value, None when it is unset. Raises InvalidInput like `object_of`."""
    return _plain(value, field, 1)


def struct_from(value: Mapping[str, JsonValue], field: str = "") -> struct_pb2.Struct:
    """The Struct of a JSON object. Raises InvalidInput for what JSON has not."""
    return struct_pb2.Struct(fields={key: _message(item, f"{field}.{key}", 1) for key, item in value.items()})


def value_from(value: JsonValue, field: str = "") -> struct_pb2.Value:
    """The Value of a JSON value."""
    return _message(value, field, 1)


def timestamp_from(moment: datetime) -> timestamp_pb2.Timestamp:
    """The Timestamp of a timezone-aware time, to the microsecond."""
    stamp = timestamp_pb2.Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def check_depth(value: JsonValue, field: str = "") -> None:
    """Raises InvalidInput for a JSON value that no Struct can carry."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    _check_depth(field or "the value", MAX_DEPTH + 1)


def check_json(value: JsonValue, field: str = "") -> None:
    """Raises InvalidInput, naming the place, for what Python's values may be and JSON's not: a number that is not
    finite, a text with half of a surrogate pair. However deeply the value is nested."""
    todo: list[Iterator[tuple[JsonValue, str]]] = [iter([(value, field)])]
    while todo:
        entry = next(todo[-1], None)
        if entry is None:
            todo.pop()
            continue
        item, path = entry
        where = path or "the body"
        if isinstance(item, float) and not math.isfinite(item):
            raise InvalidInput(f"{where} is {item}, expected a finite number", field=path)
        if isinstance(item, str) and not _is_unicode(item):
            raise InvalidInput(f"{where} holds half of a surrogate pair, expected Unicode text", field=path)
        if isinstance(item, dict):
            for key in item:
                if not _is_unicode(key):
                    raise InvalidInput(f"a key of {where} holds half of a surrogate pair", field=path)
        if isinstance(item, dict | list):
            todo.append(_children(item, path))


def normalized(value: JsonValue) -> JsonValue:
    """The value as it would come back from a Value: 4.0 is 4."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return _whole(float(value)) if abs(value) < MAX_EXACT else float(value)
    if isinstance(value, list):
        return [normalized(item) for item in value]
    return {key: normalized(item) for key, item in value.items()}


def _children(item: dict[str, JsonValue] | list[JsonValue], path: str) -> Iterator[tuple[JsonValue, str]]:
    for key, child in item.items() if isinstance(item, dict) else enumerate(item):
        yield child, f"{path}.{key}" if path else str(key)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() and abs(number) < MAX_EXACT else number


def _plain(value: struct_pb2.Value, field: str, depth: int) -> JsonValue:
    _check_depth(field, depth)
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        return _whole(_finite(value.number_value, field))
    if kind == "string_value":
        return value.string_value
    if kind == "bool_value":
        return value.bool_value
    if kind == "struct_value":
        return {key: _plain(item, f"{field}.{key}", depth + 1) for key, item in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(item, f"{field}.{index}", depth + 1) for index, item in enumerate(value.list_value.values)]
    return None


def _message(value: JsonValue, field: str, depth: int) -> struct_pb2.Value:
    _check_depth(field, depth)
    if value is None:
        return struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)
    if isinstance(value, bool):
        return struct_pb2.Value(bool_value=value)
    if isinstance(value, int | float):
        return struct_pb2.Value(number_value=_finite(value, field))
    if isinstance(value, str):
        return struct_pb2.Value(string_value=value)
    if isinstance(value, list):
        items = [_message(item, f"{field}.{index}", depth + 1) for index, item in enumerate(value)]
        return struct_pb2.Value(list_value=struct_pb2.ListValue(values=items))
    fields = {key: _message(item, f"{field}.{key}", depth + 1) for key, item in value.items()}
    return struct_pb2.Value(struct_value=struct_pb2.Struct(fields=fields))


def _finite(number: float, field: str) -> float:
    try:
        as_double = float(number)
    except OverflowError:
        as_double = math.inf
    if not math.isfinite(as_double):
        raise InvalidInput(f"{field} is {number}, expected a finite number", field=field)
    return as_double


def _check_depth(field: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        where = field if len(field) <= 80 else field[:80] + "..."
        raise InvalidInput(f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it", field=where)
