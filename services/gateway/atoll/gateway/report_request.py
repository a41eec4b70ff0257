"""POST /atoll/report: feedback over HTTP, recorded as ReportService.CreateReport records it."""

from dataclasses import asdict
from typing import Annotated

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import InvalidInput, NotFound
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import JsonObject, NewReport, ReportAnswer
from atoll.gateway.scenario_choice import HEADER
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.schema_errors import OBJECT, TEXT, kind_of, validated
from atoll.gateway.strict_json import parse_object
from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, model_validator

Feedback = Annotated[Annotated[str, TEXT] | Annotated[dict[str, JsonValue], OBJECT], Discriminator(kind_of)]


class ReportRequest(BaseModel):
    """Body of POST /atoll/report. Example: {"receipt": "4f0c...", "score": 1.0, "metadata": {"group": "q17"}}"""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    receipt: str | None = Field(None, min_length=1, max_length=64)
    receipts: list[str] | None = Field(None, min_length=1, max_length=1024)
    score: float | None = None
    feedback: Feedback | None = None
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
    raw: bytes,
    scenario_header: str | None,
    default_scenario: str | None,
    scenarios: ScenarioDirectory,
    receipts: Receipts,
) -> NewReport:
    """The report in a body. Its scenario is the header's, else the body's, else the one that issued the first receipt.

    Raises InvalidInput, NotFound (SCENARIO_NOT_FOUND, RECEIPT_NOT_FOUND), Unavailable.
    """
    body = validated(ReportRequest, parse_object(raw))
    scenario = await _scenario_of(body, scenario_header, default_scenario, scenarios, receipts)
    return NewReport(
        scenario=scenario,
        receipts=body.all_receipts,
        score=body.score,
        feedback=body.feedback,
        metadata=body.metadata,
        request_id=body.request_id,
    )


async def _scenario_of(
    body: ReportRequest, header: str | None, default: str | None, scenarios: ScenarioDirectory, receipts: Receipts
) -> str:
    named, field = (header, HEADER) if header is not None else (body.scenario, "scenario")
    if named is not None:
        try:
            return (await scenarios.get(named)).scenario_id
        except (NotFound, InvalidInput) as error:
            raise NotFound(error.message, reason=errors_pb2.REASON_SCENARIO_NOT_FOUND, field=field) from None
    first = body.all_receipts[0]
    # Mostly one that a chat has asked for since this gateway started; only then is the registry worth a call.
    likely: list[str] = [*([default] if default is not None else []), *scenarios.known()]
    for scenario in likely:
        if receipts.was_issued(scenario, first):
            return scenario
    for bound in await scenarios.list():
        if receipts.was_issued(bound.scenario_id, first):
            return bound.scenario_id
    raise NotFound(
        f"no scenario issued the receipt {first!r}",
        reason=errors_pb2.REASON_RECEIPT_NOT_FOUND,
        field="receipt" if body.receipt is not None else "receipts",
    )


def report_reply(answer: ReportAnswer) -> JsonObject:
    """What the reporter is told. Example: {"report_id": "9b2d...", "scenario": "math", "receipts": ["4f0c..."],
    "job_id": null, "settled": null}; the job is the one whose batch this report completed. A report that came too late
    to be trained says so: "settled": {"code": "stale_sample", "message": "produced by 1:0, the head is 1:3 ..."}."""
    return {
        "report_id": answer.report.report_id,
        "scenario": answer.report.scenario,
        "receipts": list(answer.report.receipts),
        "job_id": answer.job_id or None,
        "settled": None if answer.settled is None else asdict(answer.settled),
    }
