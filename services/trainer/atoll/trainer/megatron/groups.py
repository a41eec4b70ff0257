"""Joins this process to the ranks of its worker group and lays out the parallel groups."""

from __future__ import annotations

import datetime
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from atoll.trainer.megatron.cpu import install_cpu_adapter
from atoll.trainer.megatron.settings import MegatronSettings
from atoll.trainer.workers.group import WorkerPlace
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def join_groups(place: WorkerPlace, settings: MegatronSettings, timeout_s: float) -> torch.device:
    """Start torch.distributed (NCCL with CUDA, else gloo) and megatron's groups; returns this rank's device.

    A collective that waits longer than ``timeout_s`` seconds fails. Raises `ValueError` when the layout does not
    fill the group.
    """
    if settings.layout.world_size != place.size:
        raise ValueError(
            f"parallel layout {settings.layout}: expected {settings.layout.world_size} ranks, got {place.size}"
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        install_cpu_adapter()
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=settings.layout.tensor)
    # Every rank draws the same numbers: with dropout 0 only shared decisions may depend on them.
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(settings.seed)
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed)
    return device
