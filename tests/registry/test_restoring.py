from typing import Any

import pytest
from atoll.common.errors import AtollError
from atoll.registry import tables
from atoll.registry.app import Registry
from atoll.registry.types import Kind, Operation, Version, VersionContent, utc_now

from tests.registry.material import SCENARIO, content, seal


def restoring(
    operation: Operation, head: Version, target: Version, *, model: str | None = None, **changes: object
) -> VersionContent:
    """A commit after `head` that brings `target` back."""
    values: dict[str, object] = {
        "operation": operation,
        "job_id": f"{operation}-{head.number + 1}",
        "consumed_sample_ids": (),
        "metrics": {},
        "family_state": target.content.family_state,
        "checkpoint_digest": target.content.checkpoint_digest,
        "restores": target.number,
    }
    return content(head.number, model or target.content.model_digest, **(values | changes))


def commit(registry: Registry, parent: int, *, live: bool = False) -> Version:
    model = seal(registry, b"model %d" % parent)
    checkpoint = None if live else seal(registry, b"checkpoint %d" % parent, Kind.CHECKPOINT).digest
    return registry.chain.commit(content(parent, model.digest, checkpoint_digest=checkpoint))


def lose(registry: Registry, digest: str | None) -> None:
    """As retention, or a loss that the start noticed, would leave it."""
    with registry.database.write() as connection:
        artifacts = tables.artifacts
        connection.execute(artifacts.update().where(artifacts.c.digest == digest).values(removed_at=utc_now()))


def refusal(registry: Registry, wanted: VersionContent) -> tuple[str, str]:
    with pytest.raises(AtollError) as refused:
        registry.chain.commit(wanted)
    return refused.value.code, refused.value.field


def test_a_rollback_appends_its_target_in_the_next_incarnation(registry: Registry) -> None:
    one, two = commit(registry, 0), commit(registry, 1)
    back = registry.chain.commit(restoring(Operation.ROLLBACK, two, one))
    assert (back.number, str(back.weight_version), back.content.parent, back.content.restores) == (3, "2:3", 2, 1)
    assert back.content.is_durable
    assert registry.chain.get(SCENARIO) == back
    three = commit(registry, 3)
    assert str(three.weight_version) == "2:4"
    assert registry.chain.commit(restoring(Operation.ROLLBACK, three, back, restores=3)).weight_version.incarnation == 3


def test_a_rollback_to_version_0_needs_no_checkpoint(registry: Registry) -> None:
    one, zero = commit(registry, 0), registry.chain.get(SCENARIO, number=0)
    back = registry.chain.commit(restoring(Operation.ROLLBACK, one, zero))
    assert (back.content.checkpoint_digest, back.content.is_durable) == (None, True)


def test_a_live_version_a_future_one_and_one_without_its_bytes_are_not_restored(registry: Registry) -> None:
    one, two, three = commit(registry, 0), commit(registry, 1, live=True), commit(registry, 2)
    assert [v.content.is_durable for v in (one, two, three)] == [True, False, True]
    assert refusal(registry, restoring(Operation.ROLLBACK, three, two)) == ("not_restorable", "restores")
    assert refusal(registry, restoring(Operation.ROLLBACK, three, one, restores=9)) == ("version_not_found", "restores")
    lose(registry, one.content.checkpoint_digest)
    assert refusal(registry, restoring(Operation.ROLLBACK, three, one)) == ("not_restorable", "restores")
    assert registry.chain.get(SCENARIO) == three


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_digest": "f" * 64}, "model_digest"),
        ({"checkpoint_digest": None}, "checkpoint_digest"),
        ({"consumed_sample_ids": ("s",)}, "consumed_sample_ids"),
    ],
)
def test_a_rollback_to_other_bytes_than_its_targets_is_refused(
    registry: Registry, changes: dict[str, Any], field: str
) -> None:
    one, two = commit(registry, 0), commit(registry, 1)
    wanted = restoring(Operation.ROLLBACK, two, one)
    assert refusal(registry, VersionContent(**(vars(wanted) | changes))) == ("invalid_field", field)


def test_a_recovery_of_a_live_head_keeps_the_heads_model(registry: Registry) -> None:
    one, live = commit(registry, 0), commit(registry, 1, live=True)
    model = live.content.model_digest
    assert refusal(registry, restoring(Operation.RECOVERY, live, one)) == ("invalid_field", "model_digest")
    recovered = registry.chain.commit(restoring(Operation.RECOVERY, live, one, model=model))
    assert (str(recovered.weight_version), recovered.content.restores) == ("2:3", 1)
    assert recovered.content.checkpoint_digest == one.content.checkpoint_digest
    assert recovered.content.is_durable


def test_a_recovery_of_a_live_head_without_its_model_takes_the_checkpoints(registry: Registry) -> None:
    one, live = commit(registry, 0), commit(registry, 1, live=True)
    lose(registry, live.content.model_digest)
    with_lost_model = restoring(Operation.RECOVERY, live, one, model=live.content.model_digest)
    assert refusal(registry, with_lost_model) == ("invalid_field", "model_digest")
    assert registry.chain.commit(restoring(Operation.RECOVERY, live, one)).content.model_digest == (
        one.content.model_digest
    )


def test_a_recovery_may_take_the_model_from_the_head_when_the_checkpoints_own_is_gone(registry: Registry) -> None:
    one, live = commit(registry, 0), commit(registry, 1, live=True)
    lose(registry, one.content.model_digest)
    wanted = restoring(Operation.RECOVERY, live, one, model=live.content.model_digest)
    assert registry.chain.commit(wanted).number == 3


def test_the_same_restoring_commit_again_is_one_version_and_another_target_is_refused(registry: Registry) -> None:
    one, two = commit(registry, 0), commit(registry, 1)
    wanted = restoring(Operation.ROLLBACK, two, one)
    assert registry.chain.commit(wanted) == registry.chain.commit(wanted)
    other = VersionContent(**(vars(wanted) | {"restores": 0}))
    assert refusal(registry, other) == ("job_committed_differently", "job_id")
