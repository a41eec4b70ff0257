"""`atoll status`: what the gateway says about itself, its scenarios and their training."""

import json
from collections.abc import Mapping, Sequence

from atoll.cli.gateway_api import GatewayApi, Json
from rich.console import Group, RenderableType
from rich.table import Table


async def read_status(gateway: str, token: str | None) -> Mapping[str, Json]:
    """The body of GET /atoll/status. gateway: base URL. Raises what GatewayApi does."""
    return await GatewayApi(gateway, token).get("/atoll/status")


def status_view(body: Mapping[str, Json]) -> RenderableType:
    """Plain values as one table, and a table of its own for every list or map of objects."""
    plain = Table(title="gateway", title_justify="left", show_header=False)
    parts: list[RenderableType] = [plain]
    for key, value in body.items():
        rows = _rows_of(value)
        if rows is None:
            plain.add_row(key, _text(value))
        else:
            parts.append(_table(key, rows))
    return Group(*parts)


def _rows_of(value: Json) -> list[Mapping[str, Json]] | None:
    """The objects of a list of objects, or of a map of objects with their keys as names; None for anything else."""
    if isinstance(value, Mapping):
        members: list[Mapping[str, Json]] = [
            {"name": key, **item} for key, item in value.items() if isinstance(item, Mapping)
        ]
        return members if members and len(members) == len(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        members = [item for item in value if isinstance(item, Mapping)]
        return members if members and len(members) == len(value) else None
    return None


def _table(title: str, rows: list[Mapping[str, Json]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(rows) < len(columns):
        # A few objects of many fields stand beside each other: a terminal has 80 columns.
        facts = Table(title=title, title_justify="left", show_header=False)
        for column in columns:
            facts.add_row(column.replace("_", " "), *(_text(row.get(column)) for row in rows))
        return facts
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    return table


def _text(value: Json) -> str:
    if value in (None, "", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return json.dumps(value)
