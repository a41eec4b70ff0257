"""The hooks of distillation on a tiny actor: who teaches, what is filled, what is learnt."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from atoll.families.catalog import AnyFamily, make_family
from atoll.families.divergence_spec import TeacherColumn
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.vocab import VocabShard
from atoll.families.rows import Column
from atoll.families.run_settings import RunSettings
from atoll.families.steps import RowWeights, TrainRow
from pydantic import JsonValue
from torch import Tensor

from tests.fakes.tiny_actor import TinyActor, TinyModel
from tests.families.losses.dense import dense_divergence, over_ids
from tests.families.rows import make_row

V = 12
RUN = RunSettings(vocab_size=V, seq_length=32)
PREFIXES = ([9, 8, 7, 1], [1, 2], [11])
LENGTHS = (4, 1, 3)
WEIGHTS = (1.0, 0.5, 2.0)

CASES: dict[str, tuple[str, dict[str, JsonValue]]] = {
    "sdft": ("sdft", {}),
    "sdft, skipping": ("sdft", {"skip_response_tokens": 1, "divergence": "jsd", "teacher_update_rate": 1.0}),
    "sdpo": ("sdpo", {"top_k": 4, "groups_per_step": 1, "rollouts_per_group": 3}),
    "sdpo, reverse tail": ("sdpo", {"top_k": 4, "divergence": "reverse", "top_k_source": "teacher"}),
    "opd": ("opd", {"teacher_checkpoint": "3"}),
    "opd, forward": ("opd", {"teacher_checkpoint": "3", "divergence": "forward", "top_k": 5}),
    "opd, weighted": ("opd", {"teacher_checkpoint": "3", "importance_sampling_cap": 1.1}),
}


def rows_of(family: AnyFamily) -> list[TrainRow]:
    """Rows at temperature 0.7 whose teacher reads another prefix."""
    rows = []
    for number, (prefix, length, weight) in enumerate(zip(PREFIXES, LENGTHS, WEIGHTS, strict=True)):
        row = make_row(f"s{number}", length=length)
        columns: dict[str, Column] = {
            "teacher_tokens": np.asarray([*prefix, *row.response_tokens], dtype=np.int32),
            "sample_weight": np.asarray([weight], dtype=np.float32),
        }
        row = replace(row, rollout_log_probs=np.linspace(-3, -1, length, dtype=np.float32), columns=columns)
        mask = family.effective_mask(row)
        share = 1 / (3 * max(1, int(mask.sum())))
        rows.append(TrainRow(row, mask, RowWeights(share, share, share), None, columns))
    return rows


def actor_of(name: str, values: dict[str, JsonValue]) -> TinyActor:
    return TinyActor(make_family(name, values), RUN, TinyModel(V, seed=1))


def log_probs(model: TinyModel, rows: Sequence[TrainRow], *, taught: bool) -> Tensor:
    """float64 [T, V] of a model, on the students' or the teacher's prefixes."""
    pieces = []
    for item in rows:
        row = item.row
        if taught:
            tokens = item.columns["teacher_tokens"].astype("int32")
            row = replace(row, tokens=tokens, prompt_length=len(tokens) - row.response_length)
        pieces.append(torch.log_softmax(model(row)[:, :V].double() / row.temperature, -1))
    return torch.cat(pieces)


def teacher_of(name: str) -> TinyModel:
    return TinyModel(V, seed=3 if name.startswith("opd") else 1)


def dense_loss(name: str, student: Tensor, rows: Sequence[TrainRow]) -> Tensor:
    """The family's loss from log p of the student [T, V], from the definitions."""
    options = dict(make_family(*CASES[name]).options)
    with torch.no_grad():
        teacher = log_probs(teacher_of(name), rows, taught=True)
    tokens = torch.cat([torch.as_tensor(item.row.response_tokens, dtype=torch.int64) for item in rows])
    own, taught = (each.gather(1, tokens[:, None])[:, 0] for each in (student, teacher))
    kind, beta, k = options["divergence"].value, options["jsd_beta"], options["top_k"]
    if k == 0:
        values = dense_divergence(student, torch.log_softmax(teacher.half().double(), -1), kind, beta)
    elif kind == "reverse" and options["top_k_distribution"].value == "renormalized":
        values = (own - taught).detach() * (1 + own - own.detach())
    else:
        ids = (student if options["top_k_source"].value == "student" else teacher).topk(k).indices
        pair = [over_ids(each, ids, options["top_k_distribution"].value) for each in (student, teacher)]
        values = dense_divergence(pair[0], pair[1], kind, beta)
    recorded = torch.cat([torch.as_tensor(item.row.rollout_log_probs) for item in rows]).double()
    starts = [0, *np.cumsum([item.row.response_length for item in rows]).tolist()]
    masks = [torch.as_tensor(item.mask).double() for item in rows]
    cap = options["importance_sampling_cap"]
    weights = (own.detach() - recorded).exp().clamp(max=cap) if cap else torch.ones_like(own)
    total = torch.zeros((), dtype=torch.float64)
    for (start, end), mask, factor in zip(pairwise(starts), masks, WEIGHTS, strict=True):
        value, weight = values[start:end], weights[start:end]
        count = mask.sum().clamp(min=1)
        if cap and options["importance_sampling_level"].value == "sequence":
            weight = (weight * mask).sum() / count
        total = total + factor * (weight * value * mask).sum() / count / 3
    return total


