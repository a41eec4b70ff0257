import pytest
from atoll.common.errors import InvalidInput
from atoll.common.names import check_id, new_id


def test_fresh_ids_are_valid_and_differ() -> None:
    assert check_id(new_id(), "receipt") != new_id()


@pytest.mark.parametrize("bad", ["", "A", "a b", "a/b", "a" * 64, "a\n", "é", "../x"])
def test_an_id_outside_the_alphabet_is_refused_with_its_field(bad: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        check_id(bad, "scenario_id")
    assert refusal.value.field == "scenario_id"
