"""Commands before a gateway that answers as a test says: what is sent, what is shown, how a command ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from atoll.cli.main import app
from atoll.cli.samples import metadata_of
from atoll.common.errors import InvalidInput
from typer.testing import CliRunner, Result

from tests.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

JOB_ID = "job-" + "1" * 32
JOB = f"/atoll/scenarios/math/jobs/{JOB_ID}"


def job(state: str, **changes: Any) -> dict[str, Any]:
    return {
        "job_id": JOB_ID,
        "scenario": "math",
        "kind": "training",
        "family": "grpo",
        "state": state,
        "reason": None,
        "message": None,
        "attempt": 1,
        "version": None,
        "restores": None,
        "samples": ["s1", "s2"],
        "rejected_samples": [],
        "metrics": {},
        "created_at": "2026-01-02T03:04:05+00:00",
        "updated_at": "2026-01-02T03:04:06+00:00",
        "revision": 1,
        **changes,
    }


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedGateway]:
    monkeypatch.setattr("atoll.cli.jobs.POLL_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "300")
    async with scripted_gateway() as running:
        running.answers["GET /v1/models"] = [(200, {"data": [{"id": "math"}]})]
        monkeypatch.setenv("ATOLL_GATEWAY", running.url)
        yield running


async def run(*words: str) -> Result:
    """A command in a thread of its own, beside the gateway."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, list(words)))


async def test_jobs_are_shown_with_their_reasons_and_pages_are_followed(gateway: ScriptedGateway) -> None:
    dropped = job("dropped", reason="stale_sample", message="produced by 1:0")
    rollback = job("served", kind="rollback", restores=3, version=9, samples=[])
    gateway.answers["GET /atoll/scenarios/math/jobs"] = [
        (200, {"jobs": [dropped], "next_page_token": "more"}),
        (200, {"jobs": [rollback], "next_page_token": ""}),
    ]
    result = await run("jobs")
    assert result.exit_code == 0 and "stale_sample: produced by 1:0" in result.output
    assert "rollback to 3" in result.output
    assert [query.get("page_token") for _, query, _ in gateway.asked[1:]] == ["", "more"]


async def test_a_watched_job_goes_through_its_phases_and_ends_well(gateway: ScriptedGateway) -> None:
    gateway.answers[f"GET {JOB}"] = [
        (200, job("submitted")),
        (200, job("running")),
        (503, {"error": {"message": "starting"}}),
        (200, job("deferred", message="the store is full")),
        (200, job("served", version=4, metrics={"train/loss": 0.25})),
    ]
    result = await run("job", JOB_ID, "--watch")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["submitted", "running", "deferred", "served"]
    assert "the store is full" in lines[2] and "train/loss" in result.stdout and "0.25" in result.stdout


