"""Leases and job records through the real gRPC server."""

from datetime import timedelta

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import (
    job_record_pb2,
    job_record_service_pb2,
    lease_service_pb2,
    version_pb2,
    version_service_pb2,
)
from atoll.registry.app import Registry
from atoll.registry.types import Kind
from google.protobuf import duration_pb2

from tests.registry.conftest import Client
from tests.registry.material import SCENARIO, seal
from tests.registry.wire import commit_request, refusal

TTL = duration_pb2.Duration(seconds=15)


def acquire(holder: str) -> lease_service_pb2.AcquireLeaseRequest:
    return lease_service_pb2.AcquireLeaseRequest(
        scenario=SCENARIO, role="trainer", holder=holder, address=f"{holder}:7420", ttl=TTL
    )


def record(job_id: str = "job-1") -> job_record_pb2.JobRecord:
    """A training job that was just accepted."""
    message = job_record_pb2.JobRecord(scenario=SCENARIO, job_id=job_id, phase=job_record_pb2.JOB_PHASE_RECORDED)
    message.body.training.family = "grpo"
    message.body.training.options.update({"group_size": 4, "clip": {"low": 0.2}})
    message.body.training.sample_ids.append("s-0")
    return message


def put(message: job_record_pb2.JobRecord, token: int = 0) -> job_record_service_pb2.PutJobRecordRequest:
    return job_record_service_pb2.PutJobRecordRequest(record=message, fencing_token=token)


async def test_a_lease_changes_hands_over_the_wire(client: Client) -> None:
    get = lease_service_pb2.GetLeaseRequest(scenario=SCENARIO, role="trainer")
    assert not (await client.leases.GetLease(get)).HasField("lease")
    mine = (await client.leases.AcquireLease(acquire("one"))).lease
    assert (mine.holder, mine.address, mine.fencing_token) == ("one", "one:7420", 1)
    assert mine.remaining.ToTimedelta() == timedelta(seconds=15)
    assert (await client.leases.AcquireLease(acquire("two"))).lease.holder == "one"
    renew = lease_service_pb2.RenewLeaseRequest(
        scenario=SCENARIO, role="trainer", holder="one", fencing_token=1, ttl=duration_pb2.Duration(seconds=60)
    )
    assert (await client.leases.RenewLease(renew)).lease.remaining.seconds == 60
    release = lease_service_pb2.ReleaseLeaseRequest(scenario=SCENARIO, role="trainer", holder="one")
    await client.leases.ReleaseLease(release)
    assert (await client.leases.GetLease(get)).lease.remaining.ToTimedelta() <= timedelta(0)
    assert (await refusal(client.leases.RenewLease(renew))).code == "lease_lost"
    theirs = (await client.leases.AcquireLease(acquire("two"))).lease
    assert (theirs.holder, theirs.fencing_token) == ("two", 2)


@pytest.mark.parametrize("ttl", [duration_pb2.Duration(), duration_pb2.Duration(seconds=10**12, nanos=-5)])
async def test_a_ttl_that_is_none_is_refused(client: Client, ttl: duration_pb2.Duration) -> None:
    request = acquire("one")
    request.ttl.CopyFrom(ttl)
    error = await refusal(client.leases.AcquireLease(request))
    assert (error.code, error.field) == ("invalid_field", "ttl")


async def test_a_job_from_its_record_to_its_version(client: Client, registry: Registry) -> None:
    token = (await client.leases.AcquireLease(acquire("one"))).lease.fencing_token
    first = (await client.jobs.PutJobRecord(put(record(), token))).record
    assert (first.order, first.fencing_token, first.HasField("staged"), first.HasField("version")) == (
        1,
        1,
        False,
        False,
    )
    assert first.body == record().body
    model = seal(registry, b"model").digest
    checkpoint = seal(registry, b"checkpoint", Kind.CHECKPOINT).digest
    first.phase, first.attempt = job_record_pb2.JOB_PHASE_STAGED, 1
    first.staged.model_digest, first.staged.checkpoint_digest = model, checkpoint
    first.staged.metrics["train/loss"] = 0.5
    first.staged.family_state.update({"steps": 1})
    staged = (await client.jobs.PutJobRecord(put(first, token))).record
    assert staged.staged == first.staged
    assert (await refusal(client.versions.CommitVersion(commit_request(0, model, checkpoint)))).code == "fenced"
    request = commit_request(0, model, checkpoint)
    request.fencing_token = token
    version = (await client.versions.CommitVersion(request)).version
    assert (version.fencing_token, version.durable, version.HasField("restores")) == (1, True, False)
    get = job_record_service_pb2.GetJobRecordRequest(scenario=SCENARIO, job_id="job-1")
    ended = (await client.jobs.GetJobRecord(get)).record
    assert (ended.phase, ended.version, ended.HasField("staged")) == (job_record_pb2.JOB_PHASE_COMMITTED, 1, False)


