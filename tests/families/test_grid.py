"""Grids: nothing forms before the last cell, whatever the order of arrival, and cells are checked on arrival."""

import random
from dataclasses import replace

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput
from atoll.families.batching import ReportView
from atoll.families.grid import Grid
from pydantic import JsonValue

from tests.families.rows import make_report

RULE = Grid(groups_per_step=2, rollouts_per_group=3)


def cell(step: int, group: int, rollout: int, *, suffix: str = "", version: str = "1:3", at: int = 0) -> ReportView:
    metadata: dict[str, JsonValue] = {
        "step": step,
        "group": group,
        "rollout": rollout,
        "groups_per_step": 2,
        "rollouts_per_group": 3,
    }
    report = make_report(f"{step}-{group}-{rollout}{suffix}", at=at)
    return replace(report, metadata=metadata, weight_versions=(version,))


def grid(step: int, *, suffix: str = "", version: str = "1:3", at: int = 0) -> list[ReportView]:
    return [cell(step, g, r, suffix=suffix, version=version, at=at) for g in range(2) for r in range(3)]


def ids(step: int, suffix: str = "") -> tuple[str, ...]:
    return tuple(f"{step}-{g}-{r}{suffix}" for g in range(2) for r in range(3))


def test_the_last_cell_completes_the_grid_whatever_the_order() -> None:
    cells = grid(0)
    for seed in range(10):
        shuffled = random.Random(seed).sample(cells, len(cells))
        assert RULE.form(shuffled[:5]) == []
        assert RULE.form(shuffled) == [ids(0)]


def test_a_cell_of_another_step_fills_no_hole() -> None:
    assert RULE.form([*grid(0)[:5], cell(1, 1, 2)]) == []
    assert RULE.form([*grid(1), *grid(0), cell(2, 0, 0)]) == [ids(0), ids(1)]


def test_a_second_report_of_a_cell_waits_for_another_grid_of_the_step() -> None:
    twice = [*grid(0), cell(0, 0, 0, suffix="x", at=1)]
    assert RULE.form(twice) == [ids(0)]
    assert RULE.form([*grid(0), *grid(0, suffix="x", at=1)]) == [ids(0), ids(0, "x")]


def test_a_grid_of_one_version_is_not_completed_by_another_version() -> None:
    mixed = [*grid(0)[:5], cell(0, 1, 2, version="1:4")]
    assert RULE.form(mixed) == [ids(0)]
    strict = replace(RULE, one_version=True)
    assert strict.form(mixed) == []
    assert strict.form([*mixed, *grid(0, suffix="x", version="1:4", at=1)[:5]]) == [
        ("0-0-0x", "0-0-1x", "0-0-2x", "0-1-0x", "0-1-1x", "0-1-2")
    ]


def test_a_grid_that_lost_a_cell_is_dropped_whole_and_other_grids_stay() -> None:
    started = [report for report in grid(0) if report.report_id != ids(0)[-1]]
    other = grid(1)
    later = cell(0, 0, 0, suffix="-again", at=9)
    dropped = RULE.dropped_with({started[0].report_id}, [*other, later, *started])
    assert dropped == {report.report_id: started[0].report_id for report in started[1:]}
    assert RULE.dropped_with(set(), [*other, *started]) == {}


def test_rollouts_of_a_group_share_its_name_and_steps_do_not() -> None:
    assert RULE.group_of(cell(4, 1, 0)) == RULE.group_of(cell(4, 1, 2)) == "step-4-group-1"
    assert RULE.group_of(cell(5, 1, 0)) != RULE.group_of(cell(4, 1, 0))


def test_a_good_cell_is_accepted() -> None:
    RULE.validate(cell(0, 1, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None),
        ("step", -1),
        ("step", 1.5),
        ("step", True),
        ("step", "3"),
        ("group", None),
        ("group", 2),
        ("group", -1),
        ("rollout", 3),
        ("rollout", False),
        ("groups_per_step", 3),
        ("groups_per_step", None),
        ("rollouts_per_group", 2),
        ("rollouts_per_group", 0),
    ],
)
def test_a_bad_cell_is_refused(name: str, value: JsonValue) -> None:
    good = cell(0, 0, 0)
    metadata = {key: item for key, item in {**good.metadata, name: value}.items() if item is not None}
    with pytest.raises(InvalidInput, match=rf"metadata\.{name}: ") as caught:
        RULE.validate(replace(good, metadata=metadata))
    assert caught.value.field == f"metadata.{name}"
    assert caught.value.reason == errors_pb2.REASON_REPORT_REFUSED


def test_a_cell_without_score_is_refused() -> None:
    with pytest.raises(InvalidInput, match="score: a number within"):
        RULE.validate(replace(cell(0, 0, 0), score=None))


def test_a_rollout_of_too_many_receipts_is_refused_where_that_is_limited() -> None:
    report = replace(cell(0, 0, 0), receipts=("a", "b"))
    RULE.validate(report)
    with pytest.raises(InvalidInput, match="receipts: at most 1 expected, got 2"):
        replace(RULE, max_receipts=1).validate(report)
