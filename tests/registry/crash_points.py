"""Kills a process before each durable operation in turn, restarts on what is left, and checks that nothing is broken.

Run as `python -m tests.registry.crash_points WORK DIRECTORY [SOCKET DIRECTORY OF A POSTGRESQL SERVER]`; prints one line
per broken point and exits with 1 at the first. WORK is a name of WORKS. Forks instead of starting interpreters: a
hundred points take seconds. On PostgreSQL, where a copy of a database takes longer, only the commits are such points.
"""

import os
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import sqlalchemy as sa
from atoll.registry import manifest
from atoll.registry.app import Registry
from atoll.registry.job_types import JobPhase
from atoll.registry.types import Operation

from tests.postgres import PostgresServer
from tests.registry.crash_works import HOLDER, WORKS, Answer, Place, Work
from tests.registry.material import SCENARIO, write_base_model

DURABLE_CALLS = ("fsync", "rename", "mkdir", "unlink", "rmdir")
PHASES = [JobPhase.RECORDED, JobPhase.RUNNING, JobPhase.STAGED, JobPhase.COMMITTED]


def arm(point: int, *, files: bool) -> None:
    """Kills this process before its `point`-th durable operation, or between a commit and its answer.

    files: whether changes of files count, not commits alone.
    """
    remaining = iter(range(point, -1, -1))

    def step() -> None:
        if next(remaining) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def armed(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **named: object) -> object:
            step()
            return call(*arguments, **named)

        return wrapper

    if files:
        for name in DURABLE_CALLS:
            setattr(os, name, armed(getattr(os, name)))
        shutil.copyfile = armed(shutil.copyfile)  # type: ignore[assignment]
    committed: list[bool] = []

    def before_commit(_connection: object) -> None:
        step()
        committed.append(True)

    def given_back(*_: object) -> None:
        if committed:
            committed.clear()
            step()

    sa.event.listen(sa.Engine, "commit", before_commit)
    sa.event.listen(sa.Pool, "checkin", given_back)


def check(registry: Registry, answers: list[str]) -> None:
    """What must hold after any restart."""
    store = registry.artifacts.store
    chain = registry.chain.since(SCENARIO, 0, 100)
    assert [version.number for version in chain] == list(range(len(chain)))
    assert [version.revision for version in chain] == list(range(1, len(chain) + 1))
    assert registry.scenarios.get(SCENARIO).head == len(chain) - 1
    for before, after in pairwise(chain):
        restores = after.content.operation in (Operation.ROLLBACK, Operation.RECOVERY)
        assert after.weight_version.incarnation == before.weight_version.incarnation + restores
        assert after.content.parent == before.number
    there = {a.digest for a in registry.artifacts.list_page(None, 1000, None).artifacts if a.removed_at is None}
    assert {path.name for path in store.artifacts.iterdir()} == there, "rows and directories differ"
    assert chain[-1].content.model_digest in there, "the head has no bytes"
    durable = [version for version in chain if version.content.is_durable]
    assert durable[-1].content.checkpoint_digest in {None, *there}, "the newest checkpoint has no bytes"
    for digest in there:
        manifest.verify(store.files_of(digest), registry.artifacts.get(digest).files)
    assert not any(store.trash.iterdir())
    _check_records(registry)
    for answer in answers:
        _check_answer(registry, answer, len(chain), there)


def _check_records(registry: Registry) -> None:
    """Every committed job has an ended record, and no record says committed without its version."""
    records = {r.job_id: r for r in registry.job_records.list_page(SCENARIO, open_only=False, limit=100, after=None)}
    assert sorted(record.position for record in records.values()) == list(range(1, len(records) + 1))
    for version in registry.chain.since(SCENARIO, 1, 100):
        record = records.pop(version.content.job_id or "")
        assert (record.progress.phase, record.version) == (JobPhase.COMMITTED, version.number)
    for record in records.values():
        assert record.progress.phase.is_open
        staged = record.progress.staged
        if staged is not None:
            registry.artifacts.get(staged.model_digest)


def _check_answer(registry: Registry, answer: str, length: int, there: set[str]) -> None:
    word, value = answer.split()
    if word == "version":
        assert int(value) < length, f"version {value} was answered and is gone"
    elif word == "token":
        lease = registry.leases.get(SCENARIO, "trainer")
        assert lease is not None and lease.fencing_token >= int(value), f"token {value} was answered and is forgotten"
        assert lease.fencing_token == int(value) or lease.holder != HOLDER
    elif word == "phase":
        (record,) = (
            record
            for record in registry.job_records.list_page(SCENARIO, open_only=False, limit=100, after=None)
            if record.job_id in ("job-4", "rollback-4")
        )
        reached = PHASES.index(record.progress.phase) >= PHASES.index(JobPhase(value))
        assert reached, f"phase {value} was answered, the record says {record.progress.phase}"
    else:
        assert value in there, f"artifact {value} was answered as sealed and is gone"


def in_child(run: Callable[[Answer], None]) -> tuple[int, list[str]]:
    """Runs in a forked process; returns its wait status and what it answered before it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run(lambda line: (os.write(writer, f"{line}\n".encode()), None)[1])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answers = stream.read().splitlines()
    return os.waitpid(child, 0)[1], answers


def attempt(place: Place, run: Work, point: int, answer: Answer) -> None:
    arm(point, files=place.server is None)
    run(place.open(), answer)


def restart(place: Place, run: Work, answers: list[str], answer: Answer) -> None:
    """Opens what is left, checks it, does the work again as a client that got no answer would, and checks again."""
    registry = place.open()
    check(registry, answers)
    replayed: list[str] = []
    run(registry, replayed.append)
    check(registry, [*answers, *replayed])
    assert len(replayed) >= len(answers)


def _without_flush(connection: object, *_: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def main(work: str, directory: Path, server: PostgresServer | None) -> int:
    # A killed process loses nothing that the kernel has, so real flushes would only make this slow.
    os.fsync = lambda fd: None
    sa.event.listen(sa.Pool, "checkout", _without_flush)
    prepare, run = WORKS[work]
    base = write_base_model(directory / "base")
    prepared = Place(directory / f"{work}-prepared", base, server)
    prepare(prepared)
    # Once without a kill, so that the forks inherit every module that is imported late.
    rehearsal = prepared.copy(f"{work}-rehearsal")
    registry = rehearsal.open()
    run(registry, lambda _: None)
    check(registry, [])
    registry.close()
    for point in count():
        place = prepared.copy(f"{work}-{point}")
        status, answers = in_child(partial(attempt, place, run, point))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"point {point}: the work failed without a kill"
            print(f"points {point}")
            return 0
        status, _ = in_child(partial(restart, place, run, answers))
        if status != 0:
            print(f"point {point}: the restart failed after {answers}")
            return 1
        place.remove()
    return 1


if __name__ == "__main__":
    socket = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), None if socket is None else PostgresServer(socket, 0)))
