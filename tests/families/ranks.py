"""Runs a function on several ranks of a real gloo group, in processes of their own, and returns what each answers."""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from atoll.families.losses.vocab import VocabShard

T = TypeVar("T")


def on_shards(shards: int, vocab_size: int, function: Callable[[VocabShard], T]) -> list[T]:
    """Calls `function(shard)` on every rank; a single shard runs here, without a group.

    `function` must be picklable.
    """
    if shards == 1:
        return [function(VocabShard(vocab_size))]
    # The server imports torch once for all ranks of the test run.
    multiprocessing.set_forkserver_preload(["torch.distributed", "atoll.families.losses.policy_loss"])
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _rank, args=(shards, vocab_size, function, directory), nprocs=shards, start_method="forkserver"
        )
        return [pickle.loads((Path(directory) / f"answer-{rank}").read_bytes()) for rank in range(shards)]


def _rank(rank: int, shards: int, vocab_size: int, function: Callable[[VocabShard], T], directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), shards)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=shards)
    try:
        answer = function(VocabShard(vocab_size, dist.group.WORLD, rank, shards))
        (Path(directory) / f"answer-{rank}").write_bytes(pickle.dumps(answer))
    finally:
        dist.destroy_process_group()
