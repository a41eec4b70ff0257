"""Through the real gRPC server, with the channel that the other services use."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from atoll.api.registry.v1 import (
    artifact_pb2,
    artifact_service_pb2,
    scenario_service_pb2,
    version_pb2,
    version_service_pb2,
)
from atoll.common.errors import AtollError
from atoll.common.rpc_errors import from_rpc_error
from atoll.registry.app import Registry
from atoll.registry.types import Kind

from tests.registry.conftest import Client
from tests.registry.material import SCENARIO, content, manifest_of, seal

MODEL, CHECKPOINT = artifact_pb2.ARTIFACT_KIND_MODEL, artifact_pb2.ARTIFACT_KIND_CHECKPOINT


async def refusal(call: Awaitable[object]) -> AtollError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def seal_files(
    client: Client, staging_id: str, contents: dict[str, bytes], kind: int = MODEL
) -> artifact_pb2.Artifact:
    """What a trainer does: stage, write into the shared directory, seal."""
    staged = await client.artifacts.StageArtifact(
        artifact_service_pb2.StageArtifactRequest(request_id=staging_id, kind=kind)  # type: ignore[arg-type]
    )
    for name, data in contents.items():
        path = Path(staged.location, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    request = artifact_service_pb2.SealArtifactRequest(staging_id=staged.staging_id, files=files_of(contents))
    return (await client.artifacts.SealArtifact(request)).artifact


def files_of(contents: dict[str, bytes]) -> list[artifact_pb2.ManifestFile]:
    return [artifact_pb2.ManifestFile(path=f.path, size=f.size, sha256=f.sha256) for f in manifest_of(contents)]


def commit_request(parent: int, model: str, checkpoint: str = "") -> version_service_pb2.CommitVersionRequest:
    request = version_service_pb2.CommitVersionRequest(
        scenario=SCENARIO,
        job_id=f"job-{parent + 1}",
        expected_parent=parent,
        operation=version_pb2.OPERATION_TRAINING,
        family="grpo",
        model_digest=model,
        checkpoint_digest=checkpoint,
        consumed_sample_ids=[f"s-{parent}"],
        metrics={"train/loss": 0.5},
    )
    request.family_state.update({"steps": parent, "deep": {"list": [1.5, None, True, "x"]}})
    return request


async def test_one_job_from_staging_to_the_head(client: Client) -> None:
    model = await seal_files(client, "job-1-model", {"config.json": b"{}", "model.safetensors": b"weights"})
    checkpoint = await seal_files(client, "job-1-checkpoint", {"sub/optimizer": b"moments"}, CHECKPOINT)
    request = commit_request(0, model.digest, checkpoint.digest)
    version = (await client.versions.CommitVersion(request)).version
    assert (version.number, version.parent, version.weight_version, version.revision) == (1, 0, "1:1", 2)
    assert version.name == f"scenarios/{SCENARIO}/versions/1"
    assert (version.family_state, dict(version.metrics)) == (request.family_state, {"train/loss": 0.5})
    assert (await client.versions.CommitVersion(request)).version == version
    head = await client.versions.GetVersion(version_service_pb2.GetVersionRequest(scenario=SCENARIO))
    assert head.version == version
    by_job = version_service_pb2.GetVersionRequest(scenario=SCENARIO, job_id="job-1")
    assert (await client.versions.GetVersion(by_job)).version == version
    first = version_service_pb2.GetVersionRequest(scenario=SCENARIO, number=0)
    assert not (await client.versions.GetVersion(first)).version.HasField("parent")
    found = await client.artifacts.GetArtifact(artifact_service_pb2.GetArtifactRequest(digest=model.digest))
    assert found.artifact == model
    assert Path(model.location, "model.safetensors").read_bytes() == b"weights"
    scenario = await client.scenarios.GetScenario(scenario_service_pb2.GetScenarioRequest(scenario_id=SCENARIO))
    assert scenario.scenario.head == 1


async def test_a_scenario_is_created_once_and_listed(client: Client, base_model: Path) -> None:
    request = scenario_service_pb2.CreateScenarioRequest(
        scenario_id="another", family="grpo", base_model=str(base_model), max_staleness=2
    )
    request.options.update({"group_size": 4, "clip": {"low": 0.2}})
    created = (await client.scenarios.CreateScenario(request)).scenario
    assert (await client.scenarios.CreateScenario(request)).scenario == created
    assert created.options == request.options
    page = await client.scenarios.ListScenarios(scenario_service_pb2.ListScenariosRequest(page_size=1))
    assert [scenario.scenario_id for scenario in page.scenarios] == ["another"]
    rest = scenario_service_pb2.ListScenariosRequest(page_token=page.next_page_token)
    page = await client.scenarios.ListScenarios(rest)
    assert ([scenario.scenario_id for scenario in page.scenarios], page.next_page_token) == ([SCENARIO], "")


async def test_a_watch_follows_commits_and_resumes(client: Client, registry: Registry) -> None:
    model = seal(registry, b"model").digest
    watch = client.versions.WatchVersions(version_service_pb2.WatchVersionsRequest(scenario=SCENARIO))
    for parent in range(3):
        response = await asyncio.wait_for(watch.read(), 10)
        assert isinstance(response, version_service_pb2.WatchVersionsResponse)
        assert (response.version.number, response.revision) == (parent, parent + 1)
        await client.versions.CommitVersion(commit_request(parent, model))
    watch.cancel()
    resumed = client.versions.WatchVersions(
        version_service_pb2.WatchVersionsRequest(scenario=SCENARIO, from_revision=3)
    )
    response = await asyncio.wait_for(resumed.read(), 10)
    assert isinstance(response, version_service_pb2.WatchVersionsResponse)
    assert response.version.number == 3
    resumed.cancel()


async def test_pages_of_versions_hold_each_once_and_stay_below_a_clients_limit(
    client: Client, registry: Registry
) -> None:
    model = seal(registry, b"model").digest
    for parent in range(4):
        samples = tuple(f"{parent}-{index:060}" for index in range(20_000))
        registry.chain.commit(content(parent, model, consumed_sample_ids=samples))
    seen: list[int] = []
    token, pages = "", 0
    while True:
        request = version_service_pb2.ListVersionsRequest(scenario=SCENARIO, page_token=token)
        page = await client.versions.ListVersions(request)
        assert page.ByteSize() < 4 << 20
        seen += [version.number for version in page.versions]
        token, pages = page.next_page_token, pages + 1
        if not token:
            break
    assert (seen, pages > 1) == ([4, 3, 2, 1, 0], True)


async def test_a_file_streams_in_chunks_and_resumes(client: Client) -> None:
    data = bytes(range(256)) * (10 << 10)
    artifact = await seal_files(client, "big", {"big.bin": data, "empty": b""})

    async def read(path: str, offset: int) -> list[bytes]:
        request = artifact_service_pb2.ReadFileRequest(digest=artifact.digest, path=path, offset=offset)
        return [response.chunk async for response in client.artifacts.ReadFile(request)]

    chunks = await read("big.bin", 0)
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) <= 1 << 20
    assert b"".join(await read("big.bin", 12345)) == data[12345:]
    assert await read("empty", 0) == []


async def test_retention_follows_a_commit_by_itself(client: Client) -> None:
    digests = []
    for parent in range(4):
        digests.append((await seal_files(client, f"job-{parent}", {"w": b"%d" % parent})).digest)
        await client.versions.CommitVersion(commit_request(parent, digests[-1]))
    for _ in range(100):
        listed = await client.artifacts.ListArtifacts(artifact_service_pb2.ListArtifactsRequest(kind=MODEL))
        removed = {artifact.digest for artifact in listed.artifacts if artifact.removed}
        if removed == set(digests[:2]):
            break
        await asyncio.sleep(0.05)
    assert removed == set(digests[:2])
    gone = await refusal(client.artifacts.GetArtifact(artifact_service_pb2.GetArtifactRequest(digest=digests[0])))
    assert (gone.code, "retention removed it" in gone.message) == ("artifact_not_found", True)


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
