import math
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.common.errors import AtollError
from atoll.common.weight_version import WeightVersion
from atoll.registry.app import Registry
from atoll.registry.settings import RegistrySettings
from atoll.registry.types import Kind, Operation

from tests.registry.material import SCENARIO, content, seal


def test_version_0_is_the_base_model(registry: Registry) -> None:
    version = registry.chain.get(SCENARIO)
    assert (version.number, version.revision, str(version.weight_version)) == (0, 1, "1:0")
    assert version.content.operation is Operation.CREATION
    assert (version.content.parent, version.content.job_id, version.content.checkpoint_digest) == (None, None, None)


def test_a_commit_appends_and_is_found_by_number_job_and_as_head(registry: Registry) -> None:
    model, checkpoint = seal(registry, b"model"), seal(registry, b"checkpoint", Kind.CHECKPOINT)
    wanted = content(
        0,
        model.digest,
        checkpoint_digest=checkpoint.digest,
        consumed_sample_ids=("b", "a"),
        metrics={"x": 0.1, "y": 1e300},
    )
    version = registry.chain.commit(wanted)
    assert version.content == wanted
    assert (version.number, version.revision, version.weight_version) == (1, 2, WeightVersion(1, 1))
    chain = registry.chain
    assert version == chain.get(SCENARIO) == chain.get(SCENARIO, number=1) == chain.get(SCENARIO, job_id="job-1")
    assert [v.number for v in chain.list_page(SCENARIO, 10, None)] == [1, 0]


def test_the_same_commit_again_returns_the_first_answer_even_when_the_chain_went_on(registry: Registry) -> None:
    model = seal(registry, b"model")
    first = registry.chain.commit(content(0, model.digest))
    registry.chain.commit(content(1, model.digest))
    assert registry.chain.commit(content(0, model.digest)) == first
    assert registry.chain.get(SCENARIO).number == 2


def test_a_replay_is_answered_after_retention_took_its_bytes(registry: Registry) -> None:
    digests = [seal(registry, bytes([i])).digest for i in range(4)]
    first = registry.chain.commit(content(0, digests[0]))
    for parent in (1, 2, 3):
        registry.chain.commit(content(parent, digests[parent]))
    assert digests[0] in registry.sweeper.sweep()
    assert registry.chain.commit(content(0, digests[0])) == first


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"train/loss": 0.5}},
        {"metrics": {}},
        {"family": "sao"},
        {"family_state": {"steps": 2}},
        {"consumed_sample_ids": ("sample-1", "sample-2")},
        {"consumed_sample_ids": ()},
        {"parent": 1},
        {"model_digest": "f" * 64},
        {"checkpoint_digest": "f" * 64},
        {"restores": 0, "operation": Operation.ROLLBACK, "consumed_sample_ids": ()},
    ],
)
def test_other_content_under_a_committed_job_id_is_refused_with_what_differs(
    registry: Registry, changes: dict[str, Any]
) -> None:
    model = seal(registry, b"model")
    registry.chain.commit(content(0, model.digest))
    with pytest.raises(AtollError, match=f"{next(iter(changes))}; adopt") as refused:
        registry.chain.commit(replace(content(0, model.digest), **changes))
    assert refused.value.reason == errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"scenario": "Other"}, "INVALID_FIELD", "scenario"),
        ({"scenario": "other"}, "SCENARIO_NOT_FOUND", "scenario"),
        ({"job_id": ""}, "INVALID_FIELD", "job_id"),
        ({"job_id": "Job"}, "INVALID_FIELD", "job_id"),
        ({"parent": -1}, "INVALID_FIELD", "expected_parent"),
        ({"parent": 1}, "PARENT_NOT_HEAD", "expected_parent"),
        ({"operation": Operation.CREATION}, "INVALID_FIELD", "operation"),
        ({"operation": Operation.ROLLBACK}, "INVALID_FIELD", "restores"),
        ({"operation": Operation.RECOVERY}, "INVALID_FIELD", "restores"),
        ({"operation": Operation.ROLLBACK, "restores": -1}, "INVALID_FIELD", "restores"),
        ({"operation": Operation.RECOVERY, "restores": 0}, "INVALID_FIELD", "consumed_sample_ids"),
        ({"restores": 0}, "INVALID_FIELD", "restores"),
        ({"family": ""}, "INVALID_FIELD", "family"),
        ({"family": "no family"}, "INVALID_FIELD", "family"),
        ({"model_digest": ""}, "INVALID_FIELD", "model_digest"),
        ({"model_digest": "f" * 64}, "ARTIFACT_NOT_FOUND", "model_digest"),
        ({"checkpoint_digest": "f" * 63}, "INVALID_FIELD", "checkpoint_digest"),
        ({"checkpoint_digest": "f" * 64}, "ARTIFACT_NOT_FOUND", "checkpoint_digest"),
        ({"consumed_sample_ids": ("a", "b", "a")}, "INVALID_FIELD", "consumed_sample_ids[2]"),
        ({"consumed_sample_ids": ("a", "A")}, "INVALID_FIELD", "consumed_sample_ids[1]"),
        ({"metrics": {"x": math.nan}}, "INVALID_FIELD", "metrics"),
        ({"metrics": {"x": -math.inf}}, "INVALID_FIELD", "metrics"),
        ({"metrics": {"": 1.0}}, "INVALID_FIELD", "metrics"),
    ],
)
def test_a_refused_commit_names_its_field_and_changes_nothing(
    registry: Registry, changes: dict[str, Any], reason: str, field: str
) -> None:
    model = seal(registry, b"model")
    with pytest.raises(AtollError) as refused:
        registry.chain.commit(replace(content(0, model.digest), **changes))
    assert Reason.Name(refused.value.reason) == f"REASON_{reason}"
    assert refused.value.field == field
    assert registry.chain.get(SCENARIO).number == 0
    assert registry.chain.commit(content(0, model.digest)).number == 1


