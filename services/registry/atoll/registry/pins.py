"""Versions whose bytes an operator wants to keep."""

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import NotFound
from atoll.registry import tables
from atoll.registry.artifact_rows import check_artifacts
from atoll.registry.database import Database
from atoll.registry.restoring import not_restorable
from atoll.registry.scenario_lock import lock_scenario
from atoll.registry.version_rows import select_versions

_PINS = tables.pins
_VERSIONS = tables.versions


class Pins:
    """Sets and takes away pins."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(self, scenario: str, number: int, *, pinned: bool) -> None:
        """Keeps a version's bytes from retention, or lets them go again.

        Raises NotFound(SCENARIO_NOT_FOUND, VERSION_NOT_FOUND) and Conflict(NOT_RESTORABLE) when the bytes are gone.
        """
        mine = (_PINS.c.scenario_id == scenario) & (_PINS.c.number == number)
        with self._database.write() as connection:
            head = lock_scenario(connection, scenario).head
            found = select_versions(connection, scenario, _VERSIONS.c.number == number)
            if not found:
                raise NotFound(
                    f"scenario {scenario}: there is no version {number}; the head is version {head}",
                    reason=errors_pb2.REASON_VERSION_NOT_FOUND,
                    field="number",
                )
            if not pinned:
                connection.execute(_PINS.delete().where(mine))
                return
            try:
                check_artifacts(connection, found[0].content.model_digest, found[0].content.checkpoint_digest)
            except NotFound as error:
                raise not_restorable(scenario, number, error.message, "number") from None
            if connection.execute(sa.select(_PINS).where(mine)).one_or_none() is None:
                connection.execute(_PINS.insert().values(scenario_id=scenario, number=number))
