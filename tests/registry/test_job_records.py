from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError
from atoll.registry.app import Registry
from atoll.registry.job_types import (
    JobBody,
    JobPhase,
    JobProgress,
    JobRecord,
    RollbackBody,
    StagedVersion,
    TrainingBody,
)
from atoll.registry.types import Kind, Operation

from tests.registry.material import SCENARIO, content, seal
from tests.registry.test_restoring import commit, lose, restoring

BODY = TrainingBody("grpo", {"group_size": 4, "clip": {"low": 0.2}}, ("sample-1",))
RECORDED = JobProgress(JobPhase.RECORDED)
DROPPED = JobProgress(
    JobPhase.DROPPED, reason=errors_pb2.REASON_STALE_SAMPLE, message="1:0 is stale", rejected_sample_ids=("sample-1",)
)


def running(attempt: int) -> JobProgress:
    return JobProgress(JobPhase.RUNNING, attempt)


def staged(registry: Registry, parent: int = 0, attempt: int = 1) -> JobProgress:
    model, checkpoint = seal(registry, b"model").digest, seal(registry, b"checkpoint", Kind.CHECKPOINT).digest
    return JobProgress(
        JobPhase.STAGED, attempt, StagedVersion(parent, model, checkpoint, {"train/loss": 0.25}, {"steps": 1})
    )


def put(
    registry: Registry, progress: JobProgress, body: JobBody = BODY, job_id: str = "job-1", token: int = 0
) -> JobRecord:
    return registry.job_records.put(SCENARIO, job_id, body, progress, token)


def refusal(registry: Registry, progress: JobProgress, body: JobBody = BODY, **more: Any) -> tuple[str, str]:
    with pytest.raises(AtollError) as refused:
        put(registry, progress, body, **more)
    return refused.value.code, refused.value.field


def test_a_record_comes_back_as_it_was_written(registry: Registry) -> None:
    first = put(registry, RECORDED)
    assert (first.body, first.progress, first.position, first.version) == (BODY, RECORDED, 1, None)
    assert registry.job_records.get(SCENARIO, "job-1") == first
    progress = staged(registry)
    second = put(registry, progress)
    assert (second.progress, second.created_at, second.position) == (progress, first.created_at, 1)
    assert second.updated_at > first.updated_at
    assert registry.job_records.get(SCENARIO, "job-1") == second
    assert put(registry, progress) == second, "the same write again changes nothing"


def test_another_body_under_the_same_id_is_refused_with_what_differs(registry: Registry) -> None:
    put(registry, RECORDED)
    bodies: list[JobBody] = [
        replace(BODY, options={"group_size": 5}),
        replace(BODY, sample_ids=("sample-2",)),
        replace(BODY, family="sao"),
        RollbackBody(0),
    ]
    for body, word in zip(bodies, ("options", "sample_ids", "family", "body"), strict=True):
        with pytest.raises(AtollError, match=f"recorded with another {word};") as refused:
            put(registry, running(1), body)
        assert refused.value.code == "job_id_reused"
    assert registry.job_records.get(SCENARIO, "job-1").progress == RECORDED


def test_a_final_record_is_returned_as_it_stands(registry: Registry) -> None:
    put(registry, RECORDED)
    dropped = put(registry, DROPPED)
    assert put(registry, running(1)) == dropped
    assert put(registry, RECORDED) == dropped
    with pytest.raises(AtollError, match="has ended as dropped") as refused:
        registry.chain.commit(content(0, seal(registry, b"model").digest))
    assert refused.value.code == "job_id_reused"


def test_attempts_fall_only_when_the_running_one_is_taken_back(registry: Registry) -> None:
    put(registry, running(2))
    assert refusal(registry, running(1)) == ("invalid_field", "record.attempt")
    assert refusal(registry, replace(RECORDED, attempt=0)) == ("invalid_field", "record.attempt")
    assert put(registry, replace(RECORDED, attempt=1)).progress.attempt == 1
    assert refusal(registry, replace(RECORDED, attempt=0)) == ("invalid_field", "record.attempt")
    assert put(registry, replace(RECORDED, attempt=1)).progress.attempt == 1
    assert put(registry, running(2)).progress == running(2)


