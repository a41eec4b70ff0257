"""`atoll samples` and `atoll report`: what was recorded, and feedback on it."""

import json
from collections.abc import Mapping, Sequence

from atoll.cli.gateway_api import GatewayApi, Json, Object, scenario_path
from atoll.common.errors import InvalidInput
from rich.table import Table

TEXT_SHOWN = 60
"""Characters of a reply in the table."""


async def read_samples(api: GatewayApi, scenario: str | None, state: str, limit: int) -> list[Object]:
    """The newest samples of a scenario, newest first. state: "pending", ...; empty: all."""
    path = scenario_path(await api.scenario(scenario), "samples")
    return await api.items(path, "samples", limit, state=state)


def samples_table(samples: list[Object]) -> Table:
    """One row a sample."""
    table = Table(title_justify="left", title=None if samples else "no samples")
    for column in ("receipt", "state", "weights", "tokens", "created", "reply", "job or reason"):
        # An id is there to be copied.
        table.add_column(column, justify="right" if column == "tokens" else "left", no_wrap=column == "receipt")
    for sample in samples:
        text = " ".join(str(sample["text"]).split())
        versions = sample["weight_versions"]
        table.add_row(
            str(sample["receipt"]),
            str(sample["state"]),
            ", ".join(map(str, versions)) if isinstance(versions, list) else "-",
            f"{sample['prompt_length']} + {sample['response_length']}",
            str(sample["created_at"])[:19].replace("T", " "),
            text if len(text) <= TEXT_SHOWN else text[: TEXT_SHOWN - 3] + "...",
            str(sample["settled_reason"] or sample["job_id"] or "-"),
        )
    return table


async def send_report(
    api: GatewayApi,
    receipts: Sequence[str],
    *,
    scenario: str | None,
    score: float | None,
    feedback: str | None,
    metadata: Mapping[str, Json],
    request_id: str,
) -> Object:
    """What the gateway answers. Several receipts are turns of one rollout, in their order."""
    body: dict[str, Json] = {"receipts": list(receipts), "metadata": dict(metadata), "request_id": request_id}
    if scenario is not None:
        body["scenario"] = scenario
    if score is not None:
        body["score"] = score
    if feedback is not None:
        body["feedback"] = _object_or_text(feedback)
    return await api.post("/atoll/report", body)


def report_line(answer: Object) -> str:
    """What became of a report, for a person."""
    settled = answer["settled"]
    if isinstance(settled, Mapping):
        return f"recorded, and never trained: {settled['code']}: {settled['message']}"
    if answer["job_id"]:
        return f"recorded; it completed the batch of {answer['job_id']}"
    return "recorded; it waits for the rest of its batch"


def metadata_of(pairs: Sequence[str]) -> dict[str, Json]:
    """From `key=value`, whose value is JSON where it can be read as that, else text. Raises InvalidInput."""
    found: dict[str, Json] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InvalidInput(f"--metadata {pair}: expected key=value, e.g. --metadata group=q17", field="metadata")
        if key in found:
            raise InvalidInput(f"--metadata {key} is given twice", field=f"metadata.{key}")
        found[key] = _json_or_text(value)
    return found


def _json_or_text(text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value


def _object_or_text(text: str) -> Json:
    value = _json_or_text(text)
    return value if isinstance(value, dict) else text
