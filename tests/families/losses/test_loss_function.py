"""What a worker calls: every way a loss is made, and the same step whatever its cut."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from atoll.families.aggregation import AggregationMode
from atoll.families.catalog import AnyFamily, make_family
from atoll.families.family import HookChannel
from atoll.families.losses.actor import RolloutData
from atoll.families.losses.batch import LossBatch, build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.vocab import VocabShard
from atoll.families.run_settings import RunSettings
from atoll.families.steps import TrainRow, TrainStep, build_train_steps
from torch import Tensor

from tests.families.external import SPEC, external_package
from tests.families.rows import make_batch, make_row

V = 12
RUN = RunSettings(vocab_size=V, seq_length=32)
LENGTHS = (5, 1, 3, 2, 4)
BATCH = make_batch(
    make_row("a1", rollout="a", group="g", length=5, mask=[1, 0, 1, 1, 1], reward=1.0),
    make_row("a2", rollout="a", group="g", length=1, reward=1.0),
    make_row("b", group="g", length=3, reward=0.2),
    make_row("c", group="h", length=2, mask=[0, 0], reward=0.4),
    make_row("d", group="h", length=4, reward=0.9),
)


def logits_of_step() -> list[Tensor]:
    """Per row, leaves [R, V_padded]."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(length, 16, generator=generator).requires_grad_() for length in LENGTHS]


Piece = tuple[int, npt.NDArray[np.int64]]
"""A row and the response positions of it that lie in a micro-batch."""


def run_cut(family: AnyFamily, step: TrainStep, cut: Sequence[Sequence[Piece]]) -> tuple[float, Tensor]:
    """Adds up the loss and the gradient of all rows over micro-batches (or context-parallel shares)."""
    function = LossFunction(family, RUN)
    logits = logits_of_step()
    references = [torch.linspace(-3, -1, length) for length in LENGTHS]
    loss = 0.0
    for pieces in cut:
        batch = build_loss_batch(
            [step.rows[row] for row, _ in pieces],
            shard=VocabShard(V),
            positions=[positions for _, positions in pieces],
            old_log_probs=[torch.linspace(-2, -3, LENGTHS[row])[positions] for row, positions in pieces],
            ref_log_probs=[references[row][positions] for row, positions in pieces],
        )
        result = function(batch, torch.cat([logits[row][positions] for row, positions in pieces]))
        torch.autograd.backward(result.loss)
        loss += result.loss.item()
    return loss, torch.cat([torch.zeros_like(each) if each.grad is None else each.grad for each in logits])


def rows_cut(*groups: Sequence[int]) -> list[list[Piece]]:
    return [[(row, np.arange(LENGTHS[row])) for row in group] for group in groups]


def zigzag(length: int, half: int) -> npt.NDArray[np.int64]:
    """Positions of a context-parallel rank of two: quarters 0 and 3, or 1 and 2. May be none."""
    quarters = np.arange(length, dtype=np.int64) * 4 // length
    return np.flatnonzero((quarters % 3 == 0) == (half == 0))


CUTS = {
    "one row each": rows_cut([0], [1], [2], [3], [4]),
    "unequal": rows_cut([4, 0], [3], [1, 2]),
    "context-parallel zigzag of two": [[(row, zigzag(n, half)) for row, n in enumerate(LENGTHS)] for half in (0, 1)],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", AggregationMode)
def test_every_cut_of_a_step_gives_the_same_loss_and_gradient(mode: AggregationMode, cut: str) -> None:
    family = make_family(
        "grpo",
        {
            "n_samples_per_prompt": 2,
            "groups_per_step": 2,
            "loss_aggregation": mode.value,
            "loss_aggregation_divisor": 8 if mode is AggregationMode.CONSTANT else None,
            "kl_loss_coef": 0.1,
            "entropy_coef": 0.05,
            "eps_clip_c": 1.5,
        },
    )
    (step,) = build_train_steps(family, BATCH, family.prepare(BATCH, {}))
    assert sum(len(positions) for pieces in CUTS[cut] for _, positions in pieces) == sum(LENGTHS)
    whole_loss, whole_gradient = run_cut(family, step, rows_cut(range(5)))
    loss, gradient = run_cut(family, step, CUTS[cut])
    assert abs(whole_loss) > 1e-3
    assert loss == pytest.approx(whole_loss, rel=1e-9)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-9)


