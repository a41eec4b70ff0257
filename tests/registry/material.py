"""What registry tests are made of: a base model directory, files with their manifest, and a registry on a directory."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

from atoll.registry.app import Registry
from atoll.registry.settings import BootScenario, RegistrySettings
from atoll.registry.types import Artifact, Kind, ManifestFile, Operation, VersionContent
from pydantic import ByteSize

SCENARIO = "support"


def write_safetensors(path: Path, values: bytes = bytes(8)) -> None:
    header = {"weight": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


def write_base_model(directory: Path) -> Path:
    """A directory that looks like a model to everybody who does not compute with it, with a file nobody needs."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "notes.md").write_text("not part of the model")
    write_safetensors(directory / "model.safetensors")
    return directory


def write_files(root: Path, contents: Mapping[str, bytes]) -> tuple[ManifestFile, ...]:
    """Writes the files and returns their manifest."""
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return manifest_of(contents)


def manifest_of(contents: Mapping[str, bytes]) -> tuple[ManifestFile, ...]:
    return tuple(ManifestFile(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in contents.items())


def settings_for(
    directory: Path, *, base: Path | None = None, keep: int = 2, database_url: str | None = None
) -> RegistrySettings:
    """A registry in `directory`/store with one scenario from `base`, or from `directory`/base, made when missing."""
    source = base or directory / "base"
    if not source.exists():
        write_base_model(source)
    boot = BootScenario(scenario_id=SCENARIO, family="grpo", base_model=str(source))
    # How full the machine is that runs the tests must not matter.
    return RegistrySettings(
        port=0,
        store=directory / "store",
        database_url=database_url,
        keep_checkpoints=keep,
        scenarios=(boot,),
        max_storage_fraction=1.0,
        min_free_space=ByteSize(0),
    )


def seal(registry: Registry, content: bytes, kind: Kind = Kind.MODEL) -> Artifact:
    """An artifact of one file."""
    staging_id = hashlib.sha256(content + kind.encode()).hexdigest()[:32]
    root = registry.artifacts.store.stage(staging_id, kind)
    return registry.artifacts.seal(staging_id, write_files(root, {"weights.bin": content}))


def content(parent: int, model_digest: str, **changes: object) -> VersionContent:
    """A commit after `parent` under the job id job-<parent + 1>, consuming one sample."""
    values: dict[str, object] = {
        "scenario": SCENARIO,
        "job_id": f"job-{parent + 1}",
        "parent": parent,
        "operation": Operation.TRAINING,
        "family": "grpo",
        "model_digest": model_digest,
        "checkpoint_digest": None,
        "consumed_sample_ids": (f"sample-{parent + 1}",),
        "metrics": {"train/loss": 0.25},
        "family_state": {"steps": parent + 1},
    }
    return VersionContent(**(values | changes))  # type: ignore[arg-type]
