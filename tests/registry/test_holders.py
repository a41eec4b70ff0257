"""Two trainers on one scenario: every order of their steps, and of the moment at which the first one's lease lapses."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from atoll.common.errors import AtollError
from atoll.registry.app import Registry
from atoll.registry.job_types import JobPhase, JobProgress, StagedVersion, TrainingBody
from atoll.registry.leases import Leases
from atoll.registry.types import VersionContent

from tests.registry.material import SCENARIO, content, seal

TTL = timedelta(seconds=15)
BODY = TrainingBody("grpo", {}, ("sample-1",))
STEPS = ("acquire", "run", "stage", "commit")


def orders(first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every merge of two sequences that keeps the order within each."""
    if not first or not second:
        yield first + second
        return
    yield from ((first[0], *rest) for rest in orders(first[1:], second))
    yield from ((second[0], *rest) for rest in orders(first, second[1:]))


@dataclass
class Holder:
    """A trainer that stops when it is told that it is not the holder, and otherwise does its next step."""

    name: str
    model: str
    token: int | None = None
    done: list[str] = field(default_factory=list)


class World:
    """The registry, and beside it what must come out: the newest token, when it expires, attempts, who committed."""

    def __init__(self, registry: Registry, scenario: str, models: tuple[str, str]) -> None:
        self.registry = registry
        self.scenario = scenario
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.leases = Leases(registry.database, lambda: self.now)
        self.holders = {"a": Holder("a", models[0]), "b": Holder("b", models[1])}
        self.newest = 0
        self.expires = self.now
        self.attempts = 0
        self.committed: Holder | None = None

    def step(self, step: str) -> None:
        who, what = step.split()
        holder = self.holders[who]
        if what == "lapses":
            self.now += TTL
        elif what == "acquire":
            self.acquire(holder)
        elif holder.token is not None:
            self.write(holder, what)

    def acquire(self, holder: Holder) -> None:
        lease = self.leases.acquire(self.scenario, "trainer", holder.name, f"{holder.name}:1", TTL)
        if self.now < self.expires:
            assert lease.holder != holder.name, "who asks while another one has it gets their lease"
            assert lease.fencing_token == self.newest
        else:
            assert (lease.holder, lease.fencing_token) == (holder.name, self.newest + 1)
            holder.token = self.newest = lease.fencing_token
            self.expires = self.now + TTL

    def write(self, holder: Holder, what: str) -> None:
        may = holder.token == self.newest
        try:
            if what == "commit":
                version = self.registry.chain.commit(self.wanted(holder), holder.token or 0)
                assert (version.content.model_digest, version.fencing_token) == (holder.model, holder.token)
                self.committed = holder
            else:
                self.put(holder, what)
            assert may, f"{holder.name} wrote under the old token {holder.token}"
        except AtollError as error:
            # The chain is asked before the token: a commit of the other holder is told as what it is.
            taken = self.committed is not None and self.committed is not holder
            assert error.code == ("job_committed_differently" if what == "commit" and taken else "fenced")
            assert taken or not may
            holder.token = None
        else:
            holder.done.append(what)

    def put(self, holder: Holder, what: str) -> None:
        progress = JobProgress(JobPhase.RUNNING, self.attempts + 1)
        if what == "stage":
            progress = JobProgress(JobPhase.STAGED, self.attempts, StagedVersion(0, holder.model, None, {}, {}))
        record = self.registry.job_records.put(self.scenario, "job-1", BODY, progress, holder.token or 0)
        if self.committed is not None:
            assert record.progress.phase is JobPhase.COMMITTED, "what has ended stays as it is"
            return
        assert (record.progress, record.fencing_token) == (progress, holder.token)
        self.attempts = progress.attempt

    def wanted(self, holder: Holder) -> VersionContent:
        return content(0, holder.model, scenario=self.scenario)

    def check(self) -> None:
        """The chain has at most one version of the job, that of a holder that was current, and the record says so."""
        chain = self.registry.chain.since(self.scenario, 0, 10)
        assert len(chain) == (1 if self.committed is None else 2)
        if self.committed is not None:
            assert chain[1].content.model_digest == self.committed.model
            record = self.registry.job_records.get(self.scenario, "job-1")
            assert (record.progress.phase, record.version) == (JobPhase.COMMITTED, 1)


def test_every_order_of_two_holders_leaves_one_version_of_the_one_that_was_current(registry: Registry) -> None:
    models = (seal(registry, b"a").digest, seal(registry, b"b").digest)
    definition = registry.scenarios.get(SCENARIO).definition
    mine = (*(f"a {step}" for step in STEPS[:2]), "a lapses", *(f"a {step}" for step in STEPS[2:]))
    theirs = tuple(f"b {step}" for step in STEPS)
    winners: set[str] = set()
    for index, order in enumerate(orders(mine, theirs)):
        scenario = f"order-{index}"
        registry.scenarios.create(replace(definition, scenario_id=scenario))
        world = World(registry, scenario, models)
        for step in order:
            world.step(step)
        world.check()
        winners.add("nobody" if world.committed is None else world.committed.name)
    assert {"a", "b"} <= winners
