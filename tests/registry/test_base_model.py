import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict
from atoll.registry.base_model import copy_model, model_files

from tests.registry.material import write_safetensors


def test_only_what_a_model_needs_is_taken(base_model: Path) -> None:
    assert model_files(base_model) == ("config.json", "model.safetensors", "tokenizer.json")


def test_shards_are_taken_by_their_index(base_model: Path) -> None:
    (base_model / "model.safetensors").unlink()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (base_model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in (*shards.values(), "unrelated.safetensors"):
        write_safetensors(base_model / name)
    (base_model / "chat_template.jinja").write_text("{{ messages }}")
    assert model_files(base_model) == (
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    )


def test_a_directory_of_links_is_copied_as_files(base_model: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in base_model.iterdir():
        (links / path.name).symlink_to(path)
    target = tmp_path / "target"
    target.mkdir()
    copy_model(links, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not any(path.is_symlink() for path in target.iterdir())
    assert (target / "model.safetensors").read_bytes() == (base_model / "model.safetensors").read_bytes()


def _index(text: str) -> Callable[[Path], object]:
    def write(root: Path) -> None:
        (root / "model.safetensors").unlink()
        (root / "model.safetensors.index.json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "is not a directory"),
        (lambda root: (root / "config.json").unlink(), r"has no config\.json"),
        (lambda root: (root / "config.json").write_text("{"), "cannot be read"),
        (lambda root: (root / "config.json").write_text("[]"), "without model_type"),
        (lambda root: (root / "config.json").write_text("{}"), "without model_type"),
        (lambda root: (root / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda root: (root / "tokenizer.json").write_text('{"model": '), r"has a tokenizer\.json that cannot be read"),
        (lambda root: (root / "tokenizer.json").write_text("[]"), r"has a tokenizer\.json that is not a JSON object"),
        (lambda root: (root / "model.safetensors").unlink(), "has neither"),
        (lambda root: (root / "model.safetensors").write_bytes(b""), "not a complete safetensors file"),
        (lambda root: (root / "model.safetensors").write_text("version 1\noid 12\n"), "not a complete safetensors"),
        (lambda root: write_safetensors(root / "model.safetensors", b""), None),
        (_index("{}"), "without a weight_map"),
        (_index('{"weight_map": {}}'), "files are missing"),
        (_index('{"weight_map": {"a": "gone.safetensors"}}'), r"gone\.safetensors"),
        (_index('{"weight_map": {"a": "../x.safetensors"}}'), r"\.\./x\.safetensors"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(
    base_model: Path, spoil: Callable[[Path], object], words: str | None
) -> None:
    spoil(base_model)
    if words is None:
        assert model_files(base_model)
        return
    with pytest.raises(Conflict, match=words) as refused:
        model_files(base_model)
    assert refused.value.reason == errors_pb2.REASON_BASE_MODEL_UNUSABLE


@pytest.mark.parametrize("missing", [1, 8, 60])
def test_a_download_that_stopped_is_refused(base_model: Path, missing: int) -> None:
    weights = base_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-missing])
    with pytest.raises(Conflict, match="not a complete safetensors file"):
        model_files(base_model)
