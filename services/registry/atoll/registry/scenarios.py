"""Scenarios: created once, with version 0 and its bytes, before any traffic."""

from pathlib import Path

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput
from atoll.common.names import check_id
from atoll.common.weight_version import WeightVersion
from atoll.registry import base_model, tables
from atoll.registry.artifact_rows import check_artifacts
from atoll.registry.artifacts import Artifacts
from atoll.registry.database import Database
from atoll.registry.family_name import check_family
from atoll.registry.manifest import describe
from atoll.registry.room import needs_room
from atoll.registry.scenario_lock import scenario_not_found
from atoll.registry.types import (
    Artifact,
    Kind,
    Operation,
    Scenario,
    ScenarioDefinition,
    Version,
    VersionContent,
    utc_now,
)
from atoll.registry.version_rows import insert_version

_ROWS = tables.scenarios
IMPORT_AREA = ".import"
"""The staging area of base models: no caller's id can begin with a dot, and one import runs at a time."""

MAX_STALENESS = 1_000_000
FIRST_INCARNATION = 1


class Scenarios:
    """Creates and finds scenarios."""

    def __init__(self, database: Database, artifacts: Artifacts) -> None:
        self._database = database
        self._artifacts = artifacts

    def create(self, definition: ScenarioDefinition) -> Scenario:
        """Imports the base model, seals it, then creates the scenario with version 0 in one transaction.

        Raises InvalidInput, Conflict(SCENARIO_EXISTS, BASE_MODEL_UNUSABLE), AtollError(STORAGE_FULL).
        """
        check_id(definition.scenario_id, "scenario_id")
        check_family(definition.family)
        if not definition.base_model:
            raise InvalidInput("base_model is empty, expected a model directory", field="base_model")
        if not 0 <= definition.max_staleness <= MAX_STALENESS:
            raise InvalidInput(
                f"max_staleness is {definition.max_staleness}, expected 0..{MAX_STALENESS}", field="max_staleness"
            )
        known = self._find(definition.scenario_id)
        if known is not None:
            return _same(known, definition)
        with self._artifacts.store.importing():
            model = self._import(Path(definition.base_model))
        return self._insert(definition, model)

    def get(self, scenario_id: str) -> Scenario:
        """Raises NotFound(SCENARIO_NOT_FOUND)."""
        scenario = self._find(scenario_id)
        if scenario is None:
            raise scenario_not_found(scenario_id)
        return scenario

    def list_page(self, limit: int, after: str | None) -> tuple[Scenario, ...]:
        """At most `limit` scenarios by id, from the first one after `after`."""
        later = sa.true() if after is None else _ROWS.c.scenario_id > after
        with self._database.read() as connection:
            query = sa.select(_ROWS).where(later).order_by(_ROWS.c.scenario_id).limit(limit)
            return tuple(_scenario(row) for row in connection.execute(query))

    def _find(self, scenario_id: str) -> Scenario | None:
        with self._database.read() as connection:
            row = connection.execute(sa.select(_ROWS).where(_ROWS.c.scenario_id == scenario_id)).one_or_none()
        return None if row is None else _scenario(row)

    def _import(self, source: Path) -> Artifact:
        base_model.model_files(source)  # refuse before anything is written
        store = self._artifacts.store
        target = store.stage(IMPORT_AREA, Kind.MODEL)
        try:
            with needs_room(f"the store {store.root}"):
                base_model.copy_model(source, target)
            return self._artifacts.seal(IMPORT_AREA, describe(target))
        except Exception:
            store.abandon(IMPORT_AREA)
            raise

    def _insert(self, definition: ScenarioDefinition, model: Artifact) -> Scenario:
        now = utc_now()
        scenario = Scenario(definition, head=0, created_at=now)
        content = VersionContent(
            scenario=definition.scenario_id,
            job_id=None,
            parent=None,
            operation=Operation.CREATION,
            family=definition.family,
            model_digest=model.digest,
            checkpoint_digest=None,
            consumed_sample_ids=(),
            metrics={},
            family_state={},
        )
        version = Version(content, 0, WeightVersion(FIRST_INCARNATION, 0), revision=1, created_at=now)
        try:
            with self._database.write() as connection:
                check_artifacts(connection, content.model_digest, None)
                connection.execute(
                    _ROWS.insert().values(
                        scenario_id=definition.scenario_id,
                        family=definition.family,
                        options=dict(definition.options),
                        base_model=definition.base_model,
                        max_staleness=definition.max_staleness,
                        incarnation=FIRST_INCARNATION,
                        head=version.number,
                        revision=version.revision,
                        created_at=now,
                    )
                )
                insert_version(connection, version)
        except sa.exc.IntegrityError:
            # Another call created it since we looked.
            return _same(self.get(definition.scenario_id), definition)
        return scenario


def _same(known: Scenario, definition: ScenarioDefinition) -> Scenario:
    if known.definition == definition:
        return known
    pairs = {
        "family": (known.definition.family, definition.family),
        "options": (known.definition.options, definition.options),
        "base_model": (known.definition.base_model, definition.base_model),
        "max_staleness": (known.definition.max_staleness, definition.max_staleness),
    }
    differing = "; ".join(f"{name} is {one!r}, given {other!r}" for name, (one, other) in pairs.items() if one != other)
    raise Conflict(
        f"scenario {definition.scenario_id} exists with another definition: {differing}; choose another id",
        reason=errors_pb2.REASON_SCENARIO_EXISTS,
        field="scenario_id",
    )


def _scenario(row: sa.Row[tuple[object, ...]]) -> Scenario:
    values = row._mapping
    definition = ScenarioDefinition(
        scenario_id=values["scenario_id"],
        family=values["family"],
        options=values["options"],
        base_model=values["base_model"],
        max_staleness=values["max_staleness"],
    )
    return Scenario(definition, values["head"], values["created_at"])
