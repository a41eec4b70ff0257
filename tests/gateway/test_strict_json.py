"""JSON as the standard has it, and refusals that say where it is not."""

import json

import pytest
from atoll.common.errors import InvalidInput
from atoll.gateway.strict_json import parse_object
from hypothesis import given
from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Halves of surrogate pairs are text in Python and not in JSON.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON_VALUES))
def test_every_object_comes_back_as_it_was(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": {"b": [1, NaN]}}', "a.b.1"),
        (b'{"a": -Infinity}', "a"),
        (b'{"a": 1e400}', "a"),
        (b'{"a": ["x", "\\udc00"]}', "a.1"),
        (b'{"a": ' + b"[" * 900 + b"NaN" + b"]" * 900 + b"}", "a" + ".0" * 900),
    ],
)
def test_what_json_does_not_have_is_named_by_its_place(body: bytes, field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_object(body)
    assert refusal.value.field == field and refusal.value.code == "invalid_field"


@pytest.mark.parametrize("body", [b"", b"nonsense", b'{"a": 1,}', b"[]", b"1", b"null", b"\x00", b"{" * 5000])
def test_what_is_not_an_object_is_invalid_json(body: bytes) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_object(body)
    assert refusal.value.code == "invalid_json"
