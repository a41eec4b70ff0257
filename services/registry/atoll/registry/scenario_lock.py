"""The row lock of a scenario: it orders its commits, leases and job records, in whatever process they happen."""

from dataclasses import dataclass

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import NotFound
from atoll.registry import tables

_SCENARIOS = tables.scenarios


@dataclass(frozen=True)
class Position:
    """Where a scenario's chain is. Example: Position(head=3, incarnation=1, revision=4)."""

    head: int
    incarnation: int
    revision: int


def lock_scenario(connection: sa.Connection, scenario: str) -> Position:
    """Where the chain is, and stays until this transaction ends. Raises NotFound(SCENARIO_NOT_FOUND)."""
    return _position(connection, scenario, lock=True)


def find_scenario(connection: sa.Connection, scenario: str) -> Position:
    """Where the chain is now. Raises NotFound(SCENARIO_NOT_FOUND)."""
    return _position(connection, scenario, lock=False)


def scenario_not_found(scenario: str) -> NotFound:
    return NotFound(
        f"no scenario {scenario[:80]!r}; create it first",
        reason=errors_pb2.REASON_SCENARIO_NOT_FOUND,
        field="scenario",
    )


def _position(connection: sa.Connection, scenario: str, *, lock: bool) -> Position:
    query = sa.select(_SCENARIOS.c.head, _SCENARIOS.c.incarnation, _SCENARIOS.c.revision).where(
        _SCENARIOS.c.scenario_id == scenario
    )
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise scenario_not_found(scenario)
    return Position(row.head, row.incarnation, row.revision)
