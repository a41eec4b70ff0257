"""Steps with what breaks others: rollouts of several rows on different ranks, empty masks, an end token that is the pad
id, and every aggregation, all against the formulas in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from atoll.families.rows import Row
from atoll.families.steps import TrainStep
from atoll.trainer.megatron.row_plan import plan_rows
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout

from tests.trainer.megatron_oracle import Oracle, relative_error
from tests.trainer.megatron_support import ModelKind, Pool, grpo_binding, grpo_steps, make_rows

LAYOUTS = {
    "TP2": ParallelLayout(tensor=2),
    "DP2": ParallelLayout(data=2),
    "PP2": ParallelLayout(pipeline=2),
    "CP2": ParallelLayout(context=2),
}
PAD = 0
"""What a row is filled up with under context parallelism."""
ROWS_OF_ROLLOUTS = (2, 1, 3, 2, 1, 2, 3, 2)
DIVISOR = 24.0


def trajectories() -> tuple[Row, ...]:
    """16 rows of 8 rollouts of 2 groups: every row ends with a token of the pad id, which is trained; rollout 1 has no
    trained token, and neither have single rows of others."""
    rows = iter(make_rows())
    made = []
    for number, count in enumerate(ROWS_OF_ROLLOUTS):
        for part in range(count):
            row = next(rows)
            tokens, mask = row.tokens.copy(), row.loss_mask.copy()
            tokens[-1] = PAD
            if len(tokens) > 4:
                tokens[1] = PAD
            if number == 1 or (number == 5 and part == 0):
                mask[:] = 0
            made.append(
                replace(
                    row,
                    tokens=tokens,
                    loss_mask=mask,
                    rollout_id=f"rollout-{number}",
                    group_id=f"group-{number // 4}",
                    reward=float(np.sin(number)),
                )
            )
    return tuple(made)


def loss_by_formula(oracle: Oracle, step: TrainStep, mode: str) -> torch.Tensor:
    """Read rollout by rollout from the table of the aggregations; on policy a token's loss is -A r with r = 1."""
    sums: dict[str, torch.Tensor] = {}
    tokens: dict[str, int] = {}
    group_of: dict[str, str] = {}
    for item in step.rows:
        now = oracle.log_probs(item.row)
        losses = -torch.as_tensor(item.advantages, dtype=torch.float64) * torch.exp(now - now.detach())
        mask = torch.as_tensor(item.row.loss_mask, dtype=torch.float64)
        rollout = item.row.rollout_id
        sums[rollout] = sums.get(rollout, torch.zeros((), dtype=torch.float64)) + (losses * mask).sum()
        tokens[rollout] = tokens.get(rollout, 0) + int(item.row.loss_mask.sum())
        group_of[rollout] = item.row.group_id

    def mean_of(names: Sequence[str]) -> torch.Tensor:
        return sum((sums[name] for name in names), torch.zeros(())) / max(1, sum(tokens[name] for name in names))

    match mode:
        case "sample_mean":
            return sum((mean_of([name]) for name in sums), torch.zeros(())) / len(sums)
        case "token_mean":
            return mean_of(list(sums))
        case "prompt_mean":
            groups = sorted(set(group_of.values()))
            means = [mean_of([name for name in sums if group_of[name] == group]) for group in groups]
            return sum(means, torch.zeros(())) / len(groups)
        case _:
            return sum(sums.values(), torch.zeros(())) / (DIVISOR * len(sums))


@pytest.mark.parametrize(
    ("layout", "mode", "rows_at_once"),
    [
        ("DP2", "sample_mean", 1),
        ("DP2", "prompt_mean", 4),
        ("CP2", "token_mean", 1),
        ("CP2", "sample_mean", 4),
        ("TP2", "constant", 1),
        ("PP2", "prompt_mean", 1),
    ],
)
def test_trajectories_are_one_rollout_wherever_their_rows_are(
    layout: str, mode: str, rows_at_once: int, megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path]
) -> None:
    constant = {"loss_aggregation_divisor": DIVISOR} if mode == "constant" else {}
    binding = grpo_binding(groups_per_step=2, loss_aggregation=mode, **constant)
    rows = trajectories()
    (step,) = grpo_steps(rows, binding)
    limit = MicroBatchLimit(rows=rows_at_once)
    shares = [{i for cut in share for i in cut} for share in plan_rows([len(row.tokens) for row in rows], 2, limit)]
    split = {row.rollout_id for i, row in enumerate(rows) if i in shares[0]} & {
        row.rollout_id for i, row in enumerate(rows) if i in shares[1]
    }
    assert len(split) > 2, "rollouts should be split over the two ranks of DP2"
    model = tiny_model(ModelKind("qwen3", tied=True))
    oracle = Oracle(model)
    expected = loss_by_formula(oracle, step, mode)
    norm, gradients = oracle.step(expected, 1e-3)
    backend = megatron_pool.of(LAYOUTS[layout], limit)
    backend.load(model, None, None)

    (metrics,) = backend.train(binding, [step], [1e-3]).metrics

    assert abs(expected.item()) > 1e-3
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["trained_tokens"] == sum(int(row.loss_mask.sum()) for row in rows)
    found = megatron_pool.probe_of(LAYOUTS[layout], "gradients")
    assert max(relative_error(found[name], wanted) for name, wanted in gradients.items()) < 1e-5


@pytest.mark.parametrize("layout", ["CP2", "DP2"])
def test_a_step_without_a_trained_token_has_loss_and_gradient_zero(
    layout: str, megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path]
) -> None:
    binding = grpo_binding(groups_per_step=2)
    rows = tuple(replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in trajectories())
    backend = megatron_pool.of(LAYOUTS[layout])
    backend.load(tiny_model(ModelKind("qwen3", tied=True)), None, None)
    (metrics,) = backend.train(binding, grpo_steps(rows, binding), [1e-3]).metrics
    assert (metrics["loss"], metrics["grad_norm"], metrics["trained_tokens"]) == (0.0, 0.0, 0.0)
