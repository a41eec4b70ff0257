"""Two gateway processes on one database: every sample is in one batch at most, every complete batch is formed."""

import asyncio
import random
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest
from atoll.common.errors import AtollError
from atoll.gateway.database import Database
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.tables import batch_rows, reports
from sqlalchemy import select

from tests.gateway.fork_server import process_context
from tests.gateway.store_world import SCENARIO, batch_states, bound_scenario, new_sample, report_on, standings, url_of

pytestmark = pytest.mark.usefixtures("both_databases")

SAMPLES = 60
GROUPS = 5


def group_of(number: int) -> str:
    return f"q{number % GROUPS}"


async def bind(scenario: str) -> BoundScenario:
    return bound_scenario(scenario)


def _report_on_all(directory: Path, receipts: list[str], seed: int, pipe: Pipe) -> None:
    """Reports on every receipt in an order of its own, eight at a time; sends what it was told for each."""

    async def main() -> None:
        database = Database(url_of(directory))
        intake = ReportIntake(database, Receipts(database.key("receipts")), bind, lambda _: None, PendingReports())
        order = list(range(len(receipts)))
        random.Random(seed).shuffle(order)
        limit, told = asyncio.Semaphore(8), dict[int, str]()

        async def report(number: int) -> None:
            # The processes use the same request id for the same receipt and body in one half, other ids in the other.
            request_id = f"r{number}" if number % 2 else f"r{number}-{seed}"
            async with limit:
                try:
                    answer = await intake.create(
                        report_on(receipts[number], group=group_of(number), request_id=request_id)
                    )
                    told[number] = f"{answer.report.report_id} {answer.job_id}"
                except AtollError as error:
                    told[number] = error.code

        pipe.recv()
        await asyncio.gather(*map(report, order))
        pipe.send(told)
        database.close()

    asyncio.run(main())


async def test_two_processes_that_report_on_the_same_samples_form_each_batch_once(tmp_path: Path) -> None:
    database = Database(url_of(tmp_path))
    issuer, writer = Receipts(database.key("receipts")), SampleWriter(database)
    receipts = [issuer.issue(SCENARIO) for _ in range(SAMPLES)]
    await asyncio.gather(*(writer.record(new_sample(receipt)) for receipt in receipts))
    await writer.stop()

    context = process_context()
    pipes, children = [], []
    for seed in (1, 2):
        ours, theirs = context.Pipe()
        child = context.Process(target=_report_on_all, args=(tmp_path, receipts, seed, theirs))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    for pipe in pipes:
        pipe.send("go")
    one, other = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
    for child in children:
        await asyncio.to_thread(child.join)

    for number in range(SAMPLES):
        answers = [one[number], other[number]]
        if number % 2:
            assert answers[0] == answers[1], "the same request has the same answer from both"
        else:
            assert answers.count("already_consumed") == 1, f"one of them came first: {answers}"
    with database.reading() as connection:
        rows = list(connection.execute(select(batch_rows.c.job_id, batch_rows.c.receipt)))
        recorded = len(connection.execute(select(reports.c.report_id)).all())
    assert recorded == SAMPLES
    assert len(rows) == len({row.receipt for row in rows}) == SAMPLES, "12 reports of a group fill 6 batches of 2"
    assert len(batch_states(database)) == SAMPLES // 2 and standings(database) == {"reserved": SAMPLES}
    told_jobs = {answer.split()[-1] for answer in (*one.values(), *other.values()) if " job-" in answer}
    assert told_jobs == set(batch_states(database))
    database.close()
