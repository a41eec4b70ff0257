"""A sample is durable when record() returns; requests share transactions and fail alone."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, InternalError, InvalidInput, Unavailable
from atoll.gateway.database import Database
from atoll.gateway.records import JsonObject
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.tables import samples
from sqlalchemy import event, select

from tests.gateway.fork_server import process_context
from tests.gateway.store_world import new_sample, standings, url_of


@asynccontextmanager
async def open_writer(directory: Path, room: int = 1 << 30) -> AsyncIterator[tuple[SampleWriter, Database]]:
    database = Database(url_of(directory))
    writer = SampleWriter(database, max_waiting_bytes=room)
    try:
        yield writer, database
    finally:
        await writer.stop()
        database.close()


@contextmanager
def counted_commits(database: Database) -> Iterator[list[int]]:
    counts = [0]

    def count(_connection: object) -> None:
        counts[0] += 1

    event.listen(database.engine, "commit", count)
    yield counts
    event.remove(database.engine, "commit", count)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Another process's transaction keeps the store busy."""
    other = sqlite3.connect(directory / "gateway.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


def limit_pages(database: Database, pages: int) -> None:
    """From now on the file may not grow past this many pages."""
    database.engine.dispose()

    def limit(connection: sqlite3.Connection, _entry: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    event.listen(database.engine, "connect", limit)


async def test_a_recorded_sample_is_in_the_file_that_another_process_reads(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, _):
        sample = new_sample("r1", top_k=3)
        await writer.record(sample)
        with sqlite3.connect(tmp_path / "gateway.db") as other:
            ((tensors,),) = other.execute("SELECT tensors FROM samples WHERE receipt = 'r1'").fetchall()
    assert sample.top_k_ids is not None and sample.top_k_log_probs is not None
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    expected = [ids, sample.loss_mask, sample.log_probs, sample.top_k_ids, sample.top_k_log_probs]
    assert tensors == b"".join(array.tobytes() for array in expected)


async def test_requests_that_wait_together_share_a_transaction(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, database):
        with counted_commits(database) as commits:
            with held(tmp_path):
                tasks = [asyncio.create_task(writer.record(new_sample(f"r{number}"))) for number in range(100)]
                await asyncio.sleep(0.2)
                assert not any(task.done() for task in tasks), "nothing is acknowledged before it is durable"
            await asyncio.gather(*tasks)
        assert standings(database) == {"pending": 100}
        assert commits[0] <= 3, "the one that began before the others came, and the rest together"


async def test_a_full_store_fails_the_requests_that_wait_and_the_writer_lives_on(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, database):
        await writer.record(new_sample("before"))
        limit_pages(database, 1)
        big: JsonObject = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
        results = await asyncio.gather(
            *(writer.record(new_sample(f"r{number}", request=big)) for number in range(3)), return_exceptions=True
        )
        assert [isinstance(result, AtollError) and result.code for result in results] == ["storage_full"] * 3
        assert standings(database) == {"pending": 1}, "nothing of them was stored"
        limit_pages(database, 1_000_000)
        await writer.record(new_sample("after", request=big))
        assert standings(database) == {"pending": 2}


@pytest.mark.usefixtures("both_databases")
async def test_a_receipt_that_is_there_already_fails_alone(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, database):
        await writer.record(new_sample("r1"))
        with held(tmp_path):
            tasks = [asyncio.create_task(writer.record(new_sample(name))) for name in ("r0", "r1", "r2", "r3")]
            await asyncio.sleep(0.1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), InternalError, type(None), type(None)]
        assert standings(database) == {"pending": 4}


@pytest.mark.usefixtures("both_databases")
async def test_a_sample_that_does_not_add_up_is_not_stored(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, database):
        with pytest.raises(InternalError) as refusal:
            await writer.record(new_sample("r1", weight_version="unknown"))
        assert refusal.value.reason == errors_pb2.REASON_ENGINE_PROTOCOL
        assert standings(database) == {}


async def test_a_request_that_no_message_can_carry_is_refused(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    async with open_writer(tmp_path) as (writer, database):
        for request in ({"messages": deep}, {"messages": "\ud800"}, {"n": 10**30}):
            with pytest.raises(InvalidInput):
                await writer.record(new_sample("r1", request=request))  # type: ignore[arg-type]
        assert standings(database) == {}


async def test_a_cancelled_request_is_stored_once_it_was_queued(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, database):
        with held(tmp_path):
            task = asyncio.create_task(writer.record(new_sample("r1")))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await writer.record(new_sample("r2"))
        assert standings(database) == {"pending": 2}


async def test_requests_wait_for_room_when_the_store_is_slow(tmp_path: Path) -> None:
    async with open_writer(tmp_path, room=2_000) as (writer, database):
        with held(tmp_path):
            tasks = [asyncio.create_task(writer.record(new_sample(f"r{number}"))) for number in range(20)]
            await asyncio.sleep(0.1)
            assert 0 < writer.waiting_bytes <= 2_000
        await asyncio.gather(*tasks)
        assert standings(database) == {"pending": 20} and writer.waiting_bytes == 0


@pytest.mark.usefixtures("both_databases")
async def test_stopping_stores_what_waits_and_refuses_what_comes_later(tmp_path: Path) -> None:
    async with open_writer(tmp_path) as (writer, database):
        tasks = [asyncio.create_task(writer.record(new_sample(f"r{number}"))) for number in range(50)]
        await asyncio.sleep(0)
        await writer.stop()
        await asyncio.gather(*tasks)
        with pytest.raises(Unavailable, match="stopping"):
            await writer.record(new_sample("late"))
        assert standings(database) == {"pending": 50}


def _record_until_killed(directory: Path, acknowledged: Pipe) -> None:
    async def main() -> None:
        async with open_writer(directory) as (writer, _):

            async def one_after_another(name: str) -> None:
                for number in range(1_000_000):
                    await writer.record(new_sample(f"{name}-{number}"))
                    acknowledged.send(f"{name}-{number}")

            await asyncio.gather(*(one_after_another(str(client)) for client in range(8)))

    asyncio.run(main())


@pytest.mark.usefixtures("both_databases")
def test_kill_9_while_samples_are_recorded_loses_none_that_was_acknowledged(tmp_path: Path) -> None:
    context = process_context()
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_record_until_killed, args=(tmp_path, sending))
    child.start()
    sending.close()
    acknowledged = [receiving.recv() for _ in range(300)]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while receiving.poll():
        try:
            acknowledged.append(receiving.recv())
        except EOFError:
            break
    database = Database(url_of(tmp_path))
    with database.reading() as connection:
        stored = set(connection.scalars(select(samples.c.receipt)))
    database.close()
    assert set(acknowledged) <= stored and len(stored) <= len(acknowledged) + 8
