import os
import time
from datetime import timedelta

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError
from atoll.registry.app import Registry
from atoll.registry.job_types import JobPhase, JobProgress, RollbackBody, StagedVersion, TrainingBody
from atoll.registry.retention import Facts, Policy
from atoll.registry.retention_facts import own_reward, read_facts
from atoll.registry.settings import RegistrySettings
from atoll.registry.sweep import Disk, Sweeper
from atoll.registry.types import Kind, Operation

from tests.registry.material import SCENARIO, content, seal
from tests.registry.test_restoring import commit, lose, restoring

REASON = errors_pb2.REASON_TRAINING_CRASHED


def facts_of(registry: Registry) -> Facts:
    with registry.database.read() as connection:
        return read_facts(connection, free=7)


def stored(registry: Registry) -> set[str]:
    return {path.name for path in registry.artifacts.store.artifacts.iterdir()}


@pytest.mark.parametrize(
    ("metrics", "max_staleness", "reward"),
    [
        ({"reward/mean": 0.5}, 0, 0.5),
        ({"reward/mean": 0.5}, 1, None),
        ({"reward/mean": 0.5, "staleness/samples_admitted_stale": 0.0}, 1, 0.5),
        ({"reward/mean": 0.5, "staleness/samples_admitted_stale": 1.0}, 1, None),
        ({"reward/mean": 0.5, "staleness/samples_admitted_stale": 1.0}, 0, None),
        ({}, 0, None),
    ],
)
def test_a_reward_is_a_versions_own_only_when_the_whole_batch_was(
    metrics: dict[str, float], max_staleness: int, reward: float | None
) -> None:
    assert own_reward(metrics, max_staleness) == reward


def test_a_versions_reward_is_read_from_the_job_that_was_trained_from_it(registry: Registry) -> None:
    one = commit(registry, 0)
    model = seal(registry, b"model").digest
    registry.chain.commit(content(1, model, metrics={"reward/mean": 0.75}))
    registry.chain.commit(
        restoring(Operation.ROLLBACK, registry.chain.get(SCENARIO), one, metrics={"reward/mean": 0.1})
    )
    facts = facts_of(registry)
    assert {version.number: version.reward for version in facts.versions} == {0: None, 1: 0.75, 2: None, 3: None}
    assert facts.free == 7


def test_a_head_without_bytes_is_still_the_head(registry: Registry) -> None:
    one, live = commit(registry, 0), commit(registry, 1, live=True)
    lose(registry, live.content.model_digest)
    assert {version.number for version in facts_of(registry).versions} == {0, 1, 2}
    assert one.content.checkpoint_digest not in registry.sweeper.sweep()


def test_bytes_that_an_open_job_needs_stay_until_it_has_ended(registry: Registry) -> None:
    old = commit(registry, 0)
    registry.job_records.put(SCENARIO, "back", RollbackBody(1), JobProgress(JobPhase.RECORDED), 0)
    model = seal(registry, b"staged").digest
    staged = JobProgress(JobPhase.STAGED, 1, StagedVersion(2, model, None, {}, {}))
    for parent in (1, 2, 3):
        commit(registry, parent)
    registry.job_records.put(SCENARIO, "slow", TrainingBody("grpo", {}, ("s",)), staged, 0)
    two = registry.chain.get(SCENARIO, number=2)
    needed = facts_of(registry).needed
    assert needed[model] == f"staged by slow of {SCENARIO}"
    assert needed[two.content.model_digest] == f"trained from by slow of {SCENARIO}"
    assert needed[old.content.model_digest] == f"to be brought back by back of {SCENARIO}"
    assert registry.sweeper.sweep() == ()
    head = registry.chain.get(SCENARIO)
    registry.chain.commit(restoring(Operation.ROLLBACK, head, old, job_id="back"))
    registry.job_records.put(
        SCENARIO, "slow", TrainingBody("grpo", {}, ("s",)), JobProgress(JobPhase.FAILED, 1, reason=REASON), 0
    )
    assert set(registry.sweeper.sweep()) == set(digests(registry, 2)) | set(digests(registry, 3))


def digests(registry: Registry, number: int) -> tuple[str, ...]:
    found = registry.chain.get(SCENARIO, number=number).content
    return (found.model_digest, found.checkpoint_digest or "")