@pytest.mark.parametrize("name", CASES)
def test_the_family_from_its_hooks_to_its_gradient_equals_the_definition(name: str) -> None:
    actor = actor_of(*CASES[name])
    rows = actor.prepared(rows_of(actor.family))
    logits = torch.cat([actor.model(item.row) for item in rows]).detach().requires_grad_()
    batch = build_loss_batch(rows, shard=VocabShard(V), columns=actor.family.run_columns(RUN))
    result = LossFunction(actor.family, RUN)(batch, logits)
    torch.autograd.backward(result.loss)
    dense = logits.detach().double().requires_grad_()
    want = dense_loss(name, torch.log_softmax(dense[:, :V] / 0.7, -1), rows)
    torch.autograd.backward(want)
    assert logits.grad is not None
    assert dense.grad is not None
    # A tail is 1 - (mass of the head): the tails of this model go down to 1e-3, which float32 holds to 1e-4.
    tolerance = 1e-4 if name == "sdpo, reverse tail" else 1e-5
    assert result.loss.item() == pytest.approx(want.item(), rel=tolerance)
    scale = float(dense.grad.abs().max())
    assert float((logits.grad.double() - dense.grad).abs().max()) <= tolerance * scale


def test_a_moving_teacher_starts_as_the_actor_and_follows_every_step_in_float32() -> None:
    actor = actor_of("sdft", {"teacher_update_rate": 0.25})
    first = {key: value.clone() for key, value in actor.model.state_dict().items()}
    actor.step(rows_of(actor.family), rate=0.5)
    assert actor.calls == ["keep distill_teacher", "forward distill_teacher"]
    expected = {key: first[key] + 0.25 * (value - first[key]) for key, value in actor.model.state_dict().items()}
    for key, value in actor.kept["distill_teacher"].items():
        assert torch.equal(value, expected[key])
        assert not torch.equal(value, first[key])
    actor.step(rows_of(actor.family), rate=0.5)
    assert actor.calls.count("keep distill_teacher") == 1


def test_a_frozen_teacher_stays_and_a_current_one_is_never_kept() -> None:
    frozen = actor_of("sdft", {"teacher_update_rate": 0.0})
    first = {key: value.clone() for key, value in frozen.model.state_dict().items()}
    for _ in range(2):
        frozen.step(rows_of(frozen.family), rate=0.5)
    assert all(torch.equal(value, first[key]) for key, value in frozen.kept["distill_teacher"].items())
    current = actor_of("sdft", {"teacher_update_rate": 1.0})
    current.step(rows_of(current.family), rate=0.5)
    assert current.calls == ["forward actor"]
    assert current.kept == {}
    assert current.average is None


def test_a_teacher_that_a_checkpoint_brought_back_is_not_replaced() -> None:
    actor = actor_of("sdft", {})
    other = {key: value.clone() for key, value in TinyModel(V, seed=9).state_dict().items()}
    actor.kept["distill_teacher"] = other
    (row, *_) = actor.prepared(rows_of(actor.family))
    want = log_probs(TinyModel(V, seed=9), [row], taught=True)
    got = torch.as_tensor(row.columns[TeacherColumn.ROWS])[:, :V].double()
    torch.testing.assert_close(got, want, rtol=2.0**-10, atol=1e-4)


def test_a_separate_teacher_is_read_from_its_checkpoint_and_left_alone() -> None:
    actor = actor_of("opd", {"teacher_checkpoint": "3"})
    actor.step(rows_of(actor.family), rate=0.5)
    assert actor.calls == ["keep distill_checkpoint from 3", "forward distill_checkpoint"]


def test_a_self_teacher_does_not_take_a_checkpoint_that_another_family_left_for_its_own() -> None:
    actor = actor_of("sdft", {})
    actor.keep_checkpoint_weights("distill_checkpoint", "3")
    actor.step(rows_of(actor.family), rate=0.5)
    assert actor.calls[1:] == ["keep distill_teacher", "forward distill_teacher"]


def test_an_engine_teacher_needs_no_forward() -> None:
    actor = actor_of("opd", {})
    rows = rows_of(actor.family)
    assert actor.prepared(rows) is rows
    assert actor.calls == []


def test_the_student_selects_ids_on_its_own_prefix_before_the_teacher_speaks_about_them() -> None:
    actor = actor_of("sdpo", {"top_k": 4})
    rows = actor.prepared(rows_of(actor.family))
    assert actor.calls == ["forward actor", "keep distill_teacher", "forward distill_teacher"] or actor.calls == [
        "keep distill_teacher",
        "forward actor",
        "forward distill_teacher",
    ]
    ids = torch.cat([torch.as_tensor(item.columns[TeacherColumn.TOP_K_IDS]) for item in rows]).long()
    with torch.no_grad():
        assert torch.equal(ids, log_probs(actor.model, rows, taught=False).topk(4).indices)
        want = log_probs(actor.model, rows, taught=True).gather(1, ids)
    got = torch.cat([torch.as_tensor(item.columns[TeacherColumn.TOP_K_LOG_PROBS]) for item in rows])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_no_rows_are_prepared_to_no_rows() -> None:
    actor = actor_of("sdpo", {"top_k": 4})
    assert list(actor.prepared([])) == []


@pytest.mark.parametrize("name", ["sdft", "sdpo", "opd, forward"])
def test_the_divergence_to_the_teacher_falls_over_20_steps(name: str) -> None:
    family, values = CASES[name]
    actor = actor_of(family, {**values, "teacher_update_rate": 0.01} if family != "opd" else values)
    found = [actor.step(rows_of(actor.family), rate=0.05)["divergence"] for _ in range(20)]
    assert found[-1] < 0.8 * found[0]
    assert sum(later < earlier for earlier, later in pairwise(found)) >= 15