@pytest.mark.parametrize(
    ("progress", "field"),
    [
        (JobProgress(JobPhase.COMMITTED), "record.phase"),
        (JobProgress(JobPhase.RUNNING, 0), "record.attempt"),
        (JobProgress(JobPhase.RECORDED, -1), "record.attempt"),
        (JobProgress(JobPhase.FAILED), "record.reason"),
        (JobProgress(JobPhase.STAGED, 1), "record.staged"),
        (replace(RECORDED, staged=StagedVersion(0, "f" * 64, None, {}, {})), "record.staged"),
        (replace(RECORDED, message="a\0b"), "record.message"),
        (replace(RECORDED, message="x" * 10_001), "record.message"),
        (replace(DROPPED, rejected_sample_ids=("A",)), "record.rejected_sample_ids[0]"),
        (JobProgress(JobPhase.STAGED, 1, StagedVersion(0, "f", None, {}, {})), "record.staged.model_digest"),
        (
            JobProgress(JobPhase.STAGED, 1, StagedVersion(0, "f" * 64, None, {"x": float("nan")}, {})),
            "record.staged.metrics",
        ),
    ],
)
def test_a_malformed_record_names_its_field_and_is_not_kept(
    registry: Registry, progress: JobProgress, field: str
) -> None:
    assert refusal(registry, progress) == ("invalid_field", field)
    with pytest.raises(AtollError, match="no record of a job 'job-1'"):
        registry.job_records.get(SCENARIO, "job-1")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (replace(BODY, family="no family"), "family"),
        (replace(BODY, sample_ids=("a", "a")), "record.body.training.sample_ids[1]"),
        (RollbackBody(-1), "record.body.rollback.version"),
    ],
)
def test_a_malformed_body_names_its_field(registry: Registry, body: JobBody, field: str) -> None:
    assert refusal(registry, RECORDED, body) == ("invalid_field", field)


def test_what_is_staged_must_be_sealed_and_trained_from_the_chain(registry: Registry) -> None:
    good = staged(registry)
    assert good.staged is not None
    lost = replace(good, staged=replace(good.staged, model_digest="f" * 64))
    assert refusal(registry, lost) == ("artifact_not_found", "record.staged.model_digest")
    swapped = replace(good, staged=replace(good.staged, checkpoint_digest=good.staged.model_digest))
    assert refusal(registry, swapped) == ("invalid_field", "record.staged.checkpoint_digest")
    assert refusal(registry, staged(registry, parent=1)) == ("invalid_field", "record.staged.parent")


def test_a_commit_ends_the_record_in_its_own_transaction(registry: Registry) -> None:
    progress = staged(registry)
    put(registry, progress)
    assert progress.staged is not None
    digests = (progress.staged.model_digest, progress.staged.checkpoint_digest)
    version = registry.chain.commit(content(0, digests[0], checkpoint_digest=digests[1]))
    record = registry.job_records.get(SCENARIO, "job-1")
    assert (record.progress, record.version, record.updated_at) == (
        JobProgress(JobPhase.COMMITTED, 1),
        1,
        version.created_at,
    )
    assert put(registry, running(2)) == record


def test_a_commit_without_a_record_makes_one_that_a_late_write_of_the_same_job_gets(registry: Registry) -> None:
    commit(registry, 0)
    record = registry.job_records.get(SCENARIO, "job-1")
    assert (record.body, record.progress.phase, record.version) == (
        TrainingBody("grpo", None, ("sample-1",)),
        JobPhase.COMMITTED,
        1,
    )
    assert put(registry, RECORDED) == record
    assert refusal(registry, RECORDED, replace(BODY, sample_ids=("other",))) == ("job_id_reused", "record.body")