def test_a_pinned_version_stays_until_it_is_let_go(registry: Registry) -> None:
    commit(registry, 0)
    registry.pins.set(SCENARIO, 1, pinned=True)
    registry.pins.set(SCENARIO, 1, pinned=True)
    for parent in (1, 2, 3):
        commit(registry, parent)
    assert set(registry.sweeper.sweep()) == set(digests(registry, 2))
    registry.pins.set(SCENARIO, 1, pinned=False)
    registry.pins.set(SCENARIO, 1, pinned=False)
    assert set(registry.sweeper.sweep()) == set(digests(registry, 1))
    with pytest.raises(AtollError, match="cannot be restored") as refused:
        registry.pins.set(SCENARIO, 1, pinned=True)
    assert refused.value.code == "not_restorable"
    said = refused.value.message
    assert "retention removed it" in said and "ATOLL_REGISTRY_KEEP_CHECKPOINTS" in said and "seal" not in said
    with pytest.raises(AtollError, match="there is no version 9") as refused:
        registry.pins.set(SCENARIO, 9, pinned=True)
    assert refused.value.code == "version_not_found"


def test_the_best_rewarded_checkpoints_survive_a_sweep(registry: Registry, settings: RegistrySettings) -> None:
    best = settings.model_copy(update={"retention_policy": Policy.BEST_REWARD, "keep_checkpoints": 1})
    for parent, reward in enumerate((0.0, 0.9, 0.4, 0.3, 0.2)):
        model = seal(registry, b"m%d" % parent).digest
        checkpoint = seal(registry, b"c%d" % parent, Kind.CHECKPOINT).digest
        registry.chain.commit(content(parent, model, checkpoint_digest=checkpoint, metrics={"reward/mean": reward}))
    swept = Sweeper(registry.database, registry.artifacts.store, best).sweep()
    assert set(swept) == set(digests(registry, 2)) | set(digests(registry, 3))
    assert set(digests(registry, 1)) <= stored(registry), "its child was rewarded 0.9"


class FakeDisk:
    """A filesystem that is as full as a test says."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self, _path: object) -> Disk:
        return Disk(capacity=1000, free=self.free)


def test_a_writer_waits_while_the_disk_is_at_its_floor_and_goes_on_by_itself(
    registry: Registry, settings: RegistrySettings
) -> None:
    disk = FakeDisk(free=100)
    with_floor = settings.model_copy(update={"min_free_space": None, "min_free_space_fraction": 0.1})
    sweeper = Sweeper(registry.database, registry.artifacts.store, with_floor, disk)
    sweeper.ensure_room("one")
    disk.free = 99
    own = registry.artifacts.store.stage("one", Kind.MODEL)
    other = registry.artifacts.store.stage("two", Kind.MODEL)
    with pytest.raises(AtollError, match="has 99 bytes left, expected 100 or more") as refused:
        sweeper.ensure_room("one")
    assert (refused.value.code, refused.value.retry_after_s) == ("storage_full", 30.0)
    assert (own.exists(), other.exists()) == (False, True), "what this writer left behind goes first"
    disk.free = 100
    sweeper.ensure_room("one")


def test_a_floor_takes_checkpoints_that_the_policy_would_keep(registry: Registry, settings: RegistrySettings) -> None:
    for parent in range(4):
        commit(registry, parent)
    keep_all = settings.model_copy(update={"keep_checkpoints": 9, "min_free_space": 1})
    disk = FakeDisk(free=0)
    sweeper = Sweeper(registry.database, registry.artifacts.store, keep_all, disk)
    assert set(sweeper.sweep()) == set(digests(registry, 1))


def test_a_bound_that_cannot_be_met_is_said_once(
    registry: Registry, settings: RegistrySettings, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = FakeDisk(free=0)
    sweeper = Sweeper(
        registry.database, registry.artifacts.store, settings.model_copy(update={"min_free_space": 5}), disk
    )
    sweeper.sweep()
    sweeper.sweep()
    disk.free = 5
    sweeper.sweep()
    sweeper.sweep()
    output = capsys.readouterr().out
    assert output.count("a storage bound cannot be met") == 1
    assert output.count("unpin versions") == 1
    assert output.count("bounds are met again") == 1


def test_staging_areas_that_nobody_writes_to_go_after_hours(registry: Registry) -> None:

    store = registry.artifacts.store
    idle, busy = store.stage("idle", Kind.MODEL), store.stage("busy", Kind.MODEL)
    (busy / "deep").mkdir()
    (busy / "deep" / "weights").write_bytes(b"x")
    past = time.time() - timedelta(hours=7).total_seconds()
    for area in (idle.parent, busy.parent):
        for path in [area, *area.rglob("*")]:
            if path.name != "weights":
                os.utime(path, (past, past))
    registry.sweeper.sweep()
    assert (idle.exists(), busy.exists()) == (False, True)
