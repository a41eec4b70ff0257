import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, InvalidInput, NotFound
from atoll.registry.app import Registry
from atoll.registry.types import Kind, ScenarioDefinition

from tests.registry.material import SCENARIO, content, seal


@pytest.fixture
def definition(base_model: Path) -> ScenarioDefinition:
    return ScenarioDefinition("other", "grpo", {"clip": 0.2, "nested": {"a": [1, None]}}, str(base_model), 3)


def test_a_scenario_is_created_with_its_model_and_only_what_a_model_needs(
    registry: Registry, definition: ScenarioDefinition
) -> None:
    scenario = registry.scenarios.create(definition)
    assert (scenario.definition, scenario.head) == (definition, 0)
    artifact = registry.artifacts.get(registry.chain.get("other").content.model_digest)
    assert artifact.kind is Kind.MODEL
    assert [file.path for file in artifact.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert registry.scenarios.get("other") == scenario


def test_the_store_does_not_change_with_the_source(registry: Registry, definition: ScenarioDefinition) -> None:
    registry.scenarios.create(definition)
    source = Path(definition.base_model) / "config.json"
    source.write_text("changed")
    digest = registry.chain.get("other").content.model_digest
    assert (registry.artifacts.store.files_of(digest) / "config.json").read_text() != "changed"


def test_the_same_definition_again_returns_the_scenario_without_its_model(
    registry: Registry, definition: ScenarioDefinition
) -> None:
    first = registry.scenarios.create(definition)
    registry.chain.commit(content(0, seal(registry, b"model").digest, scenario="other"))
    shutil.rmtree(definition.base_model)
    assert registry.scenarios.create(definition) == replace(first, head=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "sao"}, "family is 'grpo', given 'sao'"),
        ({"options": {}}, "options is"),
        ({"base_model": "/elsewhere"}, "base_model is"),
        ({"max_staleness": 4}, "max_staleness is 3, given 4"),
    ],
)
def test_another_definition_under_an_id_is_refused_with_what_differs(
    registry: Registry, definition: ScenarioDefinition, changes: dict[str, object], words: str
) -> None:
    registry.scenarios.create(definition)
    with pytest.raises(AtollError, match=words) as refused:
        registry.scenarios.create(replace(definition, **changes))  # type: ignore[arg-type]
    assert refused.value.reason == errors_pb2.REASON_SCENARIO_EXISTS


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scenario_id": "Other"}, "scenario_id"),
        ({"scenario_id": ""}, "scenario_id"),
        ({"scenario_id": "x" * 64}, "scenario_id"),
        ({"family": ""}, "family"),
        ({"family": "a.b:"}, "family"),
        ({"family": "../x"}, "family"),
        ({"base_model": ""}, "base_model"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_a_definition_that_cannot_be_is_refused(
    registry: Registry, definition: ScenarioDefinition, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        registry.scenarios.create(replace(definition, **changes))  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize("family", ["grpo", "openclaw-opd", "my_package.families:Mine"])
def test_a_family_is_a_name_or_a_class(registry: Registry, definition: ScenarioDefinition, family: str) -> None:
    assert registry.scenarios.create(replace(definition, family=family)).definition.family == family


def test_an_unusable_model_leaves_nothing_behind(registry: Registry, definition: ScenarioDefinition) -> None:
    (Path(definition.base_model) / "config.json").unlink()
    with pytest.raises(AtollError) as refused:
        registry.scenarios.create(definition)
    assert refused.value.reason == errors_pb2.REASON_BASE_MODEL_UNUSABLE
    assert not any(registry.artifacts.store.staging.iterdir())
    with pytest.raises(NotFound) as unknown:
        registry.scenarios.get("other")
    assert unknown.value.reason == errors_pb2.REASON_SCENARIO_NOT_FOUND


def test_a_disk_that_fills_up_during_the_import_leaves_nothing_behind(
    registry: Registry, definition: ScenarioDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        with pytest.raises(AtollError) as refused:
            registry.scenarios.create(definition)
    assert refused.value.reason == errors_pb2.REASON_STORAGE_FULL
    assert not any(registry.artifacts.store.staging.iterdir())
    assert registry.scenarios.create(definition).head == 0


def test_pages_list_scenarios_by_id(registry: Registry, definition: ScenarioDefinition) -> None:
    for name in ("zebra", "a-1", "m"):
        registry.scenarios.create(replace(definition, scenario_id=name))
    first = registry.scenarios.list_page(2, None)
    rest = registry.scenarios.list_page(10, first[-1].definition.scenario_id)
    assert [s.definition.scenario_id for s in (*first, *rest)] == ["a-1", "m", SCENARIO, "zebra"]