async def test_a_rollback_over_the_wire(client: Client, registry: Registry) -> None:
    model = seal(registry, b"model").digest
    await client.versions.CommitVersion(commit_request(0, model))
    zero = (
        await client.versions.GetVersion(version_service_pb2.GetVersionRequest(scenario=SCENARIO, number=0))
    ).version
    message = job_record_pb2.JobRecord(scenario=SCENARIO, job_id="back", phase=job_record_pb2.JOB_PHASE_RECORDED)
    message.body.rollback.version = 0
    assert (await client.jobs.PutJobRecord(put(message))).record.body == message.body
    back = version_service_pb2.CommitVersionRequest(
        scenario=SCENARIO,
        job_id="back",
        expected_parent=1,
        operation=version_pb2.OPERATION_ROLLBACK,
        family="grpo",
        model_digest=zero.model_digest,
        restores=0,
    )
    version = (await client.versions.CommitVersion(back)).version
    assert (version.number, version.weight_version, version.restores, version.durable) == (2, "2:2", 0, True)
    without = version_service_pb2.CommitVersionRequest()
    without.CopyFrom(back)
    without.ClearField("restores")
    assert (await refusal(client.versions.CommitVersion(without))).field == "restores"


async def test_lists_of_records_page_in_both_orders(client: Client) -> None:
    for index in range(3):
        await client.jobs.PutJobRecord(put(record(f"job-{index}")))
    for open_only, expected in ((True, ["job-0", "job-1", "job-2"]), (False, ["job-2", "job-1", "job-0"])):
        seen: list[str] = []
        token = ""
        while True:
            request = job_record_service_pb2.ListJobRecordsRequest(
                scenario=SCENARIO, open_only=open_only, page_size=2, page_token=token
            )
            page = await client.jobs.ListJobRecords(request)
            seen += [message.job_id for message in page.records]
            token = page.next_page_token
            if not token:
                break
        assert seen == expected


async def test_what_a_record_may_not_say_is_refused_by_name(client: Client) -> None:
    no_body, unknown_phase, no_phase, unknown_reason, nan = record(), record(), record(), record(), record()
    no_body.ClearField("body")
    unknown_phase.phase = 99  # type: ignore[assignment]
    no_phase.ClearField("phase")
    unknown_reason.reason = 9999  # type: ignore[assignment]
    nan.body.training.options["x"] = float("nan")
    cases = {
        "record.body": no_body,
        "record.phase": unknown_phase,
        "record.reason": unknown_reason,
        "record.body.training.options.x": nan,
    }
    for field, message in cases.items():
        error = await refusal(client.jobs.PutJobRecord(put(message)))
        assert (error.code, error.field) == ("invalid_field", field)
    assert (await refusal(client.jobs.PutJobRecord(put(no_phase)))).field == "record.phase"
    empty = job_record_service_pb2.PutJobRecordRequest()
    assert (await refusal(client.jobs.PutJobRecord(empty))).field == "record"
    unknown = job_record_service_pb2.GetJobRecordRequest(scenario=SCENARIO, job_id="none")
    assert (await refusal(client.jobs.GetJobRecord(unknown))).reason == errors_pb2.REASON_JOB_NOT_FOUND
    nowhere = job_record_service_pb2.ListJobRecordsRequest(scenario="other")
    assert (await refusal(client.jobs.ListJobRecords(nowhere))).code == "scenario_not_found"
