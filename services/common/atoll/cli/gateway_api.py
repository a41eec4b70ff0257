"""Calls of the gateway's HTTP side, as commands make them."""

import json
from collections.abc import Mapping, Sequence

import aiohttp
from atoll.common.errors import AtollError, BadConfiguration, InternalError, InvalidInput, Unavailable
from atoll.common.names import check_id

CALL_SECONDS = 15.0

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Object = Mapping[str, Json]


class GatewayApi:
    """Example: await GatewayApi("http://127.0.0.1:8100", token).get("/atoll/status")"""

    def __init__(self, gateway: str, token: str | None) -> None:
        """gateway: base URL. Raises BadConfiguration for what is none."""
        if not gateway.startswith(("http://", "https://")):
            raise BadConfiguration(f"gateway is {gateway!r}, expected its URL, e.g. http://127.0.0.1:8100")
        self._base = gateway.rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def get(self, path: str, **query: str | int) -> Object:
        """The object that a path answers. Raises AtollError: the gateway's refusal in its words, or Unavailable."""
        return await self._ask("GET", path, query, None)

    async def post(self, path: str, body: Object) -> Object:
        return await self._ask("POST", path, {}, body)

    async def items(self, path: str, key: str, limit: int, **query: str) -> list[Object]:
        """The objects of a paged list, at most `limit`."""
        found: list[Object] = []
        token = ""
        while len(found) < limit:
            page = await self.get(path, page_size=min(limit - len(found), 1000), page_token=token, **query)
            found += objects_in(page[key])
            token = str(page["next_page_token"])
            if not token:
                break
        return found

    async def scenario(self, named: str | None) -> str:
        """The scenario to work on. None takes the only one there is. Raises InvalidInput when one must be named."""
        if named is not None:
            return named
        names = [str(model["id"]) for model in objects_in((await self.get("/v1/models"))["data"])]
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise InvalidInput(f"name a scenario with --scenario; the gateway has: {known}", field="scenario")
        return names[0]

    async def _ask(self, method: str, path: str, query: Mapping[str, str | int], body: Object | None) -> Object:
        url = f"{self._base}{path}"
        try:
            timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, url, params=query, json=body) as response,
            ):
                text, status = await response.text(), response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"the gateway does not answer at {url}: {error}; is --gateway right?") from None
        except TimeoutError:
            raise Unavailable(f"the gateway does not answer at {url} within {CALL_SECONDS:g} s") from None
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            answer = None
        if status != 200:
            raise _refusal(url, status, answer)
        if not isinstance(answer, dict):
            raise InternalError(f"{url} answered something that is not a JSON object: is it a gateway?")
        return answer


def scenario_path(scenario: str, *parts: str) -> str:
    """Example: scenario_path("math", "jobs") is "/atoll/scenarios/math/jobs". Raises InvalidInput."""
    return "/".join(["/atoll/scenarios", check_id(scenario, "scenario"), *parts])


def job_path(scenario: str, job_id: str) -> str:
    """Where one job is. Raises InvalidInput: an empty id would name the list of all."""
    return scenario_path(scenario, "jobs", check_id(job_id, "job_id"))


def objects_in(value: Json) -> list[Object]:
    """The objects of a list, and nothing else of it."""
    members = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return [member for member in members if isinstance(member, Mapping)]


def _refusal(url: str, status: int, body: object) -> AtollError:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if message is not None and status == 503:
        return Unavailable(f"{url} answered {status}: {message}")
    return InternalError(f"{url} answered {status}: {message or 'without a reason; is it a gateway?'}")
