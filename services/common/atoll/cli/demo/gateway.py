"""The demo as a client of the gateway: the official OpenAI client for chats, plain HTTP for reports and the state."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
from openai import AsyncOpenAI

CALL_SECONDS = 120.0
POLL_SECONDS = 0.25
MAX_CHATS = 32
"""Chats at a time: as many as the engine of the bundled stacks runs together."""


class DemoFailed(Exception):
    """Raised when the demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Reply:
    """Example: Reply("4f0c...", "The sea is", "1:3")."""

    receipt: str
    text: str
    weight_version: str


class Gateway:
    """Use as `async with Gateway(base_url, scenario, token) as gateway`."""

    def __init__(self, base_url: str, scenario: str, token: str | None) -> None:
        self._base_url = base_url
        self._scenario = scenario
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._http = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=CALL_SECONDS))
        self._openai = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=token or "none", timeout=CALL_SECONDS)
        self._chats = asyncio.Semaphore(MAX_CHATS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()
        await self._http.close()

    async def chat(self, question: str, max_tokens: int, temperature: float) -> Reply:
        """One recorded completion. Raises openai.APIError for a refusal."""
        async with self._chats:
            answer = await self._openai.chat.completions.with_raw_response.create(
                model=self._scenario,
                messages=[{"role": "user", "content": question}],
                max_tokens=max_tokens,
                temperature=temperature,
            )
        completion = answer.parse()
        noted = (completion.model_extra or {}).get("atoll")
        version = noted.get("weight_version") if isinstance(noted, dict) else None
        return Reply(
            receipt=answer.headers["x-atoll-receipt"],
            text=completion.choices[0].message.content or "",
            weight_version=str(version),
        )

    async def report(self, receipt: str, score: float, group: str) -> None:
        """Feedback for one receipt. Raises DemoFailed with the gateway's reason."""
        body = {"receipt": receipt, "score": score, "metadata": {"group": group}, "request_id": f"demo-{receipt}"}
        async with self._http.post(f"{self._base_url}/atoll/report", json=body) as response:
            if response.status != 200:
                raise DemoFailed(f"a report was refused with {response.status}: {(await response.text())[:500]}")

    async def versions(self) -> list[dict[str, object]]:
        """The chain, oldest first."""
        url = f"{self._base_url}/atoll/scenarios/{self._scenario}/versions"
        found: list[dict[str, object]] = []
        token = ""
        while True:
            async with self._http.get(url, params={"page_token": token} if token else {}) as response:
                body = await response.json()
            if response.status != 200:
                raise DemoFailed(f"{url} answered {response.status}: {body}")
            found.extend(body["versions"])
            token = body.get("next_page_token") or ""
            if not token:
                return sorted(found, key=lambda version: int(str(version["number"])))

    async def wait_for_version(self, number: int, timeout: float, show: Callable[[str], None]) -> None:
        """Returns once version `number` is the head and an engine answers with it.

        show: told in words what is being waited for. Raises DemoFailed when training says why it made no version,
        and when it takes longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            async with self._http.get(f"{self._base_url}/atoll/status") as response:
                body = await response.json()
            state = next(item for item in body["scenarios"] if item["scenario"] == self._scenario)
            served = {engine["weight_version"] for engine in body["engines"] if engine["healthy"]}
            if state["head_number"] == number and state["weight_version"] in served and not state["open_batches"]:
                return
            if state["last_error"]:
                raise DemoFailed(f"no version {number}: {state['last_error']}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"no version {number} within {timeout:g} s; last state: {state}")
            show(state["job_state"] or "waiting")
            await asyncio.sleep(POLL_SECONDS)


async def gather_or_cancel(jobs: Sequence[asyncio.Task[Reply]]) -> list[Reply]:
    """All results in order; the first failure cancels the rest and is raised."""
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()
