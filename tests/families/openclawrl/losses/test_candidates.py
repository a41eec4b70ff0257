"""Candidates are scored by the base that was kept, with the row's own response; ids and log-probs by plain floats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from atoll.families.catalog import AnyFamily
from atoll.families.losses.actor import RolloutData, RowReader
from atoll.families.openclawrl import OpenClawRlFamily
from atoll.families.openclawrl.losses.candidates import candidate_rows
from atoll.families.openclawrl.objective import FROZEN_BASE, openclawrl_actor_init, openclawrl_actor_pre_train
from atoll.families.openclawrl.spec import (
    HINT_LENGTHS,
    HINT_OVERLAP,
    HINT_TOKENS,
    SAMPLER_IDS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    HintSelection,
    Subset,
)
from atoll.families.run_settings import RunSettings
from atoll.families.samples import RowContext
from atoll.families.steps import TrainRow, build_train_steps
from pydantic import JsonValue
from torch import Tensor

from tests.fakes.tiny_actor import PADDING, TinyActor, TinyModel
from tests.families import oracle
from tests.families.reported import reported
from tests.families.rows import make_batch

V = 12
RUN = RunSettings(vocab_size=V, seq_length=16)
HINTS: list[JsonValue] = [[9, 10, 11], [7]]


def family_of(**options: JsonValue) -> AnyFamily:
    return cast(AnyFamily, OpenClawRlFamily.from_options({"top_k": 3, **options}).bind(RUN))


class EarlyStage(TinyActor):
    """A rank of a pipeline stage before the last."""

    def forward_rows(self, weights: str, rows: Sequence[TrainRow], read: RowReader) -> Sequence[Mapping[str, Tensor]]:
        return [{} for _ in rows]


def taught(family: AnyFamily, hints: list[JsonValue], kind: type[TinyActor] = TinyActor) -> tuple[TinyActor, TrainRow]:
    """Init, some training of the actor, then the pre-train hook of one row."""
    item = reported("a", top_k=3, metadata={"hint_candidates": hints})
    batch = make_batch(family.shape_sample_row(item, RowContext((item,))))
    (step,) = build_train_steps(family, batch, family.prepare(batch, {}))
    actor = kind(family, RUN, TinyModel(V))
    openclawrl_actor_init(actor)
    with torch.no_grad():
        actor.model.output.add_(0.3 * torch.randn(8, V + PADDING, generator=torch.Generator().manual_seed(1)))
    openclawrl_actor_init(actor)  # a restart: the base is there already
    data = RolloutData(step.rows)
    openclawrl_actor_pre_train(actor, data)
    return actor, data.rows[0]


def plain_log_probs(row: TrainRow) -> list[list[float]]:
    """log p [R][V] of the base for a candidate, in plain floats from its logits."""
    logits = TinyModel(V)(row.row)[:, :V].double().tolist()
    return [[oracle.log_prob(each, v, row.row.temperature) for v in range(V)] for each in logits]


def test_a_candidate_is_its_prompt_and_the_rows_own_response() -> None:
    _, row = taught(family_of(), HINTS)
    rows = candidate_rows(row)
    assert [each.row.tokens.tolist() for each in rows] == [[9, 10, 11, 3, 4, 5], [7, 3, 4, 5]]
    assert [each.row.prompt_length for each in rows] == [3, 1]
    assert len({each.row.sample_id for each in rows}) == 2


def test_without_candidates_the_plain_sequence_is_the_only_one() -> None:
    actor, row = taught(family_of(), [])
    assert actor.calls == [f"keep {FROZEN_BASE}", f"forward {FROZEN_BASE}"]
    levels = plain_log_probs(row)
    ids = row.columns[SAMPLER_IDS].tolist()
    expected = [[levels[t][v] for v in ids[t]] for t in range(3)]
    assert row.columns[TEACHER_LOG_PROBS].tolist() == [pytest.approx(each, rel=1e-5) for each in expected]


@pytest.mark.parametrize("subset", Subset)
@pytest.mark.parametrize("selection", HintSelection)
def test_the_lesson_equals_one_made_with_plain_floats(selection: HintSelection, subset: Subset) -> None:
    _, row = taught(family_of(hint_selection=selection.value, subset=subset.value), HINTS)
    candidates = candidate_rows(row)
    levels = [plain_log_probs(each) for each in candidates]
    native = [[sorted(range(V), key=lambda v: (-of[t][v], v))[:3] for t in range(3)] for of in levels]
    sampler = row.columns[SAMPLER_IDS].tolist()
    overlaps = [[len(set(native[c][t]) & set(sampler[t])) for t in range(3)] for c in range(2)]
    if selection is HintSelection.SHORTEST:
        choice = [1, 1, 1]
    elif selection is HintSelection.SEQUENCE_OPTIMAL:
        choice = [int(sum(overlaps[1]) > sum(overlaps[0]))] * 3
    else:
        choice = [int(overlaps[1][t] > overlaps[0][t]) for t in range(3)]
    for t in range(3):
        best = native[choice[t]][t]
        ids = {
            Subset.STUDENT: sampler[t],
            Subset.OVERLAP: [v if v in best else -1 for v in sampler[t]],
            Subset.TEACHER: best,
        }[subset]
        assert row.columns[TEACHER_IDS][t].tolist() == ids
        expected = [0.0 if v < 0 else levels[choice[t]][t][v] for v in ids]
        assert row.columns[TEACHER_LOG_PROBS][t].tolist() == pytest.approx(expected, rel=1e-5)
        assert row.columns[HINT_OVERLAP][t] == pytest.approx(overlaps[choice[t]][t] / 3)


def test_the_base_stays_what_it_was_when_the_family_began() -> None:
    actor, _ = taught(family_of(), HINTS)
    assert actor.calls == [f"keep {FROZEN_BASE}", f"forward {FROZEN_BASE}"]
    assert torch.equal(actor.kept[FROZEN_BASE]["output"], TinyModel(V).output)
    assert not torch.equal(actor.model.output, TinyModel(V).output)


def test_a_rank_without_rows_still_takes_part() -> None:
    actor = TinyActor(family_of(), RUN, TinyModel(V))
    openclawrl_actor_init(actor)
    data = RolloutData([])
    openclawrl_actor_pre_train(actor, data)
    assert actor.calls == [f"keep {FROZEN_BASE}", f"forward {FROZEN_BASE}"]
    assert list(data.rows) == []


def test_a_rank_that_computes_no_loss_leaves_its_rows_as_they_are() -> None:
    _, row = taught(family_of(), HINTS, EarlyStage)
    assert TEACHER_IDS not in row.columns


def test_the_lesson_is_learned() -> None:
    family = family_of(w_rl=0.0, subset="teacher", adv_diff_clip=0.0)
    actor, row = taught(family, HINTS)
    gaps = [abs(actor.step([row], 0.05)["opd_gap"]) for _ in range(60)]
    assert gaps[-1] < gaps[0] / 2


def test_the_columns_of_candidates_are_ragged_and_may_be_none() -> None:
    _, row = taught(family_of(), [])
    plain = replace(
        row,
        columns={
            **row.columns,
            HINT_TOKENS: np.asarray([1, 2, 3, 4], dtype=np.int32),
            HINT_LENGTHS: np.asarray([1, 3], dtype=np.int32),
        },
    )
    assert [each.row.tokens[: each.row.prompt_length].tolist() for each in candidate_rows(plain)] == [[1], [2, 3, 4]]
