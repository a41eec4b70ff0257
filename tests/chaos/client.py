"""Chats and reports on what came back, as long as it is asked to, and remembers everything that was acknowledged.

A report is sent again under its request id until it is answered. A chat that is not answered is forgotten: whoever
sends it again has another one.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from tests.chaos.deployment import GROUP_SIZE, SCENARIO, TOKEN

RETRY_SECONDS = 0.1
CHAT_SECONDS = 30.0
REPORT_SECONDS = 120.0
"""A report that is refused, or unanswered for so long, is a failure of its own."""


@dataclass(frozen=True)
class AcknowledgedChat:
    """A reply that ended as it should. Example: AcknowledgedChat("4f0c...", " 311 402", "1:3", None, 1764430000.0)"""

    receipt: str
    text: str
    weight_version: str
    pinned: int | None
    """Number of the version that the request insisted on."""
    at: float
    """Unix time of its end."""


@dataclass(frozen=True)
class AcknowledgedReport:
    """A report with its answer. Example: AcknowledgedReport("4f0c...", "r-4f0c...", "9b2d...")"""

    receipt: str
    request_id: str
    report_id: str


@dataclass
class Ledger:
    """What the deployment has promised."""

    chats: dict[str, AcknowledgedChat] = field(default_factory=dict)
    """By receipt."""
    reports: dict[str, AcknowledgedReport] = field(default_factory=dict)
    """By receipt."""
    failed_chats: int = 0
    repeated_reports: int = 0
    refused: list[str] = field(default_factory=list)
    """Answers that no fault explains."""


class Client:
    """Several of them may share a ledger. `may_go_on` is asked before every group, so that the queue stays short."""

    def __init__(self, url: str, ledger: Ledger, seed: int, may_go_on: Callable[[], bool] = lambda: True) -> None:
        self._url = url
        self._ledger = ledger
        self._draw = random.Random(seed)
        self._name = f"c{seed}"
        self._may_go_on = may_go_on

    async def run(self) -> None:
        """Until it is cancelled. What was sampled and not reported yet then stays pending."""
        async with self._session() as session:
            for number in itertools.count():
                while not self._may_go_on():
                    await asyncio.sleep(RETRY_SECONDS)
                await self._group(session, f"{self._name}-{number}")

    async def feed(self, groups: int, name: str) -> list[str]:
        """Chats and reports of so many groups; the receipts."""
        async with self._session() as session:
            return [receipt for n in range(groups) for receipt in await self._group(session, f"{name}-{n}")]

    async def chat(self, prompt: str, pinned: int | None = None, stream: bool = False) -> AcknowledgedChat | None:
        """One chat; None when it was not answered."""
        async with self._session() as session:
            return await self._chat(session, prompt, pinned, stream)

    async def report(self, receipt: str, score: float, group: str) -> AcknowledgedReport:
        """One report, sent until it is answered."""
        async with self._session() as session:
            return await self._report(session, receipt, score, group)

    async def rollback(self, version: int, request_id: str) -> str:
        """Asks for a return to a version until it is answered; the job's id, or "" when the version is not restorable.

        Example: await client.rollback(3, "rollback-1")
        """
        deadline = time.monotonic() + REPORT_SECONDS
        path = f"/atoll/scenarios/{SCENARIO}/rollback"
        async with self._session() as session:
            while True:
                try:
                    async with session.post(path, json={"version": version, "request_id": request_id}) as answer:
                        told = await answer.json()
                        if answer.status == 200:
                            return str(told["job_id"])
                        if answer.status < 500:
                            return ""
                        problem = str(told)
                except (aiohttp.ClientError, TimeoutError) as error:
                    problem = repr(error)
                assert time.monotonic() < deadline, f"rollback to {version} has no answer: {problem}"
                await asyncio.sleep(RETRY_SECONDS)

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=CHAT_SECONDS)
        return aiohttp.ClientSession(self._url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=timeout)

    async def _group(self, session: aiohttp.ClientSession, group: str) -> list[str]:
        replies: list[AcknowledgedChat] = []
        while len(replies) < GROUP_SIZE:
            known = replies[-1].weight_version if replies else ""
            pinned = int(known.split(":")[1]) if known and self._draw.random() < 0.2 else None
            reply = await self._chat(session, f"question {group}", pinned, self._draw.random() < 0.3)
            if reply is not None:
                replies.append(reply)
            elif pinned is None:
                await asyncio.sleep(RETRY_SECONDS)
        for number, reply in enumerate(replies):
            await self._report(session, reply.receipt, float(number % 2), group)
        return [reply.receipt for reply in replies]

    async def _chat(
        self, session: aiohttp.ClientSession, prompt: str, pinned: int | None, stream: bool
    ) -> AcknowledgedChat | None:
        body = {
            "model": SCENARIO if pinned is None else f"{SCENARIO}@{pinned}",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 12,
            "stream": stream,
        }
        try:
            async with session.post("/v1/chat/completions", json=body) as answer:
                raw = await answer.read()
                if answer.status != 200:
                    raise _NotAnswered(answer.status, raw)
                text, noted = _streamed(raw) if stream else _plain(raw)
                assert noted["receipt"] == answer.headers["x-atoll-receipt"]
        except (aiohttp.ClientError, TimeoutError, _NotAnswered) as error:
            self._ledger.failed_chats += 1
            if isinstance(error, _NotAnswered) and not error.excused(pinned):
                self._ledger.refused.append(f"chat {body['model']}: {error}")
            return None
        reply = AcknowledgedChat(noted["receipt"], text, noted["weight_version"], pinned, time.time())
        assert reply.receipt not in self._ledger.chats, "one receipt for two replies"
        self._ledger.chats[reply.receipt] = reply
        return reply

    async def _report(
        self, session: aiohttp.ClientSession, receipt: str, score: float, group: str
    ) -> AcknowledgedReport:
        request_id = f"r-{receipt}"
        body = {"receipt": receipt, "score": score, "metadata": {"group": group}, "request_id": request_id}
        deadline = time.monotonic() + REPORT_SECONDS
        while True:
            problem = ""
            try:
                async with session.post("/atoll/report", json=body) as answer:
                    if answer.status == 200:
                        told = await answer.json()
                        report = AcknowledgedReport(receipt, request_id, told["report_id"])
                        self._ledger.reports[receipt] = report
                        return report
                    problem = f"{answer.status}: {await answer.text()}"
                    if answer.status < 500:
                        self._ledger.refused.append(f"report {receipt}: {problem}")
                        raise AssertionError(problem)
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = repr(error)
            assert time.monotonic() < deadline, f"report {receipt} has no answer: {problem}"
            self._ledger.repeated_reports += 1
            await asyncio.sleep(RETRY_SECONDS)


class _NotAnswered(Exception):
    """A chat that ended otherwise than with a reply."""

    def __init__(self, status: int, raw: bytes) -> None:
        super().__init__(f"{status}: {raw[:300]!r}")
        self._status = status

    def excused(self, pinned: int | None) -> bool:
        """Whether a deployment whose processes are killed may answer so."""
        # A version that was asked for by its number may be replaced at any time.
        return self._status >= 500 or (pinned is not None and self._status == 409)


def _plain(raw: bytes) -> tuple[str, dict[str, str]]:
    body = json.loads(raw)
    return body["choices"][0]["message"]["content"], body["atoll"]


def _streamed(raw: bytes) -> tuple[str, dict[str, str]]:
    """Raises _NotAnswered for a stream that does not end with [DONE]."""
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    if not events or events[-1] != b"[DONE]":
        raise _NotAnswered(503, events[-1] if events else b"")
    frames = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content", "") for frame in frames for choice in frame["choices"])
    (noted,) = [frame["atoll"] for frame in frames if "atoll" in frame]
    return text, noted
