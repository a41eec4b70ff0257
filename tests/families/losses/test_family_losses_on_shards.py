"""Every family's loss with its vocabulary split over two ranks: the same as on one."""

from dataclasses import replace

import pytest
import torch
from atoll.families.losses.vocab import VocabShard

from tests.families.every_family import NAMES, step_of
from tests.families.family_steps import TOKENS, Answer, V
from tests.families.ranks import on_shards


def all_answers(shard: VocabShard) -> dict[str, Answer]:
    """Runs on each rank."""
    return {name: step_of(name).answer(None, shard if shard.size > 1 else None) for name in NAMES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Answer]]:
    return on_shards(2, V, all_answers)


@pytest.mark.parametrize("name", NAMES)
def test_two_shards_give_the_loss_and_the_gradient_of_one(ranks: list[dict[str, Answer]], name: str) -> None:
    one = step_of(name).answer()
    gradient = torch.cat([rank[name].gradient for rank in ranks], 1)
    assert bool((gradient[:, V:] == 0).all())
    for rank in ranks:
        assert rank[name].metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-7)
        assert rank[name].loss == pytest.approx(one.loss, rel=1e-5)
    assert float((gradient[:, :V] - one.gradient).abs().max()) <= 1e-5 * float(one.gradient.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_step_and_one_without_rows_adds_nothing(name: str) -> None:
    of = step_of(name)
    whole = of.answer()
    parts = [of.answer(rows) for rows in ([2], [], [0, 1])]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-9)
    torch.testing.assert_close(sum(part.gradient for part in parts), whole.gradient, rtol=1e-5, atol=1e-8)
    for key, value in whole.metrics.items():
        assert sum(part.metrics[key] for part in parts) == pytest.approx(value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_whose_mask_is_empty_adds_no_gradient(name: str) -> None:
    of = step_of(name)
    emptied = replace(
        of,
        rows=tuple(
            replace(item, mask=item.mask * 0, advantages=None if item.advantages is None else item.advantages * 0)
            for item in of.rows
        ),
    )
    got = emptied.answer()
    assert got.loss == 0
    assert bool((got.gradient == 0).all())
    assert len(of.logit_rows) == TOKENS
