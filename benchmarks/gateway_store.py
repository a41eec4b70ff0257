"""Samples/s that the gateway's writer makes durable, against what SQLite itself can do with the same bytes.

The limit is plain sqlite3: one prepared INSERT by executemany into a table of a key and a blob, in transactions of the
size that the writer's groups had in this run, with the same pragmas, on the same disk. Both sides are run in turn, and
the median of the rounds counts: disks are noisy. Run: python benchmarks/gateway_store.py [--samples 4000]
"""

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from atoll.families.rows import VersionSpan
from atoll.gateway.database import Database
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import JsonObject, NewSample
from atoll.gateway.sample_packing import pack
from atoll.gateway.sample_writer import SampleWriter
from sqlalchemy import event

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 256
REQUEST_CHARACTERS = 2_000
ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """Example: Measured(samples_per_second=21000.0, group_size=128.0)"""

    samples_per_second: float
    group_size: float


def make_samples(count: int, receipts: Receipts) -> list[NewSample]:
    """Chat samples of the usual size: about 4 KB of tensors and 2 KB of request each."""
    random = np.random.default_rng(0)
    request: JsonObject = {
        "model": "bench",
        "messages": [{"role": "user", "content": "word " * (REQUEST_CHARACTERS // 5)}],
        "temperature": 1.0,
    }
    return [
        NewSample(
            scenario="bench",
            receipt=receipts.issue("bench"),
            request=request,
            text="token " * RESPONSE_TOKENS,
            prompt_ids=random.integers(0, 100_000, PROMPT_TOKENS, dtype=np.int32),
            response_ids=random.integers(0, 100_000, RESPONSE_TOKENS, dtype=np.int32),
            loss_mask=np.ones(RESPONSE_TOKENS, dtype=np.uint8),
            log_probs=-random.random(RESPONSE_TOKENS, dtype=np.float32),
            spans=(VersionSpan(0, RESPONSE_TOKENS, "1:0"),),
            temperature=1.0,
            exact=True,
            finish_reason="stop",
            created_at=datetime.now(UTC),
        )
        for _ in range(count)
    ]


async def through_the_writer(directory: Path, count: int, clients: int) -> Measured:
    """Clients that each record one sample after another, as requests do."""
    database = Database(f"sqlite:///{directory / 'writer.db'}")
    samples = make_samples(count, Receipts(database.key("receipts")))
    writer = SampleWriter(database)
    commits = [0]
    event.listen(database.engine, "commit", lambda _: commits.__setitem__(0, commits[0] + 1))

    async def client(mine: Sequence[NewSample]) -> None:
        for sample in mine:
            await writer.record(sample)

    start = time.perf_counter()
    await asyncio.gather(*(client(samples[number::clients]) for number in range(clients)))
    seconds = time.perf_counter() - start
    await writer.stop()
    database.close()
    return Measured(count / seconds, count / commits[0])


def through_sqlite(directory: Path, count: int, group_size: int) -> Measured:
    """The same bytes, packed beforehand, in groups of the same size."""
    rows = []
    for sample in make_samples(count, Receipts(b"bench")):
        row = pack(sample)
        text = row["scenario"] + row["spans"] + row["sampling"] + row["request"] + row["text"]
        rows.append((row["receipt"], text.encode() + row["tensors"]))
    connection = sqlite3.connect(directory / "plain.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE samples (receipt TEXT PRIMARY KEY, bytes BLOB NOT NULL)")
    start = time.perf_counter()
    for first in range(0, count, group_size):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO samples VALUES (?, ?)", rows[first : first + group_size])
        connection.execute("COMMIT")
    seconds = time.perf_counter() - start
    connection.close()
    return Measured(count / seconds, group_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4_000, help="samples of a round")
    parser.add_argument("--clients", type=int, default=256, help="requests at a time")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the databases are made (default: temporary)"
    )
    arguments = parser.parse_args()
    ours: list[float] = []
    limit: list[float] = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            written = asyncio.run(through_the_writer(Path(name), arguments.samples, arguments.clients))
            plain = through_sqlite(Path(name), arguments.samples, max(1, round(written.group_size)))
        ours.append(written.samples_per_second)
        limit.append(plain.samples_per_second)
        print(
            f"round {number + 1}: writer {ours[-1]:,.0f} samples/s in groups of {written.group_size:.0f}, "
            f"sqlite3 {limit[-1]:,.0f} samples/s",
            flush=True,
        )
    writer, plain_limit = statistics.median(ours), statistics.median(limit)
    print(f"gateway_store: writer={writer:.0f}/s sqlite={plain_limit:.0f}/s ratio={writer / plain_limit:.2f}")


if __name__ == "__main__":
    main()