@pytest.mark.parametrize("changes", [{"family": "sao"}, {"consumed_sample_ids": ()}])
def test_a_commit_of_something_else_than_was_recorded_is_refused(registry: Registry, changes: dict[str, Any]) -> None:
    put(registry, running(1))
    with pytest.raises(AtollError, match="was recorded with another family or other samples") as refused:
        registry.chain.commit(content(0, seal(registry, b"model").digest, **changes))
    assert refused.value.code == "job_id_reused"
    assert registry.job_records.get(SCENARIO, "job-1").progress == running(1)


def test_a_rollback_is_recorded_for_a_durable_version_with_its_bytes(registry: Registry) -> None:
    one, live, three = commit(registry, 0), commit(registry, 1, live=True), commit(registry, 2)
    field = "record.body.rollback.version"
    assert refusal(registry, RECORDED, RollbackBody(9), job_id="back") == ("version_not_found", field)
    assert refusal(registry, RECORDED, RollbackBody(live.number), job_id="back") == ("not_restorable", field)
    put(registry, RECORDED, RollbackBody(1), job_id="back")
    wrong = restoring(Operation.ROLLBACK, three, registry.chain.get(SCENARIO, number=0), job_id="back")
    with pytest.raises(AtollError, match="was recorded as a rollback to version 1"):
        registry.chain.commit(wrong)
    registry.chain.commit(restoring(Operation.ROLLBACK, three, one, job_id="back"))
    assert registry.job_records.get(SCENARIO, "back").version == 4
    lose(registry, one.content.checkpoint_digest)
    assert refusal(registry, RECORDED, RollbackBody(1), job_id="again") == ("not_restorable", field)
    refused = JobProgress(JobPhase.REFUSED, reason=errors_pb2.REASON_NOT_RESTORABLE, message="its bytes are gone")
    assert put(registry, refused, RollbackBody(1), job_id="again").progress == refused


def test_a_restoring_commit_without_a_record_gets_one(registry: Registry) -> None:
    one, live = commit(registry, 0), commit(registry, 1, live=True)
    registry.chain.commit(restoring(Operation.RECOVERY, live, one, model=live.content.model_digest))
    record = registry.job_records.get(SCENARIO, "recovery-3")
    assert (record.body, record.progress.phase, record.version) == (RollbackBody(1), JobPhase.COMMITTED, 3)


def test_jobs_keep_the_order_in_which_they_came(registry: Registry) -> None:
    for index in range(5):
        put(registry, RECORDED, replace(BODY, sample_ids=(f"s-{index}",)), job_id=f"job-{9 - index}")
    put(registry, DROPPED, replace(BODY, sample_ids=("s-1",)), job_id="job-8")
    put(registry, running(1), replace(BODY, sample_ids=("s-2",)), job_id="job-7")
    listed = registry.job_records.list_page(SCENARIO, open_only=True, limit=100, after=None)
    assert [record.job_id for record in listed] == ["job-9", "job-7", "job-6", "job-5"]
    assert [record.position for record in listed] == [1, 3, 4, 5]
    rest = registry.job_records.list_page(SCENARIO, open_only=True, limit=2, after=1)
    assert [record.job_id for record in rest] == ["job-7", "job-6"]
    newest = registry.job_records.list_page(SCENARIO, open_only=False, limit=2, after=5)
    assert [record.job_id for record in newest] == ["job-6", "job-7"]


def test_a_write_under_an_older_token_changes_nothing(registry: Registry) -> None:
    put(registry, running(1))
    registry.leases.acquire(SCENARIO, "trainer", "one", "one:1", timedelta(seconds=15))
    assert refusal(registry, running(2)) == ("fenced", "fencing_token")
    taken_over = put(registry, running(2), token=1)
    assert (taken_over.progress.attempt, taken_over.fencing_token) == (2, 1)
    assert refusal(registry, staged(registry), token=0) == ("fenced", "fencing_token")
    assert registry.job_records.get(SCENARIO, "job-1") == taken_over
    registry.leases.release(SCENARIO, "trainer", "one")
    registry.leases.acquire(SCENARIO, "trainer", "one", "one:1", timedelta(seconds=15))
    assert put(registry, running(2), token=2).fencing_token == 2, "the same state under the new token is noted"