def test_an_artifact_of_the_other_kind_or_removed_is_refused(registry: Registry) -> None:
    model, checkpoint = seal(registry, b"model"), seal(registry, b"checkpoint", Kind.CHECKPOINT)
    with pytest.raises(AtollError, match="a checkpoint artifact, expected a model"):
        registry.chain.commit(content(0, checkpoint.digest))
    with pytest.raises(AtollError, match="a model artifact, expected a checkpoint"):
        registry.chain.commit(content(0, model.digest, checkpoint_digest=model.digest))
    old = seal(registry, b"old")
    registry.chain.commit(content(0, old.digest))
    for parent in (1, 2, 3):
        registry.chain.commit(content(parent, model.digest))
    assert old.digest in registry.sweeper.sweep()
    with pytest.raises(AtollError, match="retention removed it") as refused:
        registry.chain.commit(content(4, old.digest))
    assert refused.value.reason == errors_pb2.REASON_ARTIFACT_NOT_FOUND
    seal(registry, b"old")
    assert registry.chain.commit(content(4, old.digest)).number == 5


def test_a_sample_is_consumed_once_per_scenario(registry: Registry) -> None:
    model = seal(registry, b"model")
    many = tuple(f"s-{i}" for i in range(1200))
    registry.chain.commit(content(0, model.digest, consumed_sample_ids=many))
    with pytest.raises(AtollError, match=r"s-1199 \(version 1\); a sample is trained once") as refused:
        registry.chain.commit(content(1, model.digest, consumed_sample_ids=("fresh", "s-1199")))
    assert refused.value.reason == errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED
    assert registry.chain.get(SCENARIO, number=1).content.consumed_sample_ids == many
    other = replace(registry.scenarios.get(SCENARIO).definition, scenario_id="other")
    registry.scenarios.create(other)
    assert registry.chain.commit(content(0, model.digest, scenario="other", consumed_sample_ids=many)).number == 1


@pytest.mark.parametrize(("number", "job_id"), [(1, None), (-1, None), (None, "job-1"), (None, "")])
def test_an_unknown_version_is_refused(registry: Registry, number: int | None, job_id: str | None) -> None:
    with pytest.raises(AtollError, match="the head is version 0") as refused:
        registry.chain.get(SCENARIO, number=number, job_id=job_id)
    assert refused.value.reason == errors_pb2.REASON_VERSION_NOT_FOUND


def test_the_database_itself_forbids_what_the_code_checks(registry: Registry) -> None:
    model = seal(registry, b"model")
    registry.chain.commit(content(0, model.digest))
    columns = "scenario_id, parent, operation, incarnation, family, model_digest, metrics, family_state, created_at"
    copy = (
        f"INSERT INTO versions ({columns}, number, job_id, revision) "
        f"SELECT {columns}, :number, :job_id, :revision FROM versions WHERE number = 0"
    )
    for number, job_id, revision in ((1, "new", 9), (9, "job-1", 9), (9, "new", 2)):
        values = {"number": number, "job_id": job_id, "revision": revision}
        with pytest.raises(sa.exc.IntegrityError, match=r"(?i)unique"), registry.database.write() as connection:
            connection.execute(sa.text(copy), values)
    consume = "INSERT INTO consumed_samples VALUES (:scenario, :sample, :number, 0)"
    for sample, number in (("sample-1", 0), ("new", 9)):
        values = {"scenario": SCENARIO, "sample": sample, "number": number}
        with pytest.raises(sa.exc.IntegrityError), registry.database.write() as connection:
            connection.execute(sa.text(consume), values)


def test_a_reopened_registry_has_the_same_chain(registry: Registry, settings: RegistrySettings) -> None:
    version = registry.chain.commit(content(0, seal(registry, b"model").digest))
    reopened = Registry(settings)
    assert reopened.chain.get(SCENARIO) == version
    reopened.close()
