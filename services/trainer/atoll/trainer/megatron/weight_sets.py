"""Named sets of weights beside the model's own: copies that a family keeps, and models that it compares with.

A set is this rank's shards, float32 on the host; it takes the model's place for a forward-only pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from atoll.trainer.megatron.architecture import UnsupportedModel, read_architecture
from atoll.trainer.megatron.hf_files import HfWeights
from atoll.trainer.megatron.parameters import local_shards
from atoll.trainer.megatron.rank_model import RankModel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

Shards = dict[str, Tensor]
"""By the parameter's name on this rank."""


@dataclass
class WeightSets:
    """The sets of one model.

    ``kept`` are part of every checkpoint. ``read`` are those of model directories, which hold their bytes. A directory
    of an artifact is named by the digest of what is in it, so a set stays right for as long as the same one is named,
    over loads of other versions too.
    """

    kept: dict[str, Shards] = field(default_factory=dict)
    read: dict[str, tuple[Path, Shards]] = field(default_factory=dict)

    def keep(self, name: str, model: RankModel) -> None:
        """Copy the model's present weights."""
        self.read.pop(name, None)
        self.kept[name] = _copy(model)

    def keep_directory(self, name: str, directory: Path, model: RankModel) -> None:
        """Read a model directory, unless the set is it already.

        Raises `UnsupportedModel` when it does not fit the model.
        """
        if name in self.read and self.read[name][0] == directory:
            return
        found = read_architecture(directory)
        if found != model.architecture:
            raise UnsupportedModel(directory, "config.json", f"the actor's {model.architecture}", found)
        shards = local_shards(model.module, model.architecture, model.padded_vocab, HfWeights(directory).read)
        self.kept.pop(name, None)
        self.read[name] = directory, dict(shards)

    @torch.no_grad()
    def move_towards(self, name: str, model: RankModel, rate: float) -> None:
        """kept += rate (theta - kept), in float32."""
        for parameter_name, parameter in model.module.named_parameters():
            kept = self.kept[name][parameter_name]
            kept.add_(parameter.detach().to("cpu", torch.float32) - kept, alpha=rate)

    @contextmanager
    def in_place(self, name: str, model: RankModel) -> Iterator[None]:
        """The model computes with these weights inside the block, and has its own again after it.

        Raises `ValueError` for a set that is not there.
        """
        if name not in self.kept and name not in self.read:
            raise ValueError(f"weights {name!r}: expected one of {sorted([*self.kept, *self.read])}")
        shards = self.kept[name] if name in self.kept else self.read[name][1]
        own = _copy(model)
        _overwrite(model, shards)
        try:
            yield
        finally:
            _overwrite(model, own)

    @contextmanager
    def kept_if_trained(self) -> Iterator[None]:
        """What the block keeps is forgotten when it raises: the weights that a family starts from are those of its
        first job that trained, and a restart would know nothing of another one."""
        before = dict(self.kept)
        try:
            yield
        except BaseException:
            self.kept = before
            raise

    def allocate(self, names: tuple[str, ...], model: RankModel) -> None:
        """Make room for exactly these kept sets, to be filled by a load."""
        self.kept = {
            name: {key: torch.zeros(p.shape, dtype=torch.float32) for key, p in model.module.named_parameters()}
            for name in names
        }

    def sharded(self, of_model: Mapping[str, object]) -> dict[str, dict[str, object]]:
        """The kept sets as megatron-core stores them: like the model's ``sharded_state_dict``, under other keys."""
        return {
            name: {
                key: replace(entry, key=f"kept.{name}.{entry.key}", data=self.kept[name][key])
                for key, entry in of_model.items()
                if isinstance(entry, ShardedTensor | ShardedTensorFactory) and key in self.kept[name]
            }
            for name in sorted(self.kept)
        }


def _copy(model: RankModel) -> Shards:
    return {
        name: p.detach().to("cpu", torch.float32, copy=True).contiguous() for name, p in model.module.named_parameters()
    }


@torch.no_grad()
def _overwrite(model: RankModel, weights: Shards) -> None:
    for name, parameter in model.module.named_parameters():
        parameter.copy_(weights[name])
