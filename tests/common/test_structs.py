"""JSON survives the way through a Struct, and what JSON has not is refused by its path."""

import pytest
from atoll.api.gateway.v1 import sample_pb2, sample_service_pb2
from atoll.common.errors import InvalidInput
from atoll.common.structs import MAX_DEPTH, check_depth, normalized, object_of, struct_from, value_from, value_of
from google.protobuf import struct_pb2
from pydantic import JsonValue

BODY: dict[str, JsonValue] = {
    "group": "q17",
    "n": 4,
    "x": 0.1,
    "big": 1e300,
    "yes": True,
    "none": None,
    "list": [1, -2, 2.5, {"deep": []}],
}


def test_an_object_comes_back_as_it_was_written_with_whole_numbers_as_ints() -> None:
    back = object_of(struct_pb2.Struct.FromString(struct_from(BODY).SerializeToString()))
    assert back == BODY
    assert type(back["n"]) is int and type(back["x"]) is float and type(back["big"]) is float


def test_an_unset_value_is_none() -> None:
    assert value_of(struct_pb2.Value()) is None
    assert value_of(value_from("text")) == "text"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_number_that_is_not_finite_is_refused_by_its_path(number: float) -> None:
    with pytest.raises(InvalidInput) as refusal:
        struct_from({"a": [1, {"b": number}]}, "metadata")
    assert refusal.value.field == "metadata.a.1.b"


def test_a_message_with_nan_inside_is_refused() -> None:
    struct = struct_pb2.Struct()
    struct.fields["a"].number_value = float("nan")
    with pytest.raises(InvalidInput) as refusal:
        object_of(struct, "metadata")
    assert refusal.value.field == "metadata.a"


def test_values_nested_too_deeply_are_refused_both_ways() -> None:
    deep: JsonValue = 1
    message = struct_pb2.Value(number_value=1)
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
        message = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[message]))
    with pytest.raises(InvalidInput, match="nested"):
        value_from(deep, "feedback")
    with pytest.raises(InvalidInput, match="nested"):
        value_of(message, "feedback")
    with pytest.raises(InvalidInput, match="nested"):
        check_depth(deep, "feedback")


def test_the_deepest_value_that_is_allowed_passes_through_a_message_inside_messages() -> None:
    deep: JsonValue = 1
    for _ in range(MAX_DEPTH - 1):
        deep = {"a": deep}
    check_depth(deep)
    sample = sample_pb2.Sample(request=struct_from({"a": deep}))
    piece = sample_service_pb2.ReadBatchResponse(row=sample_service_pb2.RowHeader(sample=sample))
    back = sample_service_pb2.ReadBatchResponse.FromString(piece.SerializeToString())
    assert object_of(back.row.sample.request) == {"a": deep}


def test_normalized_is_what_a_round_trip_makes() -> None:
    body: JsonValue = {"a": 4.0, "b": [2**60, 1.5, True], "c": None}
    back = value_of(value_from(body))
    assert normalized(body) == back
    assert isinstance(back, dict) and [type(back["a"]), back["b"][2]] == [int, True]  # type: ignore[index]
