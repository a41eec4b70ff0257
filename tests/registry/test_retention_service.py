"""Retention as an operator and a trainer see it over the wire."""

import pytest
from atoll.api.registry.v1 import artifact_service_pb2 as pb
from atoll.common.errors import BadConfiguration
from atoll.common.settings import load_settings
from atoll.registry import sweep
from atoll.registry.app import Registry
from atoll.registry.settings import RegistrySettings

from tests.registry.conftest import Client
from tests.registry.material import SCENARIO
from tests.registry.test_restoring import commit
from tests.registry.wire import MODEL, refusal


async def test_the_plan_names_what_goes_and_what_stays_and_changes_nothing(client: Client, registry: Registry) -> None:
    for parent in range(3):
        commit(registry, parent)
    for _ in range(2):
        plan = await client.artifacts.PlanRetention(pb.PlanRetentionRequest())
        why = {decision.digest: (decision.remove, decision.why) for decision in plan.decisions}
        one, three = registry.chain.get(SCENARIO, number=1).content, registry.chain.get(SCENARIO).content
        assert why[one.model_digest] == (True, "version 1 of support is not among the 2 newest checkpoints")
        assert why[three.model_digest] == (False, "head of support")
        assert sum(decision.remove for decision in plan.decisions) == 2
        assert 0 < plan.used_bytes < plan.capacity_bytes
        assert all(decision.total_size > 0 for decision in plan.decisions)


async def test_a_version_is_pinned_and_let_go(client: Client, registry: Registry) -> None:
    commit(registry, 0)
    await client.artifacts.PinVersion(pb.PinVersionRequest(scenario=SCENARIO, number=1, pinned=True))
    for parent in range(1, 4):
        commit(registry, parent)
    plan = await client.artifacts.PlanRetention(pb.PlanRetentionRequest())
    assert "version 1 of support is pinned" in {decision.why for decision in plan.decisions}
    await client.artifacts.PinVersion(pb.PinVersionRequest(scenario=SCENARIO, number=1))
    plan = await client.artifacts.PlanRetention(pb.PlanRetentionRequest())
    assert "version 1 of support is pinned" not in {decision.why for decision in plan.decisions}
    unknown = pb.PinVersionRequest(scenario=SCENARIO, number=9, pinned=True)
    assert (await refusal(client.artifacts.PinVersion(unknown))).code == "version_not_found"
    nowhere = pb.PinVersionRequest(scenario="other", pinned=True)
    assert (await refusal(client.artifacts.PinVersion(nowhere))).code == "scenario_not_found"


async def test_staging_on_a_full_disk_says_when_to_ask_again(
    client: Client, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    fullness = {"free": -1}
    monkeypatch.setattr(registry.sweeper, "_measure", lambda _: sweep.Disk(100, fullness["free"]))
    request = pb.StageArtifactRequest(request_id="job-1", kind=MODEL)
    error = await refusal(client.artifacts.StageArtifact(request))
    assert (error.code, error.retry_after_s) == ("storage_full", 30.0)
    fullness["free"] = 0
    assert (await client.artifacts.StageArtifact(request)).staging_id == "job-1"


def settings_from(monkeypatch: pytest.MonkeyPatch, **values: str) -> RegistrySettings:
    for name, value in values.items():
        monkeypatch.setenv(f"ATOLL_REGISTRY_{name}", value)
    return load_settings(RegistrySettings)


def test_bounds_are_fractions_by_default_and_bytes_when_said(monkeypatch: pytest.MonkeyPatch) -> None:
    default = settings_from(monkeypatch)
    assert (default.max_storage_bytes(1000), default.min_free_bytes(1000)) == (800, 100)
    given = settings_from(monkeypatch, MAX_STORAGE="200GB", MIN_FREE_SPACE="1GiB", RETENTION_POLICY="best_reward")
    assert (given.max_storage_bytes(1), given.min_free_bytes(1)) == (200 * 10**9, 2**30)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"MAX_STORAGE": "1GB", "MAX_STORAGE_FRACTION": "0.5"}, "max_storage and max_storage_fraction are both set"),
        ({"MIN_FREE_SPACE": "much"}, "ATOLL_REGISTRY_MIN_FREE_SPACE"),
        ({"MIN_FREE_SPACE_FRACTION": "1"}, "ATOLL_REGISTRY_MIN_FREE_SPACE_FRACTION"),
        ({"MAX_STORAGE_FRACTION": "0"}, "ATOLL_REGISTRY_MAX_STORAGE_FRACTION"),
        ({"RETENTION_POLICY": "oldest"}, "ATOLL_REGISTRY_RETENTION_POLICY"),
    ],
)
def test_bounds_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, values: dict[str, str], words: str) -> None:
    with pytest.raises(BadConfiguration, match=words):
        settings_from(monkeypatch, **values)
