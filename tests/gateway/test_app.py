"""The other routes: models, versions, reports, status, health, the API's description."""

import re
from typing import Any

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.conftest import SCENARIOS
from tests.gateway.http_gateway import SCENARIO, HttpGateway

REPORT = "/atoll/report"


async def test_models_lists_the_scenarios_in_openais_shape(web: HttpGateway) -> None:
    answer = await web.get("/v1/models")
    assert answer.body["object"] == "list"
    assert [model["id"] for model in answer.body["data"]] == sorted(SCENARIOS)
    assert answer.body["data"][1] == {"id": SCENARIO, "object": "model", "created": 0, "owned_by": "atoll"}
    assert (await web.get(f"/v1/models/{SCENARIO}")).body["id"] == SCENARIO
    missing = await web.get("/v1/models/nobody")
    assert missing.status == 404 and missing.error["param"] == "model"


async def test_versions_shows_the_chain(web: HttpGateway) -> None:
    answer = await web.get(f"/atoll/scenarios/{SCENARIO}/versions")
    assert answer.body["scenario"] == SCENARIO and answer.body["next_page_token"] == ""
    [version] = answer.body["versions"]
    assert (version["number"], version["parent"], version["weight_version"]) == (0, None, "1:0")
    assert version["operation"] == "creation" and re.fullmatch("[0-9a-f]{64}", version["model_digest"])
    missing = await web.get("/atoll/scenarios/nobody/versions")
    assert missing.status == 404 and missing.error["code"] == "scenario_not_found"
    assert (await web.get(f"/atoll/scenarios/{SCENARIO}/versions?page_token=nonsense")).status == 400
    assert (await web.get(f"/atoll/scenarios/{SCENARIO}/versions?page_size=many")).status == 400
    assert (await web.get(f"/atoll/scenarios/{SCENARIO}/versions?page_size={10**20}")).status == 200


async def test_status_shows_scenarios_engines_and_the_last_training_error(web: HttpGateway, engine: FakeEngine) -> None:
    await web.chat()
    status = (await web.get("/atoll/status")).body
    assert status["last_training_error"] is None
    by_name = {scenario["scenario"]: scenario for scenario in status["scenarios"]}
    assert by_name[SCENARIO]["head_number"] == 0 and by_name[SCENARIO]["open_batches"] == 0
    [shown] = status["engines"]
    assert (shown["url"], shown["healthy"], shown["weight_version"]) == (engine.url, True, "1:0")
    assert shown["problem"] is None and shown["in_flight"] == 0
    assert status["failed_scenarios"] == []


async def test_status_says_which_scenario_cannot_be_used(web: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.gateway.scenarios, "failed", lambda: {"broken": "no such option"})
    status = (await web.get("/atoll/status")).body
    assert status["failed_scenarios"] == [{"scenario": "broken", "problem": "no such option"}]


async def test_a_report_that_names_no_scenario_goes_to_the_one_that_issued_the_receipt(web: HttpGateway) -> None:
    receipt = (await web.chat()).headers["x-atoll-receipt"]
    answer = await web.post(REPORT, {"receipt": receipt, "score": 1, "metadata": {"group": "a"}})
    assert answer.status == 200 and answer.body["scenario"] == SCENARIO


async def test_status_says_which_engine_does_not_answer(web: HttpGateway, engine: FakeEngine) -> None:
    await engine.stop()
    await web.engines.probe()
    [shown] = (await web.get("/atoll/status")).body["engines"]
    assert not shown["healthy"] and engine.url in shown["problem"]


async def test_health_and_the_description_of_the_api(web: HttpGateway) -> None:
    assert (await web.get("/healthz")).body == {"status": "ok"}
    described = (await web.get("/openapi.json")).body["paths"]
    chat = described["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stream", "n"} <= set(chat["properties"])
    assert {"/atoll/report", "/v1/models", "/atoll/status", "/healthz"} <= set(described)


async def test_reports_on_a_whole_batch_make_a_training_job(web: HttpGateway) -> None:
    jobs: list[str | None] = []
    for group in ("a", "b"):
        answer = await web.chat(n=2)
        for score, choice in enumerate(answer.body["choices"]):
            receipt = choice["atoll"]["receipt"]
            body = {"receipt": receipt, "score": score, "metadata": {"group": group}, "request_id": f"{group}{score}"}
            reported = await web.post(REPORT, body)
            assert reported.status == 200, reported
            assert reported.body["scenario"] == SCENARIO and reported.body["receipts"] == [receipt]
            jobs.append(reported.body["job_id"])
    assert jobs[:3] == [None] * 3 and re.fullmatch("job-[0-9a-f]{32}", jobs[3] or "")
    status = (await web.get("/atoll/status")).body
    assert {s["scenario"]: s["open_batches"] for s in status["scenarios"]}[SCENARIO] == 1


