"""One optimizer step on one rank: forward, backward, refusal of what is not finite, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from atoll.families.losses.policy_loss import LossResult
from atoll.families.steps import TrainRow
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.optimizer import StepOptimizer
from atoll.trainer.megatron.passes import Places
from atoll.trainer.megatron.rank_model import RankModel
from atoll.trainer.megatron.refusals import NotFinite
from megatron.core import parallel_state
from torch import Tensor

MicroBatches = Sequence[Sequence[TrainRow]]
"""This rank's share of one optimizer step. An empty micro-batch keeps it in step with ranks that have more."""
LossOfOutput = Callable[[int, Places, Tensor], LossResult]
"""(micro-batch number, places of its rows, output [n, columns]) -> this rank's part of the step's loss"""


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


@dataclass(frozen=True)
class StepAt:
    """Which step of the job it is and how far it goes. Example: ``StepAt(number=0, learning_rate=1e-6)``"""

    number: int
    """Steps of this model that the job has taken before."""
    learning_rate: float


def take_step(
    model: RankModel,
    micro_batches: MicroBatches,
    loss_of: LossOfOutput,
    at: StepAt,
    member: Membership,
    clock: PhaseClock,
) -> dict[str, float]:
    """One optimizer step; returns its metrics, the same on every rank. A collective over all ranks.

    Raises `NotFinite` on every rank, before the optimizer ran.
    """
    results: list[LossResult] = []
    with clock.phase("forward_backward"):
        packs = [member.pack([item.row for item in rows]) for rows in micro_batches]

        def of_output(number: int, output: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            results.append(loss_of(number, packs[number].response_positions, output))
            return results[-1].loss, results[-1].metrics

        model.optimizer.zero_gradients()
        model.responses.run(packs, of_output, backward=True)
    with clock.phase("optimizer"):
        _refuse_unless_finite(micro_batches, results, model.optimizer, at.number, member)
        metrics = _add_up([result.metrics for result in results], member)
        metrics["grad_norm"] = model.optimizer.step(at.learning_rate)
        metrics["learning_rate"] = at.learning_rate
    if "pg_clipfrac" in metrics:
        metrics["all_clipped"] = float(metrics["grad_norm"] == 0 and metrics["pg_clipfrac"] > 0)
    return metrics


def _refuse_unless_finite(
    micro_batches: MicroBatches,
    results: Sequence[LossResult],
    optimizer: StepOptimizer,
    steps_taken: int,
    member: Membership,
) -> None:
    # No results on a pipeline stage before the last: its refusal comes from the gradients or from the others.
    bad = [
        item.row.sample_id
        for rows, result in zip(micro_batches, results, strict=False)
        for item, is_bad in zip(rows, result.bad_rows.tolist(), strict=True)
        if is_bad
    ]
    local = bool(bad) or not optimizer.gradients_finite()
    flag = torch.tensor([float(local)], device=member.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if not flag.item():
        return
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, bad)
    optimizer.zero_gradients()
    raise NotFinite(tuple(dict.fromkeys(sample for samples in gathered for sample in samples)), steps_taken)


def _add_up(metrics: Sequence[Mapping[str, Tensor]], member: Membership) -> dict[str, float]:
    """Sums over micro-batches and over ranks with other rows or other tokens; tensor-parallel ranks hold one value, not
    a part, and stages before the last are told."""
    found: dict[str, float] = {}
    if member.is_last_stage:
        names = sorted(metrics[0])
        sums = torch.tensor([sum(float(each[name]) for each in metrics) for name in names], dtype=torch.float64)
        sums = sums.to(member.device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        found = dict(zip(names, sums.tolist(), strict=True))
    told = member.from_last_stage(found)
    if not isinstance(told, dict):
        raise TypeError(f"metrics of the last stage: expected a dict, got {type(told).__name__}")
    return told
