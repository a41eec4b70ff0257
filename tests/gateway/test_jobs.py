"""Jobs and rollbacks over HTTP, relayed to a trainer."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2
from atoll.common.errors import Conflict

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.trainer import FakeTrainer, serve_trainer
from tests.gateway.http_gateway import SCENARIO, HttpGateway, http_gateway

JOBS = f"/atoll/scenarios/{SCENARIO}/jobs"
ROLLBACK = f"/atoll/scenarios/{SCENARIO}/rollback"


@pytest.fixture
async def trainer() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
async def trained(
    registry_address: str, engine: FakeEngine, trainer: FakeTrainer, tmp_path: Path
) -> AsyncIterator[HttpGateway]:
    """A gateway with a trainer."""
    server = await serve_trainer(trainer)
    address = f"127.0.0.1:{server.port}"
    async with http_gateway(registry_address, tmp_path, (engine.url,), trainer=address) as running:
        yield running
    await server.grpc.stop(None)


async def test_a_rollback_is_a_job_and_the_same_request_is_the_same_one(
    trained: HttpGateway, trainer: FakeTrainer
) -> None:
    answer = await trained.post(ROLLBACK, {"version": 0, "request_id": "r1"})
    assert answer.status == 200
    assert (answer.body["kind"], answer.body["state"], answer.body["restores"]) == ("rollback", "submitted", 0)
    again = await trained.post(ROLLBACK, {"version": 0, "request_id": "r1"})
    assert again.body["job_id"] == answer.body["job_id"] and len(trainer.jobs) == 1
    other = await trained.post(ROLLBACK, {"version": 1, "request_id": "r1"})
    assert other.status == 409 and other.error["code"] == "request_id_reused"
    await trained.post(ROLLBACK, {"version": 0})
    await trained.post(ROLLBACK, {"version": 0})
    assert len(trainer.jobs) == 3, "without an id every request is one of its own"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({}, "invalid_field", "version"),
        ({"version": -1}, "invalid_field", "version"),
        ({"version": "1"}, "invalid_field", "version"),
        ({"version": True}, "invalid_field", "version"),
        ({"version": 1, "why": "x"}, "unknown_field", "why"),
        (b"{", "invalid_json", None),
    ],
)
async def test_a_malformed_rollback_is_refused_by_its_field(
    trained: HttpGateway, body: object, code: str, field: str | None
) -> None:
    refused = await trained.post(ROLLBACK, body)
    assert refused.status == 400 and (refused.error["code"], refused.error["param"]) == (code, field)


async def test_what_the_trainer_refuses_is_told_in_its_words(trained: HttpGateway, trainer: FakeTrainer) -> None:
    why = "version 3 keeps no checkpoint"
    trainer.refusals.append(Conflict(why, reason=errors_pb2.REASON_NOT_RESTORABLE, field="version"))
    refused = await trained.post(ROLLBACK, {"version": 3})
    assert refused.status == 409 and (refused.error["code"], refused.error["message"]) == ("not_restorable", why)


async def test_a_job_is_cancelled_until_it_is_staged(trained: HttpGateway, trainer: FakeTrainer) -> None:
    for name in ("job-a", "job-b"):
        trainer.jobs[name] = job_pb2.Job(job_id=name, scenario=SCENARIO, state=job_pb2.JOB_STATE_RUNNING)
    trainer.move("job-b", job_pb2.JOB_STATE_STAGED)
    cancelled = await trained.post(f"{JOBS}/job-a/cancel", {})
    assert (cancelled.status, cancelled.body["job_id"], cancelled.body["state"]) == (200, "job-a", "cancelled")
    assert (await trained.post(f"{JOBS}/job-a/cancel", b"")).status == 200, "the same again, without a body"
    late = await trained.post(f"{JOBS}/job-b/cancel", {})
    assert (late.status, late.error["code"]) == (409, "job_not_cancellable")
    unknown = await trained.post(f"{JOBS}/job-a/cancel", {"force": True})
    assert (unknown.error["code"], unknown.error["param"]) == ("unknown_field", "force")
    assert (await trained.post(f"{JOBS}/job-none/cancel", {})).error["code"] == "job_not_found"
    elsewhere = await trained.post("/atoll/scenarios/other/jobs/job-b/cancel", {})
    assert elsewhere.error["code"] == "not_trained_here", "the trainer of another scenario cancels nothing"
    trainer.holder = False
    assert (await trained.post(f"{JOBS}/job-b/cancel", {})).status == 503


async def test_jobs_are_listed_newest_first_with_phase_metrics_and_reason(
    trained: HttpGateway, trainer: FakeTrainer
) -> None:
    for number in range(3):
        await trained.post(ROLLBACK, {"version": number})
    newest = list(trainer.jobs)[-1]
    trainer.jobs[newest].metrics["perf/pull_seconds"] = 0.5
    trainer.move(newest, job_pb2.JOB_STATE_DROPPED, "too old")
    page = (await trained.get(f"{JOBS}?page_size=2")).body
    assert [job["restores"] for job in page["jobs"]] == [2, 1]
    rest = (await trained.get(f"{JOBS}?page_size=2&page_token={page['next_page_token']}")).body
    assert [job["restores"] for job in rest["jobs"]] == [0] and rest["next_page_token"] == ""
    job = (await trained.get(f"{JOBS}/{newest}")).body
    assert (job["state"], job["reason"], job["message"]) == ("dropped", "stale_sample", "too old")
    assert job["metrics"] == {"perf/pull_seconds": 0.5} and job["version"] is None


async def test_a_job_that_is_not_there_or_of_another_scenario_is_not_found(
    trained: HttpGateway, trainer: FakeTrainer
) -> None:
    missing = await trained.get(f"{JOBS}/job-none")
    assert missing.status == 404 and missing.error["code"] == "job_not_found"
    trainer.jobs["job-other"] = job_pb2.Job(job_id="job-other", scenario="other")
    assert (await trained.get(f"{JOBS}/job-other")).error["code"] == "job_not_found"
    elsewhere = await trained.get("/atoll/scenarios/other/jobs")
    assert elsewhere.status == 409 and elsewhere.error["code"] == "not_trained_here"


async def test_without_a_trainer_jobs_say_what_to_set(web: HttpGateway) -> None:
    for answer in (await web.get(JOBS), await web.post(ROLLBACK, {"version": 0})):
        assert answer.status == 503 and "ATOLL_GATEWAY_TRAINER" in answer.error["message"]


async def test_samples_are_listed_by_state_with_what_became_of_them(web: HttpGateway) -> None:
    receipts = [(await web.chat()).headers["x-atoll-receipt"] for _ in range(2)]
    path = f"/atoll/scenarios/{SCENARIO}/samples"
    page = (await web.get(f"{path}?state=pending&page_size=1")).body
    [sample] = page["samples"]
    assert sample["receipt"] == receipts[1] and sample["weight_versions"] == ["1:0"] and page["next_page_token"]
    assert (await web.get(f"{path}?state=consumed")).body["samples"] == []
    refused = await web.get(f"{path}?state=lost")
    assert refused.status == 400 and "pending, reserved, consumed, settled" in refused.error["message"]
    assert (await web.get("/atoll/scenarios/nobody/samples")).status == 404
