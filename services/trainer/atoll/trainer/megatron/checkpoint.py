"""torch_dist checkpoints: weights, optimizer and random-number states, which any tensor or data layout can load."""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from atoll.trainer.megatron.optimizer import StepOptimizer
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.metadata import StorageMeta

_WEIGHTS = "torch_dist"
_DRIVER_STATE = "driver_state"
_FORMAT_VERSION = 1
# Without an explicit optimizer layout megatron-core's default fails; this one loads under any TP and DP.
_METADATA: Mapping[str, object] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
}


def save_checkpoint(directory: Path, model: GPTModel, optimizer: StepOptimizer, driver_state: bytes) -> None:
    """Write a checkpoint into ``directory``, which must not exist. A collective over all ranks."""
    weights = directory / _WEIGHTS
    if dist.get_rank() == 0:
        weights.mkdir(parents=True)
        (directory / _DRIVER_STATE).write_bytes(driver_state)
    dist.barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(
        _sharded_state(model, optimizer, loading=False) | {"random": _random_state()},
        str(weights),
        FullyParallelSaveStrategyWrapper(_strategy(), group),
        content_metadata=dict(_METADATA),
    )
    if dist.get_rank() == 0:
        _forget_where_and_when(weights / ".metadata")


def warm_up_saving() -> None:
    """Save something tiny, so that no step waits for the helper process that the first save starts (3 to 7 s)."""
    shared: list[str | None] = [tempfile.mkdtemp(prefix="atoll-warm-up-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    directory = Path(str(shared[0]))
    directory.mkdir(exist_ok=True)
    piece = ShardedTensor.from_rank_offsets("warm_up", torch.zeros(1), (0, dist.get_rank(), dist.get_world_size()))
    dist_checkpointing.save({"warm_up": piece}, str(directory), _strategy())
    dist.barrier()
    shutil.rmtree(directory, ignore_errors=True)


def load_checkpoint(directory: Path, model: GPTModel, optimizer: StepOptimizer) -> bytes:
    """Overwrite weights, optimizer and random-number states; returns the driver's state. A collective."""
    weights = str(directory / _WEIGHTS)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(weights), group)
    state = dist_checkpointing.load(_sharded_state(model, optimizer, loading=True), weights, strategy)
    model.load_state_dict(state["model"])
    optimizer.load(state["optimizer"])
    random.setstate(state["random"]["python"])
    np.random.set_state(state["random"]["numpy"])
    torch.set_rng_state(state["random"]["torch"])
    return (directory / _DRIVER_STATE).read_bytes()


def _forget_where_and_when(path: Path) -> None:
    """Drop the directory and the random id that torch writes, so that equal states give equal bytes."""
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta = StorageMeta()
    path.write_bytes(pickle.dumps(metadata))


def _strategy() -> TorchDistSaveShardedStrategy:
    return TorchDistSaveShardedStrategy("torch_dist", _FORMAT_VERSION, thread_count=1)


def _sharded_state(model: GPTModel, optimizer: StepOptimizer, *, loading: bool) -> dict[str, object]:
    weights = model.sharded_state_dict(metadata=dict(_METADATA))
    moments = optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=dict(_METADATA))
    return {"model": weights, "optimizer": moments}


def _random_state() -> dict[str, object]:
    # The same on every rank, so rank 0's copy in the common state stands for all, under any layout.
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
