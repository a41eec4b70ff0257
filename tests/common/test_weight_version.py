import pytest
from atoll.common.errors import InvalidInput
from atoll.common.weight_version import WeightVersion


def test_a_weight_version_reads_back_what_it_writes() -> None:
    assert WeightVersion.parse("12:0") == WeightVersion(incarnation=12, number=0)
    assert str(WeightVersion(1, 7)) == "1:7"


@pytest.mark.parametrize(
    "text", ["", "1", "1:", ":1", "0:1", "01:2", "1:02", "1:-1", "1:2 ", "1:2\n", "a:b", "1:2:3", "\u0661:\u0662"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"expected <incarnation>:<number>"):
        WeightVersion.parse(text)
