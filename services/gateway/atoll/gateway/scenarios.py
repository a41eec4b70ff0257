"""What the registry says about scenarios, kept in memory."""

from dataclasses import dataclass

from atoll.families.catalog import AnyFamily


@dataclass(frozen=True)
class BoundScenario:
    """A scenario and its family. Example: BoundScenario("math", "grpo", family, max_staleness=0)"""

    scenario_id: str
    family_reference: str
    """As the registry names it."""
    family: AnyFamily
    max_staleness: int


@dataclass(frozen=True)
class Head:
    """The newest version of a scenario. Example: Head(number=3, weight_version="1:3", parent_weight_version="1:2")"""

    number: int
    weight_version: str
    parent_weight_version: str | None


class ScenarioDirectory:
    """Bindings never change, so they are asked for once; heads are followed with WatchVersions."""

    async def get(self, scenario: str) -> BoundScenario:
        """Raises NotFound(SCENARIO_NOT_FOUND), Unavailable."""
        raise NotImplementedError

    async def list(self) -> list[BoundScenario]:
        """Every scenario, by id. Raises Unavailable."""
        raise NotImplementedError

    def head(self, scenario: str) -> Head | None:
        """The newest version as last heard; None before the registry has answered."""
        raise NotImplementedError
