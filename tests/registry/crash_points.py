"""Kills a process before each durable operation in turn, restarts on what is left, and checks that nothing is broken.

Run as `python -m tests.registry.crash_points WORK DIRECTORY`; prints one line per point and exits with 1 at the first
broken one. WORK is a name of WORKS. Forks instead of starting interpreters: a hundred points take seconds.
"""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import sqlalchemy as sa
from atoll.registry import manifest
from atoll.registry.app import Registry
from atoll.registry.types import Kind

from tests.registry.material import SCENARIO, content, seal, settings_for, write_base_model

Answer = Callable[[str], None]
Work = Callable[[Registry, Answer], None]
DURABLE_CALLS = ("fsync", "rename", "mkdir", "unlink", "rmdir")


@dataclass(frozen=True)
class Place:
    """A registry's directory, and the base model outside of it."""

    directory: Path
    base: Path

    def open(self) -> Registry:
        return Registry(settings_for(self.directory, base=self.base, keep=1))


def create(registry: Registry, answer: Answer) -> None:
    """From an empty directory to version 0, which opening does."""
    answer(f"version {registry.chain.get(SCENARIO).number}")


def train(registry: Registry, answer: Answer) -> None:
    """One training job after three that were done: two seals, a commit, and the removal of what is too old."""
    _train(registry, 3, answer)


def _train(registry: Registry, parent: int, answer: Answer) -> None:
    model = seal(registry, b"model %d" % parent)
    answer(f"sealed {model.digest}")
    checkpoint = seal(registry, b"checkpoint %d" % parent, Kind.CHECKPOINT)
    answer(f"sealed {checkpoint.digest}")
    version = registry.chain.commit(content(parent, model.digest, checkpoint_digest=checkpoint.digest))
    answer(f"version {version.number}")
    registry.sweeper.sweep()


def reseal(registry: Registry, answer: Answer) -> None:
    """Content that retention removed comes back and is committed again."""
    model = seal(registry, b"model 0")
    answer(f"sealed {model.digest}")
    answer(f"version {registry.chain.commit(content(3, model.digest)).number}")


def _nothing(place: Place) -> None:
    place.directory.mkdir()


def _three_versions(place: Place) -> None:
    registry = place.open()
    for parent in range(3):
        _train(registry, parent, lambda _: None)
    registry.close()


WORKS = {"create": (_nothing, create), "train": (_three_versions, train), "reseal": (_three_versions, reseal)}


def arm(point: int) -> None:
    """Kills this process before its `point`-th durable operation."""
    remaining = iter(range(point, -1, -1))

    def step() -> None:
        if next(remaining) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def armed(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **named: object) -> object:
            step()
            return call(*arguments, **named)

        return wrapper

    for name in DURABLE_CALLS:
        setattr(os, name, armed(getattr(os, name)))
    shutil.copyfile = armed(shutil.copyfile)  # type: ignore[assignment]
    sa.event.listen(sa.Engine, "commit", lambda _connection: step())


def check(registry: Registry, answers: list[str]) -> None:
    """What must hold after any restart."""
    store = registry.artifacts.store
    chain = registry.chain.since(SCENARIO, 0, 100)
    assert [version.number for version in chain] == list(range(len(chain)))
    assert [version.revision for version in chain] == list(range(1, len(chain) + 1))
    assert registry.scenarios.get(SCENARIO).head == len(chain) - 1
    there = {a.digest for a in registry.artifacts.list_page(None, 1000, None).artifacts if a.removed_at is None}
    assert {path.name for path in store.artifacts.iterdir()} == there, "rows and directories differ"
    assert chain[-1].content.model_digest in there, "the head has no bytes"
    for digest in there:
        manifest.verify(store.files_of(digest), registry.artifacts.get(digest).files)
    assert not any(store.trash.iterdir())
    for answer in answers:
        word, value = answer.split()
        if word == "version":
            assert int(value) < len(chain), f"version {value} was answered and is gone"
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
    arm(point)
    run(place.open(), answer)


def restart(place: Place, run: Work, answers: list[str], answer: Answer) -> None:
    """Opens what is left, checks it, does the work again as a client that got no answer would, and checks again."""
    registry = place.open()
    check(registry, answers)
    replayed: list[str] = []
    run(registry, replayed.append)
    check(registry, [*answers, *replayed])
    assert len(replayed) >= len(answers)


def main(work: str, directory: Path) -> int:
    # A killed process loses nothing that the kernel has, so real flushes would only make this slow.
    os.fsync = lambda fd: None
    sa.event.listen(sa.Pool, "checkout", lambda connection, *_: connection.execute("PRAGMA synchronous=OFF"))
    prepare, run = WORKS[work]
    base = write_base_model(directory / "base")
    prepared = Place(directory / "prepared", base)
    prepare(prepared)
    # Once without a kill, so that the forks inherit every module that is imported late.
    rehearsal = Place(directory / "rehearsal", base)
    shutil.copytree(prepared.directory, rehearsal.directory)
    registry = rehearsal.open()
    run(registry, lambda _: None)
    check(registry, [])
    registry.close()
    for point in count():
        place = Place(directory / f"point-{point}", base)
        shutil.copytree(prepared.directory, place.directory)
        status, answers = in_child(partial(attempt, place, run, point))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"point {point}: the work failed without a kill"
            print(f"points {point}")
            return 0
        status, _ = in_child(partial(restart, place, run, answers))
        if status != 0:
            print(f"point {point}: the restart failed after {answers}")
            return 1
        shutil.rmtree(place.directory)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