RATIO = torch.tensor([0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 0.1])
"""Both bounds of the masked family below are among them."""
ADVANTAGES = [1.0, -1.0, 2.0, -2.0, 1.0, 1.0, -1.0]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyFamily]:
    """A family of another package on the pg-primitive lane, whose bounds are the float32 ratios of tokens 0 and 4."""
    with external_package(Path(tmp_path_factory.mktemp("masked")), "masked") as reference:
        lower, upper = ratios_as_computed()[[0, 4]].tolist()
        yield make_family(reference, {"lower": lower, "upper": upper})


def masked_batch() -> tuple[LossBatch, Tensor]:
    """Seven tokens with exactly the ratios above, and their logits."""
    row = make_row("s", length=7, reward=1.0)
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(2))
    log_probs = torch.log_softmax(logits[:, :V] / row.temperature, -1)
    level = log_probs.gather(1, torch.as_tensor(row.response_tokens, dtype=torch.int64)[:, None])[:, 0]
    (step,) = build_train_steps(
        make_family("grpo", {}), make_batch(row), make_family("grpo", {}).prepare(make_batch(row), {})
    )
    item = replace(
        step.rows[0],
        row=replace(row, rollout_log_probs=(level - RATIO.log()).numpy()),
        advantages=np.asarray(ADVANTAGES, dtype=np.float32),
    )
    return build_loss_batch([item], shard=VocabShard(V)), logits.requires_grad_()


def ratios_as_computed() -> Tensor:
    """exp(l - lq) in float32 exactly as the loss computes it, so that a bound can be met to the last bit."""
    from atoll.families.losses.vocab import log_probs_at_ids

    batch, logits = masked_batch()
    log_probs = log_probs_at_ids(logits.detach(), batch.tokens, batch.temperatures, batch.shard)
    return (-(batch.rollout_log_probs - log_probs)).exp()


def masked_oracle(mutant: str = "") -> tuple[float, list[float]]:
    """sum_t w (-f(r) A l) and d/dl, in plain floats; mutants: the mistakes that one makes with a strict mask."""
    batch, logits = masked_batch()
    lower, upper = ratios_as_computed()[[0, 4]].tolist()
    loss, slopes = 0.0, []
    rows = torch.log_softmax(logits.detach()[:, :V].double() / 0.7, -1)
    for t, ratio in enumerate(ratios_as_computed().tolist()):
        keep = lower < ratio < upper
        if mutant == "inclusive bounds":
            keep = lower <= ratio <= upper
        if mutant == "upper bound left out":
            keep = lower < ratio
        factor = ratio if keep else 0.0
        if mutant == "clamp in place of mask":
            factor = min(max(ratio, lower), upper)
        weight = batch.policy_weights[t].item() * (1 / 7 if mutant == "mean in place of sum" else 1)
        slopes.append(-weight * factor * ADVANTAGES[t])
        loss += slopes[-1] * rows[t, batch.tokens[t]].item()
    return loss, slopes


def differs(family: AnyFamily, mutant: str = "") -> bool:
    """Whether the family's loss or the gradient at the sampled token differs from the oracle by more than 1e-5."""
    batch, logits = masked_batch()
    result = LossFunction(family, RUN)(batch, logits)
    torch.autograd.backward(result.loss)
    assert logits.grad is not None
    loss, slopes = masked_oracle(mutant)
    p = torch.softmax(logits.detach()[:, :V].double() / 0.7, -1)
    for t, slope in enumerate(slopes):
        target = int(batch.tokens[t])
        if not math.isclose(logits.grad[t, target].item(), slope * (1 - p[t, target].item()) / 0.7, rel_tol=1e-5):
            return True
    return not math.isclose(result.loss.item(), loss, rel_tol=1e-5)


