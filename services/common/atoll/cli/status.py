"""`atoll status`: what the gateway says about itself, its scenarios and their training."""

import json
from collections.abc import Mapping, Sequence

import aiohttp
from atoll.common.errors import AtollError, InternalError, Unavailable
from rich.console import Group, RenderableType
from rich.table import Table

CALL_SECONDS = 10.0

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


async def read_status(gateway: str, token: str | None) -> Mapping[str, Json]:
    """The body of GET /atoll/status. gateway: base URL. Raises AtollError: its refusal in its words, or Unavailable."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    url = f"{gateway.rstrip('/')}/atoll/status"
    try:
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as response:
            text = await response.text()
            status = response.status
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(f"the gateway does not answer at {url}: {error}") from None
    except TimeoutError:
        raise Unavailable(f"the gateway does not answer at {url} within {CALL_SECONDS:g} s") from None
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        body = None
    if status != 200:
        raise _refusal(url, status, body)
    if not isinstance(body, dict):
        raise InternalError(f"{url} answered something that is not a JSON object: is it a gateway?")
    return body


def _refusal(url: str, status: int, body: object) -> AtollError:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return InternalError(f"{url} answered {status}: {message or 'without a reason; is it a gateway?'}")


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
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
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
