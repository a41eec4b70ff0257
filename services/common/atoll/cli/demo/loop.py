"""The loop of the demo: ask, score, report, wait for the next version; and the picture of it on the screen."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cli.demo.gateway import DemoFailed, Gateway, Reply, gather_or_cancel
from atoll.cli.demo.profiles import Profile
from rich.console import Console
from rich.status import Status
from rich.table import Table

BAR_WIDTH = 30


@dataclass(frozen=True)
class Round:
    """The replies of one version to the questions of a job. Example: Round(3, 0.41, "Eel tree.", 5.2)"""

    version: int
    reward: float
    best_text: str
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """What the demo saw: one round per version, oldest first, and one question answered by the first and the last."""

    rounds: tuple[Round, ...]
    question: str
    before: str
    after: str

    @property
    def reward_first(self) -> float:
        return self.rounds[0].reward

    @property
    def reward_last(self) -> float:
        return self.rounds[-1].reward


async def run_loop(gateway: Gateway, profile: Profile, console: Console) -> DemoResult:
    """Trains `profile.jobs` versions and measures each one, the last too. Raises DemoFailed."""
    question = profile.questions[-1]
    rounds: list[Round] = []
    with console.status("waiting for version 0") as status:
        await gateway.wait_for_version(0, profile.version_timeout, status.update)
        before = (await gateway.chat(question, profile.max_tokens, temperature=0.0)).text
        rounds.extend([await _train_one(gateway, profile, number, console, status) for number in range(profile.jobs)])
        status.update(f"measuring version {profile.jobs}")
        began = time.monotonic()
        replies = await _ask(gateway, profile, profile.jobs, status)
        rounds.append(_round(profile, profile.jobs, replies, time.monotonic() - began))
        console.print(_line(rounds[-1]))
        after = (await gateway.chat(question, profile.max_tokens, temperature=0.0)).text
    return DemoResult(tuple(rounds), question, before, after)


async def _train_one(gateway: Gateway, profile: Profile, number: int, console: Console, status: Status) -> Round:
    """Samples from version `number`, reports, and waits until the next version is served."""
    began = time.monotonic()
    replies = await _ask(gateway, profile, number, status)
    # One report after the other: the batch is complete with the last one, whichever order they arrive in.
    for position, reply in enumerate(replies):
        group = f"job{number}-question{position // profile.samples_per_question}"
        await gateway.report(reply.receipt, profile.score(reply.text), group)
    await gateway.wait_for_version(
        number + 1, profile.version_timeout, lambda state: status.update(f"version {number + 1}: {state}")
    )
    done = _round(profile, number, replies, time.monotonic() - began)
    console.print(_line(done))
    return done


async def _ask(gateway: Gateway, profile: Profile, number: int, status: Status) -> list[Reply]:
    """Every question of a job, several times each, all by version `number`. Raises DemoFailed."""
    asked = [question for question in profile.questions for _ in range(profile.samples_per_question)]
    answered = 0

    async def ask(question: str) -> Reply:
        nonlocal answered
        reply = await gateway.chat(question, profile.max_tokens, profile.temperature)
        answered += 1
        status.update(f"version {number}: {answered} of {len(asked)} replies")
        return reply

    replies = await gather_or_cancel([asyncio.create_task(ask(question)) for question in asked])
    strange = {reply.weight_version for reply in replies} - {f"1:{number}"}
    if strange:
        raise DemoFailed(f"replies came from {', '.join(sorted(strange))}, expected 1:{number}")
    return replies


def _round(profile: Profile, number: int, replies: Sequence[Reply], seconds: float) -> Round:
    scores = [profile.score(reply.text) for reply in replies]
    best = max(zip(scores, replies, strict=True), key=lambda pair: pair[0])[1]
    return Round(number, sum(scores) / len(scores), best.text, seconds)


def _line(done: Round) -> str:
    filled = round(done.reward * BAR_WIDTH)
    return (
        f"version {done.version:>2}  reward {done.reward:.3f}  "
        f"[green]{'█' * filled}[/green][dim]{'░' * (BAR_WIDTH - filled)}[/dim]  {done.seconds:5.1f} s"
    )


def result_table(result: DemoResult, chain: Sequence[dict[str, object]]) -> Table:
    """Every version with where it came from and what its replies earned."""
    table = Table(title="versions", title_justify="left")
    for column in ("version", "parent", "made by", "weights", "mean reward"):
        table.add_column(column, justify="right" if column in ("parent", "mean reward") else "left")
    rewards = {done.version: done.reward for done in result.rounds}
    for version in chain:
        reward = rewards.get(int(str(version["number"])))
        parent = version.get("parent")
        table.add_row(
            str(version["weight_version"]),
            "-" if parent is None else str(parent),
            str(version["operation"]),
            str(version["model_digest"])[:12],
            "-" if reward is None else f"{reward:.3f}",
        )
    return table
