"""kill -9 before every statement and commit of the transactions that move samples, and what a restart finds.

A child process performs one transaction and kills itself at its k-th step, for every k until it comes through. After
each death the database must hold the state before or the state after, and doing it again must lead to one end.
"""

import asyncio
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NoReturn

import pytest
from atoll.api.trainer.v1 import job_pb2
from atoll.gateway.assembly import build_gateway
from atoll.gateway.database import Database
from atoll.gateway.job_settling import settle
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import BatchState, JobOutcome, ReportAnswer
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenarios import BoundScenario
from atoll.gateway.settings import GatewaySettings
from sqlalchemy import event

from tests.fakes.trainer import FakeTrainer
from tests.gateway.fork_server import process_context
from tests.gateway.store_world import (
    SCENARIO,
    batch_states,
    bound_scenario,
    new_sample,
    open_world,
    report_on,
    settings_for,
    standings,
    url_of,
)

MAX_STEPS = 60


async def bind(scenario: str) -> BoundScenario:
    return bound_scenario(scenario)


def second_report(database: Database, receipt: str) -> ReportAnswer:
    """The report that completes the batch."""
    intake = ReportIntake(database, Receipts(database.key("receipts")), bind, lambda _: None, PendingReports())
    return asyncio.run(intake.create(report_on(receipt, request_id="second")))


def die_at(database: Database, step: int) -> None:
    """Kills this process before the step-th statement or commit, and after the last commit."""
    left = [step]

    def count(*_: object) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    event.listen(database.engine, "before_cursor_execute", count)
    event.listen(database.engine, "commit", count)


def _report_and_die(directory: Path, receipt: str, step: int) -> None:
    database = Database(url_of(directory))
    die_at(database, step)
    second_report(database, receipt)


def _settle_and_die(directory: Path, job_id: str, state: BatchState, step: int) -> None:
    database = Database(url_of(directory))
    die_at(database, step)
    settle(database, job_id, JobOutcome(state, version=1))


def prepared(directory: Path) -> list[str]:
    """A database with two samples of one group, the first reported on; returns their receipts."""

    async def prepare() -> list[str]:
        database = Database(url_of(directory))
        receipts, writer = Receipts(database.key("receipts")), SampleWriter(database)
        issued = [receipts.issue(SCENARIO) for _ in range(2)]
        for receipt in issued:
            await writer.record(new_sample(receipt))
        intake = ReportIntake(database, receipts, bind, lambda _: None, PendingReports())
        await intake.create(report_on(issued[0], request_id="first"))
        await writer.stop()
        database.close()
        return issued

    directory.mkdir()
    return asyncio.run(prepare())


