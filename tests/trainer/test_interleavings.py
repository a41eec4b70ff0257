"""Every interleaving of two trainers over one scenario, breadth first: lapses, take-overs, crashes, and a holder that
was stopped and goes on with what it had decided long ago.

The decisions are the real ones (`decide`). The registry is a model with less than the real one has: it compares tokens
and the parent with the head, and keeps records; that no sample is consumed twice must follow from that alone.
"""

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from atoll.api.registry.v1 import job_record_pb2
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion
from atoll.trainer.decision import Action, Memory, Situation, crashes, decide
from atoll.trainer.job_queue import JobBody
from atoll.trainer.job_records import OPEN, RecordedJob, StagedVersion

RECORDED, RUNNING, STAGED, COMMITTED, FAILED = (
    job_record_pb2.JOB_PHASE_RECORDED,
    job_record_pb2.JOB_PHASE_RUNNING,
    job_record_pb2.JOB_PHASE_STAGED,
    job_record_pb2.JOB_PHASE_COMMITTED,
    job_record_pb2.JOB_PHASE_FAILED,
)
JOBS = (
    JobBody("first", "chat", "grpo", {}, ("a",)),
    JobBody("second", "chat", "grpo", {}, ("b",)),  # from a live head
    JobBody.rollback("back", "chat", 0),
)
RECOVERY = -1
CHECKPOINT_EVERY = 2
MAX_ATTEMPTS = 2
LAPSES, CRASHES = 2, 1
"""How often a lease lapses, and how often a process dies, loses its workers or is stopped."""


class Record(NamedTuple):
    phase: JobPhase.ValueType = RECORDED
    attempt: int = 0
    parent: int = -1
    """Of what is staged."""


class Decided(NamedTuple):
    """What a trainer is about to write, and under which token; any time may pass until it does."""

    action: Action
    token: int
    job: int
    head: int
    record: Record


class Trainer(NamedTuple):
    """Example: Trainer(token=1, loaded=0)."""

    token: int = 0
    job: int | None = None
    """In hand."""
    loaded: int | None = None
    begun: int = 0
    trained_from: int | None = None
    staged: bool = False
    decided: Decided | None = None


class World(NamedTuple):
    """`made_by` says for every version after 0 which job made it."""

    made_by: tuple[int, ...] = ()
    records: tuple[Record, ...] = (Record(),) * len(JOBS)
    token: int = 0
    holder: int | None = None
    """Which trainer has the lease; None when it has lapsed."""
    trainers: tuple[Trainer, ...] = (Trainer(), Trainer())
    lapses: int = LAPSES
    crashes: int = CRASHES

    @property
    def head(self) -> int:
        return len(self.made_by)

    def with_trainer(self, index: int, trainer: Trainer) -> "World":
        trainers = (trainer, self.trainers[1]) if index == 0 else (self.trainers[0], trainer)
        return self._replace(trainers=trainers)

    def with_record(self, job: int, record: Record) -> "World":
        return self._replace(records=(*self.records[:job], record, *self.records[job + 1 :]))

    @property
    def open_jobs(self) -> list[int]:
        return [job for job, record in enumerate(self.records) if record.phase in OPEN]


@cache
def action_for(job: int, record: Record, number: int, made_by: int, memory: Memory) -> Action:
    """What is decided when the head is version `number`, made by this job."""
    trained = number > 0 and made_by != RECOVERY and JOBS[made_by].restores is None
    durable = not trained or number % CHECKPOINT_EVERY == 0
    head = ChainVersion(number, number - 1 if number else None, WeightVersion(1, number), durable=durable)
    staged = StagedVersion(record.parent, "m", "", {}, {}) if record.phase == STAGED else None
    recorded = RecordedJob(JOBS[job], record.phase, record.attempt, staged)
    return decide(Situation(recorded, head, memory, max_attempts=MAX_ATTEMPTS))


def look(world: World, index: int) -> World:
    """A trainer looks, decides, and does what needs no registry; a write it only decides."""
    trainer = world.trainers[index]
    job = world.open_jobs[0] if trainer.job is None else trainer.job
    record, head = world.records[job], world.head
    memory = Memory(trainer.loaded, trainer.begun, trainer.trained_from)
    action = action_for(job, record, head, world.made_by[-1] if head else 0, memory)
    if action in (Action.ADOPT, Action.END):
        made = world.made_by.index(job) + 1 if action is Action.ADOPT else -1
        loaded = made if trainer.staged and trainer.trained_from == made - 1 else trainer.loaded
        return world.with_trainer(index, Trainer(trainer.token, loaded=loaded))
    if action is Action.DISCARD:
        return world.with_trainer(index, trainer._replace(job=job, trained_from=None, staged=False))
    if action is Action.LOAD_HEAD:
        return world.with_trainer(index, trainer._replace(job=job, loaded=head))
    decided = Decided(action, trainer.token, job, head, record)
    return world.with_trainer(index, trainer._replace(job=job, decided=decided))