@pytest.mark.parametrize("state", ["dropped", "refused", "failed", "cancelled"])
async def test_a_watched_job_that_makes_no_version_ends_the_command_with_its_reason(
    gateway: ScriptedGateway, state: str
) -> None:
    gateway.answers[f"GET {JOB}"] = [(200, job(state, reason="training_crashed", message="three times"))]
    result = await run("job", JOB_ID, "--watch", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["state"] == state
    assert f"was {state}: training_crashed: three times" in result.stderr
    assert (await run("job", JOB_ID)).exit_code == 0, "only looked at"


async def test_a_rollback_is_sent_once_and_watched_to_its_end(gateway: ScriptedGateway) -> None:
    submitted = job("submitted", kind="rollback", restores=2)
    gateway.answers["POST /atoll/scenarios/math/rollback"] = [(200, submitted)]
    gateway.answers[f"GET {JOB}"] = [(200, job("served", kind="rollback", restores=2, version=5))]
    result = await run("rollback", "math", "2", "--request-id", "r1", "--watch")
    assert result.exit_code == 0, result.output
    sent = [body for key, _, body in gateway.asked if key.startswith("POST")]
    assert sent == [{"version": 2, "request_id": "r1"}]


async def test_a_job_is_cancelled_at_its_own_path(gateway: ScriptedGateway) -> None:
    gateway.answers[f"POST {JOB}/cancel"] = [(200, job("cancelled")), (409, {"error": {"message": "it is STAGED"}})]
    result = await run("cancel", JOB_ID, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["state"] == "cancelled"
    late = await run("cancel", JOB_ID)
    assert late.exit_code == 1 and "409: it is STAGED" in late.stderr


async def test_what_the_gateway_refuses_is_one_line_and_status_1(gateway: ScriptedGateway) -> None:
    error = {"message": "version 3 keeps no checkpoint", "code": "not_restorable"}
    gateway.answers["POST /atoll/scenarios/math/rollback"] = [(409, {"error": error})]
    result = await run("rollback", "math", "3")
    assert result.exit_code == 1 and "409: version 3 keeps no checkpoint" in result.stderr
    assert len(result.stderr.splitlines()) == 1


async def test_a_report_carries_what_was_given_and_says_what_became_of_it(gateway: ScriptedGateway) -> None:
    answer = {"report_id": "r", "scenario": "math", "receipts": ["a"], "job_id": None, "settled": None}
    settled = {"code": "stale_sample", "message": "produced by 1:0"}
    gateway.answers["POST /atoll/report"] = [
        (200, answer),
        (200, {**answer, "job_id": JOB_ID}),
        (200, {**answer, "settled": settled}),
    ]
    words = ["report", "a", "b", "--score", "0.5", "--feedback", '{"why": 1}', "--metadata", "group=q1", "--metadata"]
    assert "waits for the rest" in (await run(*words, "step=3")).output
    assert gateway.asked[0][2] == {
        "receipts": ["a", "b"],
        "score": 0.5,
        "feedback": {"why": 1},
        "metadata": {"group": "q1", "step": 3},
        "request_id": "",
    }
    assert JOB_ID in (await run("report", "a", "--feedback", "well done")).output
    assert gateway.asked[1][2]["feedback"] == "well done" and "score" not in gateway.asked[1][2]
    assert "never trained: stale_sample: produced by 1:0" in (await run("report", "a")).output


async def test_samples_are_asked_for_by_state(gateway: ScriptedGateway) -> None:
    sample = {
        "receipt": "4f0c",
        "state": "settled",
        "weight_versions": ["1:0", "1:1"],
        "prompt_length": 3,
        "response_length": 4,
        "created_at": "2026-01-02T03:04:05+00:00",
        "text": "a " * 100,
        "settled_reason": "stale_sample: too old",
        "job_id": None,
    }
    path = "GET /atoll/scenarios/math/samples"
    gateway.answers[path] = [(200, {"samples": [sample], "next_page_token": ""})]
    result = await run("samples", "--state", "settled", "--limit", "5")
    assert "stale_sample: too old" in result.output and "1:0, 1:1" in result.output and "3 + 4" in result.output
    assert gateway.asked[-1][1] == {"state": "settled", "page_size": "5", "page_token": ""}


async def test_a_scenario_must_be_named_where_there_are_several(gateway: ScriptedGateway) -> None:
    gateway.answers["GET /v1/models"] = [(200, {"data": [{"id": "chat"}, {"id": "math"}]})]
    result = await run("jobs")
    assert result.exit_code == 1 and "--scenario; the gateway has: chat, math" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("jobs", "--nosuch"),
        ("job",),
        ("rollback", "math"),
        ("rollback", "math", "-1"),
        ("rollback", "math", "two"),
        ("report",),
        ("report", "a", "--score", "high"),
        ("samples", "--limit", "0"),
    ],
)
async def test_a_command_that_cannot_be_meant_is_refused_before_anything_is_sent(
    gateway: ScriptedGateway, words: tuple[str, ...]
) -> None:
    assert (await run(*words)).exit_code == 2 and gateway.asked == []


@pytest.mark.parametrize("pairs", [["group"], ["=x"], ["group=a", "group=b"]])
def test_metadata_that_is_no_pair_is_refused(pairs: list[str]) -> None:
    with pytest.raises(InvalidInput, match="metadata"):
        metadata_of(pairs)


def test_a_value_of_metadata_is_json_where_it_can_be() -> None:
    assert metadata_of(["a=1", "b=x=y", "c=[1, 2]", "d="]) == {"a": 1, "b": "x=y", "c": [1, 2], "d": ""}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("job", ""), "job_id is ''"),
        (("job", "../../x"), "job_id is '../../x'"),
        (("cancel", "../x"), "job_id is '../x'"),
        (("job", "a?b", "--watch"), "job_id is 'a?b'"),
        (("rollback", "", "0"), "scenario is ''"),
        (("jobs", "--scenario", "a/b"), "scenario is 'a/b'"),
        (("jobs", "--gateway", "127.0.0.1:8100"), "gateway is '127.0.0.1:8100', expected its URL"),
        (("jobs", "--gateway", ""), "gateway is '', expected its URL"),
        (("versions", "--registry", "http://127.0.0.1:7410"), "expected host:port"),
    ],
)
async def test_an_id_or_address_that_is_none_is_one_line_and_no_list_or_trace(
    gateway: ScriptedGateway, words: tuple[str, ...], told: str
) -> None:
    gateway.answers["GET /atoll/scenarios/math/jobs/"] = [(200, {"jobs": []})]
    ended = await run(*words)
    assert (ended.exit_code, told in ended.stderr, ended.stderr.count("\n")) == (1, True, 1)
    assert {path for path, _, _ in gateway.asked} <= {"GET /v1/models"}
