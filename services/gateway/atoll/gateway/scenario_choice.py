"""Which scenario, and which of its versions, a request means."""

from dataclasses import dataclass

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput, NotFound
from atoll.common.names import check_id
from atoll.gateway.scenarios import ScenarioDirectory

HEADER = "x-atoll-scenario"


@dataclass(frozen=True)
class ScenarioChoice:
    """Example: "math@3" in the model field is ScenarioChoice("math", 3, "model")."""

    scenario: str
    number: int | None
    """The version that must answer; None takes the one being served."""
    field: str
    """What named it, for refusals."""


def choose_scenario(header: str | None, model: str | None, default: str | None) -> ScenarioChoice:
    """The header, else the model field, else the deployment's default.

    With a header the model field may be anything (clients must send one), but `<scenario>@<version>` still pins.
    Raises InvalidInput when nothing names a scenario, NotFound for a name that none can have.
    """
    named, at, number = (model or "").partition("@")
    if header is not None:
        if at and named != header:
            raise InvalidInput(
                f"model is {model!r} and the header {HEADER} is {header!r}: name one scenario", field="model"
            )
        scenario, field = header, HEADER
    elif model is not None:
        scenario, field = named, "model"
    elif default is not None:
        scenario, field = default, "model"
    else:
        raise InvalidInput("model is missing: name a scenario; GET /v1/models lists them", field="model")
    try:
        check_id(scenario, field)
    except InvalidInput:
        shown = scenario if len(scenario) <= 80 else scenario[:80] + "..."
        raise NotFound(
            f"no scenario {shown!r}; GET /v1/models lists them",
            reason=errors_pb2.REASON_SCENARIO_NOT_FOUND,
            field=field,
        ) from None
    if at and not (number.isascii() and number.isdigit() and len(number) < 19):
        raise NotFound(
            f"model is {model!r}, expected <scenario>@<version number>",
            reason=errors_pb2.REASON_VERSION_NOT_FOUND,
            field="model",
        )
    return ScenarioChoice(scenario, int(number) if at else None, field)


async def known_scenario(choice: ScenarioChoice, directory: ScenarioDirectory) -> str:
    """The id of a scenario that is there. Raises NotFound naming what chose it, Unavailable, and what `get` raises."""
    try:
        return (await directory.get(choice.scenario)).scenario_id
    except NotFound as error:
        raise NotFound(
            f"no scenario {choice.scenario!r}; GET /v1/models lists them", reason=error.reason, field=choice.field
        ) from None
