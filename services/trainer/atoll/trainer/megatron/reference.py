"""Frozen weights kept on the host and put in the model's place for a forward-only pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from atoll.trainer.megatron.architecture import Architecture
from atoll.trainer.megatron.hf_files import HfWeights
from atoll.trainer.megatron.parameters import local_shards
from megatron.core.models.gpt import GPTModel


class FrozenWeights:
    """This rank's shards of another model of the same architecture, float32 on the host."""

    def __init__(self, directory: Path, architecture: Architecture, padded_vocab: int) -> None:
        self._shards = dict(local_shards(architecture, padded_vocab, HfWeights(directory).read))

    @contextmanager
    def in_place_of(self, model: GPTModel) -> Iterator[None]:
        """The model computes with these weights inside the block, and has its own again after it."""
        with torch.no_grad():
            own = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
            _overwrite(model, self._shards)
            try:
                yield
            finally:
                _overwrite(model, own)


def _overwrite(model: GPTModel, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
