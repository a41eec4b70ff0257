"""Options: the same from YAML keys and from flags, and every refusal by name."""

import math

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.options import FamilyOptions
from pydantic import Field, JsonValue


class Knobs(FamilyOptions):
    width: int = Field(default=3, ge=1)
    rate: float = 0.5
    limit: float | None = None
    warm: bool = False


def refused(values: dict[str, JsonValue]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        Knobs.from_mapping("demo", values)
    return caught.value


def test_flags_and_keys_give_equal_options() -> None:
    from_keys = Knobs.from_mapping("demo", {"width": 5, "rate": 1, "limit": 2.5, "warm": True})
    flags = ["--demo-width", "5", "--demo-rate=1", "--demo-limit", "2.5", "--demo-warm"]
    given, rest = Knobs.values_from_flags("demo", ["serve", *flags, "--other", "x"])
    assert given == {"width": 5, "rate": 1, "limit": 2.5, "warm": True}
    from_flags = Knobs.from_mapping("demo", given)
    assert from_flags == from_keys
    assert rest == ["serve", "--other", "x"]
    assert from_flags.canonical_json() == '{"limit":2.5,"rate":1.0,"warm":true,"width":5}'


def test_a_negative_number_is_the_value_of_its_flag() -> None:
    assert Knobs.values_from_flags("demo", ["--demo-rate", "-1.5"])[0] == {"rate": -1.5}


def test_a_flag_can_take_a_value_back_to_none_or_false() -> None:
    given, _ = Knobs.values_from_flags("demo", ["--demo-limit", "none", "--demo-warm", "false"])
    assert given == {"limit": None, "warm": False}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"width": "5"}, "width"),
        ({"width": 2.5}, "width"),
        ({"width": 0}, "width"),
        ({"rate": True}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"warm": 1}, "warm"),
        ({"limit": [1]}, "limit"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(values: dict[str, JsonValue], field: str) -> None:
    error = refused(values)
    assert error.field == field
    assert error.reason == errors_pb2.REASON_INVALID_FIELD
    assert f"demo: {field}: " in error.message
    assert "got " in error.message


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    error = refused({"widht": 5})
    assert error.field == "widht"
    assert error.reason == errors_pb2.REASON_UNKNOWN_FIELD
    assert "did you mean width?" in error.message


@pytest.mark.parametrize(
    ("argv", "field", "message"),
    [
        (["--demo-wdth", "5"], "--demo-wdth", "did you mean --demo-width?"),
        (["--demo-width"], "--demo-width", "needs a value"),
        (["--demo-width", "--demo-warm"], "--demo-width", "needs a value"),
        (["--demo-width", "many"], "--demo-width", "many"),
        (["--demo-width", "1", "--demo-width", "2"], "--demo-width", "given twice"),
    ],
)
def test_a_bad_flag_is_refused_by_name(argv: list[str], field: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Knobs.values_from_flags("demo", argv)
    assert caught.value.field == field
    assert message in caught.value.message
