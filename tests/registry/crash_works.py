"""What a registry does while `crash_points.py` kills it: each as a client would, which goes on from what it finds."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from atoll.common.errors import NotFound
from atoll.registry.app import Registry
from atoll.registry.job_types import JobPhase, JobProgress, RollbackBody, StagedVersion, TrainingBody
from atoll.registry.types import Kind, Operation

from tests.postgres import PostgresServer
from tests.registry.material import SCENARIO, content, seal, settings_for
from tests.registry.test_restoring import commit, restoring

Answer = Callable[[str], None]
Work = Callable[[Registry, Answer], None]
TTL = timedelta(hours=1)
HOLDER = "one"


@dataclass(frozen=True)
class Place:
    """A registry's directory, the base model outside of it, and the server of its database unless that is SQLite."""

    directory: Path
    base: Path
    server: PostgresServer | None

    def open(self) -> Registry:
        url = None if self.server is None else self.server.url(self.directory.name)
        return Registry(settings_for(self.directory, base=self.base, keep=1, database_url=url))

    def make(self) -> "Place":
        self.directory.mkdir()
        if self.server is not None:
            self.server.create(self.directory.name)
        return self

    def copy(self, name: str) -> "Place":
        """The same registry once more; nobody may have this one open."""
        directory = self.directory.with_name(name)
        shutil.copytree(self.directory, directory)
        if self.server is not None:
            self.server.create(name, self.directory.name)
        return Place(directory, self.base, self.server)

    def remove(self) -> None:
        shutil.rmtree(self.directory)
        if self.server is not None:
            self.server.drop(self.directory.name)


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


def lease(registry: Registry, answer: Answer) -> None:
    """A lease is taken, kept, given up and taken by another holder, who commits nothing yet."""
    found = registry.leases.acquire(SCENARIO, "trainer", HOLDER, "one:1", TTL)
    answer(f"token {found.fencing_token}")
    if found.holder == HOLDER:
        answer(f"token {registry.leases.renew(SCENARIO, 'trainer', HOLDER, found.fencing_token, TTL).fencing_token}")
        registry.leases.release(SCENARIO, "trainer", HOLDER)
    else:
        answer(f"token {found.fencing_token}")
    answer(f"token {registry.leases.acquire(SCENARIO, 'trainer', 'two', 'two:1', TTL).fencing_token}")


def _token(registry: Registry, answer: Answer) -> int:
    token = registry.leases.acquire(SCENARIO, "trainer", HOLDER, "one:1", TTL).fencing_token
    answer(f"token {token}")
    return token


def record(registry: Registry, answer: Answer) -> None:
    """A job from its record to its commit, under a lease. What is recorded is not done again."""
    token = _token(registry, answer)
    body = TrainingBody("grpo", {"group_size": 4}, ("sample-4",))

    def put(progress: JobProgress) -> JobProgress:
        written = registry.job_records.put(SCENARIO, "job-4", body, progress, token)
        answer(f"phase {written.progress.phase}")
        return written.progress

    try:
        known = registry.job_records.get(SCENARIO, "job-4").progress
        answer(f"phase {known.phase}")
    except NotFound:
        known = put(JobProgress(JobPhase.RECORDED))
    if known.phase in (JobPhase.RECORDED, JobPhase.RUNNING):
        known = put(JobProgress(JobPhase.RUNNING, known.attempt + 1))
        staged = StagedVersion(3, seal(registry, b"model 3").digest, None, {"train/loss": 0.25}, {"steps": 4})
        known = put(JobProgress(JobPhase.STAGED, known.attempt, staged))
    else:
        answer("phase running")
        answer("phase staged")
    if known.staged is None:
        version = registry.chain.get(SCENARIO, job_id="job-4")
    else:
        version = registry.chain.commit(content(3, known.staged.model_digest), token)
    answer(f"version {version.number}")


def rollback(registry: Registry, answer: Answer) -> None:
    """A rollback to the head's parent, from its record to its commit and the sweep after it."""
    token = _token(registry, answer)
    put = registry.job_records.put(SCENARIO, "rollback-4", RollbackBody(2), JobProgress(JobPhase.RECORDED), token)
    answer(f"phase {put.progress.phase}")
    head, target = registry.chain.get(SCENARIO, number=3), registry.chain.get(SCENARIO, number=2)
    version = registry.chain.commit(restoring(Operation.ROLLBACK, head, target, job_id="rollback-4"), token)
    answer(f"version {version.number}")
    registry.sweeper.sweep()


def recovery(registry: Registry, answer: Answer) -> None:
    """What a trainer commits after it lost its memory while the head was live."""
    token = _token(registry, answer)
    head, target = registry.chain.get(SCENARIO, number=5), registry.chain.get(SCENARIO, number=3)
    wanted = restoring(Operation.RECOVERY, head, target, model=head.content.model_digest, job_id="recovery-6")
    answer(f"version {registry.chain.commit(wanted, token).number}")
    registry.sweeper.sweep()


def _nothing(place: Place) -> None:
    place.make()


def _three_versions(place: Place) -> None:
    registry = place.make().open()
    for parent in range(3):
        _train(registry, parent, lambda _: None)
    registry.close()


def _live_head(place: Place) -> None:
    _three_versions(place)
    registry = place.open()
    for parent in (3, 4):
        commit(registry, parent, live=True)
    registry.close()


WORKS: dict[str, tuple[Callable[[Place], None], Work]] = {
    "create": (_nothing, create),
    "train": (_three_versions, train),
    "reseal": (_three_versions, reseal),
    "lease": (_three_versions, lease),
    "record": (_three_versions, record),
    "rollback": (_three_versions, rollback),
    "recovery": (_live_head, recovery),
}