def write(world: World, index: int) -> World:
    """What a trainer has decided reaches the registry."""
    trainer = world.trainers[index]
    decided, trainer = trainer.decided, trainer._replace(decided=None)
    assert decided is not None
    if decided.token != world.token:
        # As `LeaseKeeper.doubt` does: a newer token of its own is not in doubt.
        token = 0 if trainer.token == decided.token else trainer.token
        return world.with_trainer(index, trainer._replace(token=token))
    job, now = decided.job, world.records[decided.job]
    if decided.action is Action.RECOVER or decided.action in (Action.ROLL_BACK, Action.COMMIT):
        parent = decided.record.parent if decided.action is Action.COMMIT else decided.head
        if parent == world.head:
            world = world._replace(made_by=(*world.made_by, RECOVERY if decided.action is Action.RECOVER else job))
            if decided.action is not Action.RECOVER:
                world = world.with_record(job, Record(COMMITTED, now.attempt))
        return world.with_trainer(index, trainer)
    if now.phase not in OPEN:
        return world.with_trainer(index, trainer)
    if decided.action is Action.FAIL:
        return world.with_record(job, Record(FAILED, now.attempt)).with_trainer(index, trainer)
    if decided.action is Action.TRAIN:
        attempt = crashes(RecordedJob(JOBS[job], decided.record.phase, decided.record.attempt), trainer.begun) + 1
        assert attempt >= now.attempt, "the registry refuses attempts that fall"
        trainer = trainer._replace(begun=attempt, loaded=None, trained_from=decided.head, staged=False)
        return world.with_record(job, Record(RUNNING, attempt)).with_trainer(index, trainer)
    assert decided.action is Action.STAGE and trainer.trained_from is not None
    record = Record(STAGED, max(now.attempt, trainer.begun), trainer.trained_from)
    return world.with_record(job, record).with_trainer(index, trainer._replace(staged=True))


def acquire(world: World, index: int) -> World:
    token = world.token + 1
    taken = world._replace(token=token, holder=index)
    return taken.with_trainer(index, taken.trainers[index]._replace(token=token))


def crash(world: World, index: int) -> World:
    """The process dies with all its memory; what it held lapses."""
    holder = None if world.holder == index else world.holder
    return world.with_trainer(index, Trainer())._replace(holder=holder)


def stop(world: World, index: int) -> World:
    """The process stops on purpose: it gives its attempt back and releases the lease."""
    trainer = world.trainers[index]
    if trainer.token == world.token and trainer.job is not None:
        record = world.records[trainer.job]
        if record.phase == RUNNING and record.attempt == trainer.begun:
            world = world.with_record(trainer.job, Record(RECORDED, record.attempt - 1))
    return crash(world, index)


def lose_workers(world: World, index: int) -> World:
    kept = world.trainers[index]
    return world.with_trainer(index, Trainer(kept.token, kept.job, decided=kept.decided))


def quiet(world: World) -> World:
    """What happens when nothing more goes wrong: whoever holds the lease goes on, else the first one acquires it."""
    if world.holder is None:
        return acquire(world, 0)
    trainer = world.trainers[world.holder]
    return look(world, world.holder) if trainer.decided is None else write(world, world.holder)


def moves(world: World) -> Iterator[World]:
    """Everything that may happen next. A trainer whose lease has lapsed may not know: it goes on, as one does that was
    stopped after it had looked at its clock."""
    for index, trainer in enumerate(world.trainers):
        if trainer.decided is not None:
            yield write(world, index)
        elif trainer.token:
            yield look(world, index)
        if world.holder is None:
            yield acquire(world, index)
        if world.crashes and trainer != Trainer():
            yield crash(world, index)._replace(crashes=world.crashes - 1)
            yield stop(world, index)._replace(crashes=world.crashes - 1)
            # Between a decision and its write the workers do nothing.
            if trainer.trained_from is not None and trainer.decided is None:
                yield lose_workers(world, index)._replace(crashes=world.crashes - 1)
    if world.lapses and world.holder is not None:
        yield world._replace(holder=None, lapses=world.lapses - 1)


def check(before: World, after: World) -> None:
    """What holds in every step."""
    made = [job for job in after.made_by if job != RECOVERY]
    assert len(set(made)) == len(made), "a batch was consumed twice"
    assert after.made_by[: before.head] == before.made_by, "the chain was rewritten"
    for job, (old, new) in enumerate(zip(before.records, after.records, strict=True)):
        assert old.phase in OPEN or new == old, "a record that had ended changed"
        given_back = (old.phase, new.phase) == (RUNNING, RECORDED) and new.attempt == old.attempt - 1
        assert new.attempt >= old.attempt or given_back
        assert (new.phase == COMMITTED) == (job in made)
        # Whoever takes a running job over cannot tell a holder that died from one that was cut off.
        lost = CRASHES - after.crashes + LAPSES - after.lapses
        assert new.phase != FAILED or lost >= MAX_ATTEMPTS, "failed without the crashes for it"


def all_worlds() -> set[World]:
    start = World()
    seen, to_visit = {start}, deque([start])
    while to_visit:
        world = to_visit.popleft()
        if not world.open_jobs:
            continue
        for after in moves(world):
            if after not in seen:
                check(world, after)
                seen.add(after)
                to_visit.append(after)
    return seen


def test_two_trainers_never_fork_the_chain_never_consume_twice_and_always_come_to_an_end() -> None:
    worlds = all_worlds()
    assert len(worlds) > 1_000
    ends = {tuple(record.phase for record in world.records) for world in worlds if not world.open_jobs}
    assert (COMMITTED, COMMITTED, COMMITTED) in ends
    assert any(FAILED in end for end in ends), "crashes never reached the limit: the model is too small"
    ended: set[World] = set()
    for world in worlds:
        path: list[World] = []
        while world.open_jobs and world not in ended:
            path.append(world)
            assert len(path) < 200, f"does not come to an end: {path[0]}"
            world = quiet(world)
        ended.update(path)
