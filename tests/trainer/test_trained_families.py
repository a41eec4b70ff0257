"""What a checkpoint remembers of families: every one's state, in this format and the one before."""

import pytest
from atoll.common.errors import InternalError
from atoll.trainer.trained_families import TrainedFamily, driver_state, read_driver_state


def test_what_is_written_is_read_back_and_equal_states_are_equal_bytes() -> None:
    sdft = TrainedFamily({}, {"teacher_tokens": "int32"}, distills=True, reference="my_pkg.losses:Mine")
    sao = TrainedFamily({"jobs": 3})
    data = driver_state({"sdft": sdft, "sao": sao})
    assert read_driver_state(data) == {"sdft": sdft, "sao": sao}
    assert driver_state({"sao": sao, "sdft": sdft}) == data


def test_the_state_of_a_run_of_one_family_still_loads() -> None:
    data = b'{"family":"sao","family_state":{"jobs":3},"format":1}'
    assert read_driver_state(data) == {"sao": TrainedFamily({"jobs": 3})}


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"format":3,"families":{}}', b'{"format":1,"family":"sao"}'])
def test_a_state_that_was_not_written_here_is_refused(data: bytes) -> None:
    with pytest.raises(InternalError, match="not of format 1 or 2"):
        read_driver_state(data)
