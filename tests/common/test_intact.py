import hashlib
from pathlib import Path

import pytest
from atoll.api.registry.v1 import artifact_pb2
from atoll.common.errors import BadConfiguration
from atoll.common.intact import refuse_damaged

CONTENT = {"model.safetensors": b"weights" * 100, "config.json": b"{}"}


@pytest.fixture
def files(tmp_path: Path) -> list[artifact_pb2.ManifestFile]:
    """The manifest of CONTENT, which lies in the test's directory."""
    for path, data in CONTENT.items():
        (tmp_path / path).write_bytes(data)
    return [
        artifact_pb2.ManifestFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in CONTENT.items()
    ]


def test_files_that_are_what_was_committed_pass(tmp_path: Path, files: list[artifact_pb2.ManifestFile]) -> None:
    refuse_damaged(tmp_path, files)


def test_a_single_flipped_bit_is_refused_by_file(tmp_path: Path, files: list[artifact_pb2.ManifestFile]) -> None:
    data = bytearray(CONTENT["model.safetensors"])
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(BadConfiguration, match=r"model\.safetensors has sha256 .* restore the directory") as refused:
        refuse_damaged(tmp_path, files)
    assert "config.json" not in refused.value.message


def test_a_file_that_is_gone_is_refused_by_name(tmp_path: Path, files: list[artifact_pb2.ManifestFile]) -> None:
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadConfiguration, match=r"config\.json cannot be read: No such file"):
        refuse_damaged(tmp_path, files)
