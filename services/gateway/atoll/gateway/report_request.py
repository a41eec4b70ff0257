"""POST /atoll/report: feedback over HTTP, recorded as ReportService.CreateReport records it."""

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput, NotFound
from atoll.gateway.records import JsonObject, NewReport, ReportAnswer
from atoll.gateway.scenario_choice import choose_scenario
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.schema_errors import validated
from atoll.gateway.strict_json import parse_object
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator


class ReportRequest(BaseModel):
    """Body of POST /atoll/report. Example: {"receipt": "4f0c...", "score": 1.0, "metadata": {"group": "q17"}}"""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    receipt: str | None = Field(None, min_length=1, max_length=64)
    receipts: list[str] | None = Field(None, min_length=1, max_length=1024)
    score: float | None = None
    feedback: str | dict[str, JsonValue] | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    request_id: str = Field("", max_length=64)
    scenario: str | None = Field(None, min_length=1, max_length=63)

    @model_validator(mode="after")
    def _one_of_receipt_and_receipts(self) -> "ReportRequest":
        if (self.receipt is None) == (self.receipts is None):
            raise ValueError("give either receipt or receipts")
        return self

    @property
    def all_receipts(self) -> tuple[str, ...]:
        return (self.receipt,) if self.receipt is not None else tuple(self.receipts or ())


async def read_report(
    raw: bytes, scenario_header: str | None, default_scenario: str | None, scenarios: ScenarioDirectory
) -> NewReport:
    """The report in a body. The scenario is the header's, else the body's, else the deployment's default, else the
    only one there is. Raises InvalidInput, NotFound(SCENARIO_NOT_FOUND), Unavailable."""
    body = validated(ReportRequest, parse_object(raw))
    default = default_scenario
    if scenario_header is None and body.scenario is None and default is None:
        known = await scenarios.list()
        if len(known) != 1:
            raise InvalidInput("scenario is missing: the gateway serves several", field="scenario")
        default = known[0].scenario_id
    choice = choose_scenario(scenario_header, body.scenario, default)
    field = "scenario" if choice.field == "model" else choice.field
    if choice.number is not None:
        raise InvalidInput(f"scenario is {body.scenario!r}, expected no version", field=field)
    try:
        scenario = (await scenarios.get(choice.scenario)).scenario_id
    except NotFound as error:
        raise NotFound(error.message, reason=errors_pb2.REASON_SCENARIO_NOT_FOUND, field=field) from None
    return NewReport(
        scenario=scenario,
        receipts=body.all_receipts,
        score=body.score,
        feedback=body.feedback,
        metadata=body.metadata,
        request_id=body.request_id,
    )


def report_reply(answer: ReportAnswer) -> JsonObject:
    """What the reporter is told. Example: {"report_id": "9b2d...", "scenario": "math", "receipts": ["4f0c..."],
    "job_id": null}; the job is the one whose batch this report completed."""
    return {
        "report_id": answer.report.report_id,
        "scenario": answer.report.scenario,
        "receipts": list(answer.report.receipts),
        "job_id": answer.job_id or None,
    }
