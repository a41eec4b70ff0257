"""What the tests of the gateway's stores share: samples, a gateway on fakes, and looks into its database."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from atoll.common.server import GrpcServer
from atoll.families.catalog import make_family
from atoll.families.rows import VersionSpan
from atoll.gateway.assembly import Gateway, build_gateway
from atoll.gateway.database import Database
from atoll.gateway.head import Head
from atoll.gateway.records import JsonObject, NewReport, NewSample
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.settings import GatewaySettings
from atoll.gateway.tables import batches, report_receipts, reports, sample_claims, samples
from pydantic import JsonValue
from sqlalchemy import insert, select

from tests.fakes.scenario_registry import FakeScenarioRegistry, serve_registry
from tests.fakes.trainer import FakeTrainer, serve_trainer

SCENARIO = "math"
OPTIONS: Mapping[str, JsonValue] = {"groups_per_step": 1, "n_samples_per_prompt": 2}
"""A batch is one group of two reports."""


def new_sample(
    receipt: str,
    scenario: str = SCENARIO,
    *,
    prompt: int = 3,
    response: int = 4,
    top_k: int = 0,
    weight_version: str = "1:0",
    exact: bool = True,
    temperature: float = 1.0,
    request: JsonObject | None = None,
) -> NewSample:
    """A sample that adds up; its numbers differ from one receipt to the next."""
    random = np.random.default_rng(abs(hash(receipt)) % 2**32)
    candidates = None if not top_k else random.integers(0, 1000, (response, top_k), dtype=np.int32)
    return NewSample(
        scenario=scenario,
        receipt=receipt,
        request=request or {"messages": [{"role": "user", "content": "2 + 2 = ?"}], "seed": 7},
        text="4",
        prompt_ids=random.integers(0, 1000, prompt, dtype=np.int32),
        response_ids=random.integers(0, 1000, response, dtype=np.int32),
        loss_mask=np.ones(response, dtype=np.uint8),
        log_probs=-random.random(response, dtype=np.float32),
        spans=(VersionSpan(0, response, weight_version),) if response else (),
        temperature=temperature,
        exact=exact,
        finish_reason="stop",
        created_at=datetime.now(UTC),
        sampling={"top_p": 0.9},
        top_k_ids=candidates,
        top_k_log_probs=None if candidates is None else -random.random(candidates.shape, dtype=np.float32),
        aborted=response == 0,
    )


def bound_scenario(scenario: str = SCENARIO, options: Mapping[str, JsonValue] = OPTIONS) -> BoundScenario:
    return BoundScenario(scenario, "grpo", make_family("grpo", options), max_staleness=0)


def report_on(receipt: str, *, group: str = "q1", score: float = 1.0, request_id: str = "") -> NewReport:
    return NewReport(SCENARIO, (receipt,), score=score, metadata={"group": group}, request_id=request_id)


def head_at(number: int, incarnation: int = 1, *, same: int = 0) -> Head:
    """The head of a plain line of versions, of which the last `same` before it have its weights too."""
    content = frozenset(f"{incarnation}:{number - back}" for back in range(same + 1))
    parent = frozenset({f"{incarnation}:{number - 1}"} if number else set())
    return Head(number, f"{incarnation}:{number}", content, content if same else parent)


URL_FILE = "database_url"


def url_of(directory: Path) -> str:
    """The database that belongs to a test's directory: the one that the directory names, else SQLite in it."""
    named = directory / URL_FILE
    if named.exists():
        return named.read_text()
    return f"sqlite:///{directory / 'gateway.db'}"


@dataclass(frozen=True)
class World:
    """A gateway between a fake registry and a fake trainer."""

    gateway: Gateway
    registry: FakeScenarioRegistry
    trainer: FakeTrainer
    registry_port: int = 0
    trainer_port: int = 0

    async def record(self, count: int = 1) -> list[str]:
        """Records samples; returns their receipts."""
        receipts = [self.gateway.receipts.issue(SCENARIO) for _ in range(count)]
        await asyncio.gather(*(self.gateway.writer.record(new_sample(receipt)) for receipt in receipts))
        return receipts

    async def record_of(self, weight_version: str, count: int, scenario: str = SCENARIO) -> list[str]:
        """Records samples of one version; returns their receipts."""
        receipts = [self.gateway.receipts.issue(scenario) for _ in range(count)]
        for receipt in receipts:
            await self.gateway.writer.record(new_sample(receipt, scenario, weight_version=weight_version))
        return receipts

    def head_number(self, scenario: str = SCENARIO) -> int:
        """As the gateway last heard; -1 before it did."""
        head = self.gateway.scenarios.head(scenario)
        return -1 if head is None else head.number

    def insert_report(self, scenario: str, receipt: str) -> None:
        """A pending report as an earlier gateway stored it."""
        with self.gateway.database.writing() as connection:
            row = {"report_id": f"r-{receipt[:8]}", "scenario": scenario, "metadata": {}, "created_us": 1, "epoch": 0}
            connection.execute(insert(reports), [row])
            about = {"receipt": receipt, "report_id": row["report_id"], "ordinal": 0, "weight_version": "1:0"}
            connection.execute(insert(report_receipts), [about])

    async def batch(self, group: str = "q1") -> tuple[str, list[str]]:
        """Records and reports until a batch is complete; returns its job id and receipts."""
        receipts = await self.record(2)
        answers = [await self.gateway.reports.create(report_on(receipt, group=group)) for receipt in receipts]
        return answers[-1].job_id, receipts


def settings_for(directory: Path, registry_port: int, trainer_port: int | None) -> GatewaySettings:
    return GatewaySettings(
        database_url=url_of(directory),
        registry=f"127.0.0.1:{registry_port}",
        trainer=None if trainer_port is None else f"127.0.0.1:{trainer_port}",
        grpc_port=0,
    )


@asynccontextmanager
async def open_world(directory: Path, trainer: FakeTrainer | None = None) -> AsyncIterator[World]:
    """A running gateway on the database of the directory; the scenario "math" is bound to grpo with OPTIONS."""
    registry, trainer = FakeScenarioRegistry(), trainer or FakeTrainer()
    registry.add(SCENARIO, "grpo", OPTIONS)
    servers: list[GrpcServer] = [await serve_registry(registry), await serve_trainer(trainer)]
    gateway = build_gateway(settings_for(directory, servers[0].port, servers[1].port))
    try:
        await gateway.start()
        yield World(gateway, registry, trainer, servers[0].port, servers[1].port)
    finally:
        await gateway.stop()
        for server in servers:
            # Without the drain: a watch never ends by itself.
            await server.grpc.stop(None)


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns when the condition holds; fails when it does not in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def standings(database: Database) -> Counter[str]:
    """How many samples are in each state, e.g. Counter(pending=2, reserved=4)."""
    joined = samples.outerjoin(sample_claims, sample_claims.c.receipt == samples.c.receipt)
    with database.reading() as connection:
        return Counter(
            state or "pending" for state in connection.scalars(select(sample_claims.c.state).select_from(joined))
        )


def batch_states(database: Database) -> dict[str, str]:
    """Job id -> state, oldest first."""
    with database.reading() as connection:
        rows = connection.execute(select(batches.c.job_id, batches.c.state).order_by(batches.c.position))
        return {row.job_id: row.state for row in rows}
