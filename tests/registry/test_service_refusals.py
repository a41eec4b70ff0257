"""Every refusal as a client sees it."""

from collections.abc import Awaitable, Callable

import pytest
from atoll.api.registry.v1 import artifact_service_pb2, scenario_service_pb2, version_service_pb2
from atoll.common.pages import encode_page_token
from atoll.registry.app import Registry
from atoll.registry.types import Kind

from tests.registry.conftest import Client
from tests.registry.material import SCENARIO, seal
from tests.registry.wire import MODEL, commit_request, files_of, refusal, seal_files

Call = Callable[[Client], Awaitable[object]]
REFUSALS: dict[str, tuple[Call, str, str]] = {
    "create without an id": (
        lambda c: c.scenarios.CreateScenario(scenario_service_pb2.CreateScenarioRequest(family="grpo", base_model="x")),
        "invalid_field",
        "scenario_id",
    ),
    "create with a long request id": (
        lambda c: c.scenarios.CreateScenario(scenario_service_pb2.CreateScenarioRequest(request_id="x" * 65)),
        "invalid_field",
        "request_id",
    ),
    "create without a model": (
        lambda c: c.scenarios.CreateScenario(
            scenario_service_pb2.CreateScenarioRequest(scenario_id="new", family="grpo", base_model="nowhere")
        ),
        "base_model_unusable",
        "base_model",
    ),
    "create an existing one differently": (
        lambda c: c.scenarios.CreateScenario(
            scenario_service_pb2.CreateScenarioRequest(scenario_id=SCENARIO, family="sao", base_model="nowhere")
        ),
        "scenario_exists",
        "scenario_id",
    ),
    "get an unknown scenario": (
        lambda c: c.scenarios.GetScenario(scenario_service_pb2.GetScenarioRequest(scenario_id="other")),
        "scenario_not_found",
        "scenario",
    ),
    "list with a foreign page token": (
        lambda c: c.scenarios.ListScenarios(scenario_service_pb2.ListScenariosRequest(page_token="é")),
        "invalid_field",
        "page_token",
    ),
    "list with a negative page size": (
        lambda c: c.versions.ListVersions(version_service_pb2.ListVersionsRequest(scenario=SCENARIO, page_size=-1)),
        "invalid_field",
        "page_size",
    ),
    "list versions with another list's token": (
        lambda c: c.versions.ListVersions(
            version_service_pb2.ListVersionsRequest(scenario=SCENARIO, page_token="c3VwcG9ydA==")
        ),
        "invalid_field",
        "page_token",
    ),
    "list versions with the token of a number that no database takes": (
        lambda c: c.versions.ListVersions(
            version_service_pb2.ListVersionsRequest(scenario=SCENARIO, page_token=encode_page_token("9" * 30))
        ),
        "invalid_field",
        "page_token",
    ),
    "list versions of an unknown scenario": (
        lambda c: c.versions.ListVersions(version_service_pb2.ListVersionsRequest(scenario="other")),
        "scenario_not_found",
        "scenario",
    ),
    "commit without an operation": (
        lambda c: c.versions.CommitVersion(version_service_pb2.CommitVersionRequest(scenario=SCENARIO)),
        "invalid_field",
        "operation",
    ),
    "commit on an unknown artifact": (
        lambda c: c.versions.CommitVersion(commit_request(0, "f" * 64)),
        "artifact_not_found",
        "model_digest",
    ),
    "commit on another parent": (
        lambda c: c.versions.CommitVersion(commit_request(7, "f" * 64)),
        "parent_not_head",
        "expected_parent",
    ),
    "get an unknown version": (
        lambda c: c.versions.GetVersion(version_service_pb2.GetVersionRequest(scenario=SCENARIO, number=9)),
        "version_not_found",
        "number",
    ),
    "get the version of an unknown job": (
        lambda c: c.versions.GetVersion(version_service_pb2.GetVersionRequest(scenario=SCENARIO, job_id="job-9")),
        "version_not_found",
        "job_id",
    ),
    "watch from the future": (
        lambda c: c.versions.WatchVersions(
            version_service_pb2.WatchVersionsRequest(scenario=SCENARIO, from_revision=9)
        ).read(),
        "revision_compacted",
        "from_revision",
    ),
    "stage without a kind": (
        lambda c: c.artifacts.StageArtifact(artifact_service_pb2.StageArtifactRequest(request_id="x")),
        "invalid_field",
        "kind",
    ),
    "stage outside": (
        lambda c: c.artifacts.StageArtifact(artifact_service_pb2.StageArtifactRequest(request_id="../x", kind=MODEL)),
        "invalid_field",
        "request_id",
    ),
    "seal what was never staged": (
        lambda c: c.artifacts.SealArtifact(
            artifact_service_pb2.SealArtifactRequest(staging_id="x", files=files_of({"a": b""}))
        ),
        "staging_not_found",
        "staging_id",
    ),
    "seal nothing": (
        lambda c: c.artifacts.SealArtifact(artifact_service_pb2.SealArtifactRequest(staging_id="x")),
        "invalid_field",
        "files",
    ),
    "seal a file outside": (
        lambda c: seal_files(c, "x", {"../x": b""}),
        "invalid_field",
        "files[0].path",
    ),
    "abandon outside": (
        lambda c: c.artifacts.AbandonArtifact(artifact_service_pb2.AbandonArtifactRequest(staging_id="..")),
        "invalid_field",
        "staging_id",
    ),
    "get a digest that is none": (
        lambda c: c.artifacts.GetArtifact(artifact_service_pb2.GetArtifactRequest(digest="x")),
        "invalid_field",
        "digest",
    ),
    "read of an unknown artifact": (
        lambda c: c.artifacts.ReadFile(artifact_service_pb2.ReadFileRequest(digest="f" * 64, path="a")).read(),
        "artifact_not_found",
        "digest",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_names_its_reason_and_field(client: Client, name: str) -> None:
    call, code, field = REFUSALS[name]
    error = await refusal(call(client))
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_numbers_that_are_not_finite_are_refused(client: Client, registry: Registry, value: float) -> None:
    model = seal(registry, b"model").digest
    bad_metric = commit_request(0, model)
    bad_metric.metrics["train/loss"] = value
    assert (await refusal(client.versions.CommitVersion(bad_metric))).field == "metrics"
    bad_state = commit_request(0, model)
    bad_state.family_state["steps"] = value
    assert (await refusal(client.versions.CommitVersion(bad_state))).field == "family_state.steps"


async def test_a_consumed_sample_and_a_changed_replay_are_refused(client: Client, registry: Registry) -> None:
    model = seal(registry, b"model", Kind.MODEL).digest
    await client.versions.CommitVersion(commit_request(0, model))
    again = commit_request(1, model)
    again.consumed_sample_ids[:] = ["s-0"]
    assert (await refusal(client.versions.CommitVersion(again))).code == "sample_already_consumed"
    changed = commit_request(0, model)
    changed.family_state["steps"] = 9
    assert (await refusal(client.versions.CommitVersion(changed))).code == "job_committed_differently"
