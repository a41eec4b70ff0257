"""torch_dist checkpoints of actor, critic, kept weights and random-number states, which any layout can load."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from atoll.families.policy_spec import CriticSpec
from atoll.trainer.megatron.rank_model import RankModel
from atoll.trainer.megatron.weight_sets import WeightSets
from atoll.trainer.megatron.writing import Writing, save_sharded
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from torch.distributed.checkpoint.metadata import StorageMeta

_WEIGHTS = "torch_dist"
_DRIVER_STATE = "driver_state"
_CONTENTS = "contents.json"
_CRITIC_PREFIX = "critic."
# Without an explicit optimizer layout megatron-core's default fails; this one loads under any TP and DP.
_METADATA: Mapping[str, object] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
}


@dataclass(frozen=True)
class CheckpointParts:
    """What a checkpoint is made of, besides random-number states and the driver's state."""

    actor: RankModel
    critic: RankModel | None
    sets: WeightSets


@dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint holds beside the actor.

    Example: ``CheckpointContents(CriticSpec(1e-5, 0.2), ("teacher",))``
    """

    critic: CriticSpec | None = None
    """Only what decides the critic's shape is read from it; a job brings its own."""
    weights: tuple[str, ...] = ()
    """Names of the kept weight sets."""


def read_contents(directory: Path) -> CheckpointContents:
    """Tell what must be there before `load_checkpoint` can fill it."""
    path = directory / _CONTENTS
    if not path.exists():  # written before there were critics
        return CheckpointContents()
    document = json.loads(path.read_text())
    critic = CriticSpec(learning_rate=1.0, value_clip=1.0) if document["critic"] else None
    return CheckpointContents(critic, tuple(document["weights"]))


def save_checkpoint(directory: Path, parts: CheckpointParts, driver_state: bytes) -> None:
    """Write a checkpoint into ``directory``, which must not exist. A collective over all ranks.

    Raises `WriteFailed` on every rank; the parts are as they were.
    """
    weights, writing = directory / _WEIGHTS, Writing()
    if dist.get_rank() == 0:
        with writing.attempt(directory):
            weights.mkdir(parents=True)
            (directory / _DRIVER_STATE).write_bytes(driver_state)
            contents = {"critic": parts.critic is not None, "weights": sorted(parts.sets.kept)}
            (directory / _CONTENTS).write_text(json.dumps(contents, sort_keys=True) + "\n")
    writing.agree()
    save_sharded(_sharded_state(parts, loading=False) | {"random": _random_state()}, weights, writing, _METADATA)
    if dist.get_rank() == 0:
        with writing.attempt(weights / ".metadata"):
            _forget_where_and_when(weights / ".metadata")
    writing.agree()


def warm_up_saving(scratch: Path) -> None:
    """Save something tiny, so that no step waits for the helper process that the first save starts (3 to 7 s)."""
    directory = scratch / "warm-up"
    directory.mkdir(exist_ok=True)
    dist.barrier()
    piece = ShardedTensor.from_rank_offsets("warm_up", torch.zeros(1), (0, dist.get_rank(), dist.get_world_size()))
    save_sharded({"warm_up": piece}, directory, Writing(), {})
    dist.barrier()
    shutil.rmtree(directory, ignore_errors=True)


def load_checkpoint(directory: Path, parts: CheckpointParts) -> bytes:
    """Overwrite the parts and the random-number states; returns the driver's state. A collective."""
    weights = str(directory / _WEIGHTS)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(weights), group)
    state = dist_checkpointing.load(_sharded_state(parts, loading=True), weights, strategy)
    parts.actor.module.load_state_dict(state["model"])
    parts.actor.optimizer.load(state["optimizer"])
    if parts.critic is not None:
        loaded = {name.removeprefix(_CRITIC_PREFIX): tensor for name, tensor in state["critic"].items()}
        parts.critic.module.load_state_dict(loaded)
        parts.critic.optimizer.load(state["critic_optimizer"])
    for name, shards in state.get("kept", {}).items():
        parts.sets.kept[name] = {key: tensor.detach().to("cpu", torch.float32) for key, tensor in shards.items()}
    random.setstate(state["random"]["python"])
    np.random.set_state(state["random"]["numpy"])
    torch.set_rng_state(state["random"]["torch"])
    return (directory / _DRIVER_STATE).read_bytes()


def _forget_where_and_when(path: Path) -> None:
    """Drop the directory and the random id that torch writes, so that equal states give equal bytes."""
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta = StorageMeta()
    path.write_bytes(pickle.dumps(metadata))


def _sharded_state(parts: CheckpointParts, *, loading: bool) -> dict[str, object]:
    weights = parts.actor.module.sharded_state_dict(metadata=dict(_METADATA))
    state: dict[str, object] = {"model": weights, "optimizer": _moments(parts.actor, weights, loading)}
    if parts.critic is not None:
        values = parts.critic.module.sharded_state_dict(prefix=_CRITIC_PREFIX, metadata=dict(_METADATA))
        state |= {"critic": values, "critic_optimizer": _moments(parts.critic, values, loading)}
    if parts.sets.kept:
        state["kept"] = parts.sets.sharded(weights)
    return state


def _moments(model: RankModel, weights: object, loading: bool) -> object:
    return model.optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=dict(_METADATA))


def _random_state() -> dict[str, object]:
    # The same on every rank, so rank 0's copy in the common state stands for all, under any layout.
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
