"""Through the real gRPC server, with the channel that the other services use."""

import asyncio
from pathlib import Path

from atoll.api.registry.v1 import (
    artifact_service_pb2,
    scenario_service_pb2,
    version_service_pb2,
)
from atoll.registry.app import Registry

from tests.registry.conftest import Client
from tests.registry.material import SCENARIO, content, seal
from tests.registry.wire import CHECKPOINT, MODEL, commit_request, refusal, seal_files


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
