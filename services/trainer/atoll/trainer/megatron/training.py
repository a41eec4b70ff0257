"""The optimizer steps of one job on one rank: log-probs the loss compares with, then forward, backward, step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from atoll.families.losses.policy_loss import LossResult
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Row
from atoll.families.steps import TrainRow
from atoll.trainer.megatron.forward import ResponseModel
from atoll.trainer.megatron.objective import Objective, response_log_probs
from atoll.trainer.megatron.optimizer import StepOptimizer
from atoll.trainer.megatron.packing import PackedTokens, pack
from atoll.trainer.megatron.refusals import NotFinite
from megatron.core import parallel_state
from torch import Tensor

MicroBatches = Sequence[Sequence[TrainRow]]
"""This rank's share of one optimizer step. An empty micro-batch keeps it in step with ranks that have more."""


@dataclass
class PhaseClock:
    """Wall seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def pack_rows(rows: Sequence[Row], device: torch.device) -> PackedTokens:
    """Pack a micro-batch; an empty one becomes a single token that predicts nothing."""
    if not rows:
        return pack([(torch.zeros(1, dtype=torch.int32).numpy(), 1)], device)
    return pack([(row.tokens, row.prompt_length) for row in rows], device)


def forward_log_probs(
    responses: ResponseModel, micro_batches: Sequence[Sequence[Row]], shard: VocabShard, device: torch.device
) -> list[list[Tensor]]:
    """float32 [R] of every row of every micro-batch, without gradients. A collective over this copy of the model."""
    packs = [pack_rows(rows, device) for rows in micro_batches]

    def of_logits(number: int, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_probs = response_log_probs(micro_batches[number], logits, shard)
        return logits.new_zeros(()), {"log_probs": log_probs}

    kept = responses.run(packs, of_logits, backward=False)
    return [
        list(torch.split(each["log_probs"], [row.response_length for row in rows])) if rows else []
        for each, rows in zip(kept, micro_batches, strict=True)
    ]


@dataclass(frozen=True)
class StepInputs:
    """One optimizer step on this rank, with the log-probs the loss compares with, by micro-batch and row."""

    micro_batches: MicroBatches
    old_log_probs: Sequence[Sequence[Tensor]] | None
    ref_log_probs: Sequence[Sequence[Tensor]] | None
    learning_rate: float


def take_step(
    responses: ResponseModel,
    optimizer: StepOptimizer,
    objective: Objective,
    step: StepInputs,
    steps_taken: int,
    clock: PhaseClock,
    device: torch.device,
) -> dict[str, float]:
    """One optimizer step; returns its metrics, the same on every rank. A collective over all ranks.

    Raises `NotFinite` on every rank, before the optimizer ran.
    """
    results: list[LossResult] = []
    with clock.phase("forward_backward"):
        packs = [pack_rows([item.row for item in rows], device) for rows in step.micro_batches]

        def of_logits(number: int, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            old = None if step.old_log_probs is None else step.old_log_probs[number]
            ref = None if step.ref_log_probs is None else step.ref_log_probs[number]
            results.append(objective.loss(step.micro_batches[number], logits, old, ref))
            return results[-1].loss, results[-1].metrics

        optimizer.zero_gradients()
        responses.run(packs, of_logits, backward=True)
    with clock.phase("optimizer"):
        _refuse_unless_finite(step.micro_batches, results, optimizer, steps_taken, device)
        metrics = _add_up([result.metrics for result in results], device)
        metrics["grad_norm"] = optimizer.step(step.learning_rate)
        metrics["learning_rate"] = step.learning_rate
    if "pg_clipfrac" in metrics:
        metrics["all_clipped"] = float(metrics["grad_norm"] == 0 and metrics["pg_clipfrac"] > 0)
    return metrics


def _refuse_unless_finite(
    micro_batches: MicroBatches,
    results: Sequence[LossResult],
    optimizer: StepOptimizer,
    steps_taken: int,
    device: torch.device,
) -> None:
    bad = [
        item.row.sample_id
        for rows, result in zip(micro_batches, results, strict=True)
        for item, is_bad in zip(rows, result.bad_rows.tolist(), strict=True)
        if is_bad
    ]
    local = bool(bad) or not optimizer.gradients_finite()
    flag = torch.tensor([float(local)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if not flag.item():
        return
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, bad)
    optimizer.zero_gradients()
    raise NotFinite(tuple(dict.fromkeys(sample for samples in gathered for sample in samples)), steps_taken)


def _add_up(metrics: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Sums over micro-batches and over the copies of the model; a tensor-parallel copy holds one value, not a part."""
    names = sorted(metrics[0])
    sums = torch.tensor([sum(float(each[name]) for each in metrics) for name in names], dtype=torch.float64)
    sums = sums.to(device)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return dict(zip(names, sums.tolist(), strict=True))
