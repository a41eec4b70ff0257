"""google.protobuf.Struct as plain JSON, and back. Numbers are float64 on both sides."""

import math

from atoll.common.errors import InvalidInput
from atoll.registry.types import JsonObject
from google.protobuf import struct_pb2
from pydantic import JsonValue


def from_struct(struct: struct_pb2.Struct, field: str) -> JsonObject:
    """Raises InvalidInput for a number that is not finite or a value that is not set: JSON has neither."""
    return {key: _from_value(value, f"{field}.{key}") for key, value in struct.fields.items()}


def to_struct(value: JsonObject) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(value)
    return struct


def normalized(value: JsonObject, field: str) -> JsonObject:
    """The same object as it would come over the wire. Raises InvalidInput."""
    return from_struct(to_struct(value), field)


def _from_value(value: struct_pb2.Value, field: str) -> JsonValue:
    match value.WhichOneof("kind"):
        case "null_value":
            return None
        case "number_value":
            if not math.isfinite(value.number_value):
                raise InvalidInput(f"{field} is {value.number_value}, expected a finite number", field=field)
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return dict(from_struct(value.struct_value, field))
        case "list_value":
            return [_from_value(item, f"{field}[{i}]") for i, item in enumerate(value.list_value.values)]
    raise InvalidInput(f"{field} has no value", field=field)