async def test_a_report_that_is_sent_again_is_one_report(web: HttpGateway) -> None:
    receipt = (await web.chat()).headers["x-atoll-receipt"]
    body = {"receipts": [receipt], "score": 1, "metadata": {"group": "a"}, "request_id": "r1"}
    first = await web.post(REPORT, body)
    assert first.status == 200 and (await web.post(REPORT, body)).body == first.body
    other_body = await web.post(REPORT, {**body, "score": 0})
    assert other_body.status == 409 and other_body.error["code"] == "request_id_reused"


async def test_bad_reports_are_refused_by_name_and_not_stored(web: HttpGateway) -> None:
    receipt = (await web.chat()).headers["x-atoll-receipt"]
    good = {"receipt": receipt, "score": 1.0, "metadata": {"group": "a"}}
    refused: list[tuple[dict[str, Any], int, str, str | None]] = [
        ({"score": 1.0}, 400, "invalid_field", None),
        ({**good, "receipts": [receipt]}, 400, "invalid_field", None),
        ({**good, "receipt": 5}, 400, "invalid_field", "receipt"),
        ({"receipts": [], "score": 1.0}, 400, "invalid_field", "receipts"),
        ({**good, "score": float("nan")}, 400, "invalid_field", "score"),
        ({**good, "score": float("inf")}, 400, "invalid_field", "score"),
        ({**good, "score": "high"}, 400, "invalid_field", "score"),
        ({**good, "feedback": 5}, 400, "invalid_field", "feedback"),
        ({**good, "metadata": {"group": float("nan")}}, 400, "invalid_field", "metadata.group"),
        ({**good, "metadata": []}, 400, "invalid_field", "metadata"),
        ({**good, "request_id": "x" * 65}, 400, "invalid_field", "request_id"),
        ({**good, "mood": 1}, 400, "unknown_field", "mood"),
        ({**good, "scenario": "nobody"}, 404, "scenario_not_found", "scenario"),
    ]
    for body, status, code, param in refused:
        answer = await web.post(REPORT, body, None if "scenario" in body else {"x-atoll-scenario": SCENARIO})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param), (body, answer)
    unknown = await web.post(REPORT, {**good, "receipt": "0" * 32, "scenario": SCENARIO})
    assert unknown.status == 404 and unknown.error["code"] == "receipt_not_found"
    assert unknown.error["param"].startswith("receipt")
    elsewhere = await web.post(REPORT, {**good, "receipt": "0" * 32})
    assert elsewhere.status == 404 and elsewhere.error["code"] == "receipt_not_found"
    assert elsewhere.error["param"] == "receipt"
    assert (await web.post(REPORT, {**good, "scenario": "other"})).status == 404
    assert (await web.post(REPORT, {**good, "scenario": SCENARIO})).status == 200


async def test_a_receipt_whose_stream_broke_is_told_from_one_that_never_was(
    web: HttpGateway, engine: FakeEngine
) -> None:
    engine.behaviour.hang_up_after = 2
    body = {"model": SCENARIO, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with web.client.post(web.url + "/v1/chat/completions", json=body) as response:
        receipt = response.headers["x-atoll-receipt"]
        await response.read()
    report = {"receipt": receipt, "score": 1, "scenario": SCENARIO, "metadata": {"group": "a"}}
    answer = await web.post(REPORT, report)
    assert answer.status == 409 and answer.error["code"] == "receipt_not_recorded"


async def test_a_second_report_on_a_receipt_is_refused(web: HttpGateway) -> None:
    receipt = (await web.chat()).headers["x-atoll-receipt"]
    body = {"receipt": receipt, "score": 1, "scenario": SCENARIO, "metadata": {"group": "a"}}
    assert (await web.post(REPORT, {**body, "request_id": "r1"})).status == 200
    again = await web.post(REPORT, {**body, "request_id": "r2"})
    assert again.status == 409 and again.error["code"] == "already_consumed"


async def test_a_sample_that_is_not_exact_is_refused_by_a_family_that_needs_it(web: HttpGateway) -> None:
    receipt = (await web.chat(temperature=0)).headers["x-atoll-receipt"]
    body = {"receipt": receipt, "score": 1, "scenario": SCENARIO, "metadata": {"group": "a"}}
    answer = await web.post(REPORT, body)
    assert answer.status == 409 and answer.error["code"] == "sample_not_exact"
