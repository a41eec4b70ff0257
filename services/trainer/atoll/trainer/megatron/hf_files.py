"""A model directory in the Hugging Face format: reading its weights, writing what ``from_pretrained`` loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# Fixed so that equal weights give equal bytes, and far below what a loader needs to hold at once.
_FILE_BYTES = 4 * 1024**3
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class HfWeights:
    """The tensors of a model directory, read one at a time from one safetensors file or an indexed set.

    Raises `FileNotFoundError` when the directory holds no safetensors weights.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / _INDEX
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (directory / _SINGLE).exists():
            with safe_open(directory / _SINGLE, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise FileNotFoundError(
                f"{directory}: expected {_SINGLE} or {_INDEX}, found neither; save the model with save_pretrained"
            )

    def read(self, name: str) -> Tensor:
        """One tensor as stored. Raises `KeyError` naming the tensor and the directory."""
        if name not in self._file_of:
            raise KeyError(f"{self._directory}: no tensor {name}; its config.json promises one")
        with safe_open(self._directory / self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def read_companions(directory: Path) -> dict[str, bytes]:
    """What belongs to a model beside its weights: configuration, tokenizer and chat template, by file name.

    They are kept in memory, so that an export does not depend on a directory that retention may have removed.
    """
    return {name: (directory / name).read_bytes() for name in _COMPANIONS if (directory / name).exists()}


def write_export(companions: Mapping[str, bytes], target: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights (Hugging Face names, one dtype) with the companion files of the model they come from.

    ``target`` is created and must not exist. Equal weights and companions give equal bytes. Each file is complete when
    this returns; syncing the directory is the caller's.
    """
    files, dtype = _group_by_size(weights)
    target.mkdir(parents=True)
    for name, content in companions.items():
        (target / name).write_bytes(content)
    config = json.loads(companions["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if len(files) == 1:
        save_file(files[0], target / _SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(t.numel() * t.element_size() for tensors in files for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _group_by_size(weights: Iterable[tuple[str, Tensor]]) -> tuple[list[dict[str, Tensor]], str]:
    files: list[dict[str, Tensor]] = [{}]
    size, dtype = 0, ""
    for name, tensor in weights:
        bytes_ = tensor.numel() * tensor.element_size()
        if files[-1] and size + bytes_ > _FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor.contiguous()
        size += bytes_
        dtype = str(tensor.dtype).removeprefix("torch.")
    return files, dtype