def _run_and_exit(target: Callable[..., None], *arguments: object) -> NoReturn:
    """The end of a fork: nothing of the process it was forked from may run in it."""
    try:
        target(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _die_at_every_step(
    template: Path, scratch: Path, target: Callable[..., None], arguments: tuple[object, ...], pipe: Pipe
) -> None:
    """Runs in a process without threads, whose forks cost nothing; sends the copies, one per death and a last one."""
    copies: list[Path] = []
    for step in range(MAX_STEPS):
        copies.append(scratch / f"step-{step}")
        shutil.copytree(template, copies[-1])
        pid = os.fork()
        if pid == 0:
            _run_and_exit(target, copies[-1], *arguments, step)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    pipe.send(copies)


def each_death(template: Path, scratch: Path, target: Callable[..., None], *arguments: object) -> list[Path]:
    """Copies of the template after a death at every step, and one after none."""
    ours, theirs = process_context().Pipe()
    child = process_context().Process(target=_die_at_every_step, args=(template, scratch, target, arguments, theirs))
    child.start()
    # So that recv() ends when the child does.
    theirs.close()
    copies: list[Path] = ours.recv()
    child.join()
    assert 5 < len(copies) < MAX_STEPS, "it died at too few steps to show anything, or never came through"
    return copies


def test_kill_9_in_the_middle_of_forming_a_batch(tmp_path: Path) -> None:
    receipts = prepared(tmp_path / "template")
    seen: set[str] = set()
    answers: set[str] = set()
    for copy in each_death(tmp_path / "template", tmp_path, _report_and_die, receipts[1]):
        database = Database(url_of(copy))
        found = standings(database)
        assert found in ({"pending": 2}, {"reserved": 2}), f"half a transaction in {copy.name}"
        assert len(batch_states(database)) == (1 if found["reserved"] else 0)
        seen |= set(found)
        answer = second_report(database, receipts[1])
        assert standings(database) == {"reserved": 2} and list(batch_states(database)) == [answer.job_id]
        answers.add(answer.job_id)
        database.close()
    assert seen == {"pending", "reserved"} and "" not in answers


@pytest.mark.parametrize(
    ("state", "after"),
    [(BatchState.COMMITTED, "consumed"), (BatchState.DROPPED, "settled"), (BatchState.CANCELLED, "pending")],
)
def test_kill_9_in_the_middle_of_settling_a_batch(tmp_path: Path, state: BatchState, after: str) -> None:
    receipts = prepared(tmp_path / "template")
    database = Database(url_of(tmp_path / "template"))
    job_id = second_report(database, receipts[1]).job_id
    database.close()
    for copy in each_death(tmp_path / "template", tmp_path, _settle_and_die, job_id, state):
        database = Database(url_of(copy))
        found, standing = standings(database), batch_states(database)[job_id]
        assert (found, standing) in (({"reserved": 2}, "open"), ({after: 2}, state.value)), copy.name
        assert settle(database, job_id, JobOutcome(state, version=1)) == (standing == "open")
        assert standings(database) == {after: 2}
        database.close()


def _gateway_until_killed(settings: GatewaySettings, pipe: Pipe) -> None:
    """Records two samples and reports on as many of them as it is told."""

    async def main() -> None:
        gateway = build_gateway(settings)
        await gateway.start()
        receipts = [gateway.receipts.issue(SCENARIO) for _ in range(2)]
        await asyncio.gather(*(gateway.writer.record(new_sample(receipt)) for receipt in receipts))
        pipe.send(receipts)
        for _ in range(await asyncio.to_thread(pipe.recv)):
            answer = await gateway.reports.create(report_on(receipts.pop(0)))
            pipe.send(answer.job_id)
        await asyncio.Event().wait()

    asyncio.run(main())


@pytest.mark.parametrize("reported", [0, 1, 2])
async def test_kill_9_of_a_gateway_between_reply_report_and_settlement(tmp_path: Path, reported: int) -> None:
    """A whole gateway dies after `reported` of two reports; the next one on its database ends the loop."""
    trainer = FakeTrainer()
    async with open_world(tmp_path, trainer) as world:
        settings = settings_for(tmp_path, world.registry_port, world.trainer_port)
        ours, theirs = process_context().Pipe()
        child = process_context().Process(target=_gateway_until_killed, args=(settings, theirs))
        child.start()
        theirs.close()
        receipts = await asyncio.to_thread(ours.recv)
        ours.send(reported)
        told = [await asyncio.to_thread(ours.recv) for _ in range(reported)]
        if reported == 2:
            await trainer.wait_for(1)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.to_thread(child.join)
        rest = [await world.gateway.reports.create(report_on(receipt)) for receipt in receipts[reported:]]
        told += [answer.job_id for answer in rest]
        await trainer.wait_for(1)
        assert told == ["", *trainer.jobs]
        assert standings(world.gateway.database) == {"reserved": 2}
        trainer.move(told[1], job_pb2.JOB_STATE_COMMITTED)
        world.gateway.training.wake()
        async with asyncio.timeout(20):
            while standings(world.gateway.database) != {"consumed": 2}:
                await asyncio.sleep(0.05)
        assert batch_states(world.gateway.database) == {told[1]: "committed"}