def test_an_external_family_trains_its_own_primitive_inside_the_stock_loss(masked: AnyFamily) -> None:
    assert not differs(masked)
    batch, logits = masked_batch()
    result = LossFunction(masked, RUN)(batch, logits)
    assert result.metrics["pg_clipfrac"].item() == pytest.approx(4 / 7)


@pytest.mark.parametrize(
    "mutant", ["inclusive bounds", "upper bound left out", "clamp in place of mask", "mean in place of sum"]
)
def test_the_comparison_finds_every_mutant_of_a_strict_mask(masked: AnyFamily, mutant: str) -> None:
    assert differs(masked, mutant)


CUSTOM_SPEC = (
    SPEC.replace("LossType.POLICY_LOSS", "LossType.CUSTOM_LOSS")
    .replace("uses_pg_loss_primitive: ClassVar[bool] = True", "")
    .replace("HookChannel.PG_LOSS", "HookChannel.LOSS")
)
CUSTOM_OBJECTIVE = '''
from atoll.families.family import HookChannel
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.vocab import log_probs_at_ids


@objective_hook(HookChannel.LOSS)
def NAME_loss(args, batch, logits, reduce):
    """Masked cross-entropy."""
    nll = -log_probs_at_ids(logits, batch.tokens, batch.temperatures, batch.shard)
    return reduce(nll), {"nll": reduce.metric(nll)}
'''


def test_a_custom_loss_sees_batch_and_logits_and_reduces_with_the_step_weights(tmp_path: Path) -> None:
    with external_package(tmp_path, "entropic", spec=CUSTOM_SPEC, objective=CUSTOM_OBJECTIVE) as reference:
        family = make_family(reference, {})
        assert family.required_objective_hooks == {HookChannel.LOSS}
        batch, logits = masked_batch()
        result = LossFunction(family, RUN)(batch, logits)
    rows = torch.log_softmax(logits.detach()[:, :V].double() / 0.7, -1)
    expected = -sum(rows[t, batch.tokens[t]].item() for t in range(7)) / 7
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    assert result.metrics["nll"].item() == pytest.approx(expected, rel=1e-6)
    assert result.metrics["loss"].item() == result.loss.item()
    assert result.bad_rows.tolist() == [False]


def advantages_of(given: list[Tensor] | None) -> list[TrainRow]:
    """What sao's rows become when its hook fills `given`."""
    family = make_family("sao", {"eps_clip_high": 1.0})
    (step,) = build_train_steps(make_family("grpo", {}), BATCH, make_family("grpo", {}).prepare(BATCH, {}))
    function = LossFunction(family, RUN)

    def fill(_args: object, data: RolloutData) -> None:
        data.advantages = given

    function.hooks = replace(function.hooks, advantage=fill)
    return function.advantages(RolloutData(step.rows))


def test_a_hook_that_leaves_rows_unfilled_is_an_error() -> None:
    good = [torch.full((length,), 0.5) for length in LENGTHS]
    filled = advantages_of(good)
    assert [item.advantages.tolist() for item in filled if item.advantages is not None] == [[0.5] * n for n in LENGTHS]
    assert filled[0].values is None
    with pytest.raises(ValueError, match="must fill advantages of 5 rows, got none"):
        advantages_of(None)
    with pytest.raises(ValueError, match="must fill advantages of 5 rows, got those of 4"):
        advantages_of(good[:4])
    with pytest.raises(ValueError, match=r"sample d: advantages must be \[4\], got \(3,\)"):
        advantages_of([*good[:4], torch.zeros(3)])
    with pytest.raises(ValueError, match="grpo has no custom_advantage_function"):
        LossFunction(make_family("grpo", {}), RUN).advantages(RolloutData([]))
