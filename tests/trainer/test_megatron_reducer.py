"""A family of another package with a reducer of its own: every layout takes the step of autograd in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from atoll.families.catalog import make_family
from atoll.families.rows import Batch
from atoll.families.run_settings import RunSettings
from atoll.families.steps import TrainStep, build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.settings import MicroBatchLimit, ParallelLayout
from pydantic import JsonValue

from tests.trainer.megatron_oracle import Oracle, relative_error
from tests.trainer.megatron_support import GRPO_OPTIONS, VOCAB, ModelKind, Pool, make_rows
from tests.trainer.reduced.spec import SHARE

BOUND = 0.02
"""About half of the first tokens reach it."""
LAYOUTS = {
    "one rank": ParallelLayout(),
    "TP2": ParallelLayout(tensor=2),
    "DP2": ParallelLayout(data=2),
    "PP2": ParallelLayout(pipeline=2),
    "CP2": ParallelLayout(context=2),
}


def oracle_loss(oracle: Oracle, step: TrainStep) -> torch.Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for item in step.rows:
        log_probs = oracle.log_probs(item.row)
        losses = -torch.as_tensor(item.advantages, dtype=torch.float64) * torch.exp(log_probs - log_probs.detach())
        shares = (losses * torch.as_tensor(item.columns[SHARE])).clamp(-BOUND, BOUND)
        loss = loss + (shares * torch.as_tensor(item.mask, dtype=torch.float64)).sum()
    return loss


@pytest.mark.parametrize(("layout", "rows_at_once"), [("one rank", 16), ("TP2", 4), ("DP2", 1), ("PP2", 3), ("CP2", 1)])
def test_a_custom_reducer_gives_the_same_step_on_every_layout(
    layout: str, rows_at_once: int, megatron_pool: Pool, tiny_model: Callable[[ModelKind], Path]
) -> None:
    options: dict[str, JsonValue] = {**GRPO_OPTIONS, "bound": BOUND, "loss_aggregation": "token_mean"}
    binding = FamilyBinding("tests.trainer.reduced.spec:ReducedFamily", options, RunSettings(VOCAB, 64))
    family = make_family(binding.reference, options)
    batch = Batch("job-test", 1, make_rows())
    steps = build_train_steps(family, batch, family.prepare(batch, {}))
    model = tiny_model(ModelKind("qwen3", tied=True))
    oracle = Oracle(model)
    expected = oracle_loss(oracle, steps[0])
    norm, gradients = oracle.step(expected, 1e-3)
    backend = megatron_pool.of(LAYOUTS[layout], MicroBatchLimit(rows=rows_at_once))
    backend.load(model, None, None)

    (metrics,) = backend.train(binding, steps, [1e-3]).metrics

    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    found = megatron_pool.probe_of(LAYOUTS[layout], "gradients")
    assert max(relative_error(found[name], wanted) for name, wanted in gradients.items()) < 1e-5
