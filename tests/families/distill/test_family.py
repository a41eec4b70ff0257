"""Rows of distillation, their masks and weights, and the scores of a teacher engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import pytest
from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.families.driver import JobContext, ScoreRequest, TeacherScores
from atoll.families.opd import OpdFamily
from atoll.families.rows import Batch, validate_rows
from atoll.families.run_settings import RunSettings
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.steps import build_train_steps
from pydantic import JsonValue

from tests.families.reported import reported
from tests.families.rows import make_batch

RUN = RunSettings(vocab_size=10, seq_length=5)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def family(**values: JsonValue) -> OpdFamily:
    return OpdFamily.from_options(values)


def batch_of(family: OpdFamily, *items: ReportedSample) -> Batch:
    return make_batch(*(family.shape_sample_row(item, RowContext(items)) for item in items))


def at_one(name: str, score: float | None = None) -> ReportedSample:
    item = reported(name, score=score)
    return replace(item, sample=replace(item.sample, temperature=1.0))


def test_a_row_carries_what_the_teacher_reads_and_a_weight() -> None:
    (row,) = batch_of(family(), reported("a", score=None)).rows
    assert row.columns["teacher_tokens"].tolist() == [1, 2, 3, 4, 5]
    assert row.columns["teacher_tokens"].dtype == np.int32
    assert row.columns["sample_weight"].tolist() == [1.0]
    assert row.reward == 0.0
    validate_rows([row], vocab_size=10, columns=OpdFamily.columns)


def test_a_teacher_sequence_longer_than_the_workers_take_is_refused_by_name() -> None:
    bound = family().bind(RUN)
    batch_of(bound, reported("a"))
    with pytest.raises(
        InvalidInput, match="sample sample-of-a: its teacher reads 5 tokens, the workers take at most 4"
    ):
        batch_of(bound.bind(replace(RUN, seq_length=4)), reported("a"))


def test_binding_leaves_the_unbound_family_as_it_was() -> None:
    unbound = family()
    assert unbound.bind(replace(RUN, seq_length=1)) is not unbound
    batch_of(unbound, reported("a"))


@pytest.mark.parametrize(("skip", "mask", "weight"), [(0, [1, 1, 1], 1 / 6), (2, [0, 0, 1], 1 / 2), (9, [0, 0, 0], 0)])
def test_skipped_tokens_leave_mask_and_denominator(skip: int, mask: list[int], weight: float) -> None:
    skipping = family(skip_response_tokens=skip)
    batch = batch_of(skipping, reported("a"), reported("b"))
    (step,) = build_train_steps(skipping, batch, skipping.prepare(batch, {}))
    assert step.rows[0].mask.tolist() == mask
    assert step.rows[0].weights.policy == pytest.approx(weight)
    assert batch.rows[0].loss_mask.tolist() == [1, 1, 1]


def test_a_job_is_one_optimizer_step_and_prepare_counts_the_taught_rows() -> None:
    batch = batch_of(family(), reported("a"), reported("b"))
    untaught = replace(batch.rows[1], columns={**batch.rows[1].columns, "sample_weight": np.zeros(1, np.float32)})
    signal = family().prepare(replace(batch, rows=(batch.rows[0], untaught)), {"kept": 1})
    assert signal.advantages is None
    assert signal.metrics == {"taught_rate": 0.5}
    assert signal.new_state == {"kept": 1}
    assert family().schedule_steps(batch).steps == ((0, 1),)


@dataclass
class Engine:
    """A teacher engine that answers with given widths."""

    top_k: int = 0
    short: bool = False
    asked: Sequence[ScoreRequest] = ()

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        self.asked = requests
        length = 2 if self.short else 3
        ids = np.tile(np.arange(self.top_k, dtype=np.int32), (length, 1)) if self.top_k else None
        log_probs = np.full((length, self.top_k), -2.0, dtype=np.float32) if self.top_k else None
        return [TeacherScores(np.full(length, -1.5, dtype=np.float32), ids, log_probs) for _ in requests]


def test_an_engine_scores_the_sampled_tokens_of_all_rows_at_once() -> None:
    engine = Engine()
    batch = family().prepare_rollout(batch_of(family(), at_one("a"), at_one("b")), JobContext("1:3", NOW, engine))
    assert [(r.sample_id, r.tokens.tolist(), r.start, r.top_k) for r in engine.asked] == [
        ("sample-of-a", [1, 2, 3, 4, 5], 2, 0),
        ("sample-of-b", [1, 2, 3, 4, 5], 2, 0),
    ]
    assert batch.rows[0].columns["distill_teacher_sampled_log_probs"].tolist() == [-1.5] * 3
    assert "distill_teacher_topk_ids" not in batch.rows[0].columns
    (step,) = build_train_steps(family(), batch, family().prepare(batch, {}))
    assert step.rows[1].columns["distill_teacher_sampled_log_probs"].tolist() == [-1.5] * 3


def test_an_engine_gives_the_top_k_where_the_divergence_is_over_ids() -> None:
    over_ids, engine = family(divergence="forward", top_k=4), Engine(top_k=4)
    batch = over_ids.prepare_rollout(batch_of(over_ids, at_one("a")), JobContext("1:3", NOW, engine))
    assert engine.asked[0].top_k == 4
    assert batch.rows[0].columns["distill_teacher_topk_ids"].tolist() == [[0, 1, 2, 3]] * 3
    assert batch.rows[0].columns["distill_teacher_topk_log_probs"].dtype == np.float32


@pytest.mark.parametrize(
    ("values", "engine", "item", "message"),
    [
        ({}, Engine(), reported("a"), "sample sample-of-a: a teacher engine scores at temperature 1, got 0.7"),
        ({}, Engine(short=True), at_one("a"), r"distill_teacher_sampled_log_probs of shape \[3\], got \[2\]"),
        (
            {"divergence": "forward", "top_k": 4},
            Engine(top_k=3),
            at_one("a"),
            r"distill_teacher_topk_ids of shape \[3, 4\], got \[3, 3\]",
        ),
        ({"divergence": "forward", "top_k": 4}, Engine(), at_one("a"), r"of shape \[3, 4\], got None"),
    ],
)
def test_rows_and_answers_that_do_not_fit_are_refused_by_sample(
    values: dict[str, JsonValue], engine: Engine, item: ReportedSample, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        family(**values).prepare_rollout(batch_of(family(**values), item), JobContext("1:3", NOW, engine))


def test_a_separate_teacher_without_engine_or_checkpoint_is_told_so() -> None:
    with pytest.raises(BadConfiguration, match="opd: teacher separate needs a teacher engine or teacher_checkpoint"):
        family().prepare_rollout(batch_of(family(), at_one("a")), JobContext("1:3", NOW))


def test_a_checkpoint_teacher_is_not_asked_before_the_step() -> None:
    with_checkpoint = family(teacher_checkpoint="/models/teacher")
    batch = batch_of(with_checkpoint, reported("a"))
    assert with_checkpoint.prepare_rollout(batch, JobContext("1:3", NOW)) is batch


def test_an_id_of_the_engine_that_the_student_does_not_have_is_refused_naming_the_sample() -> None:
    asks = family(divergence="forward", top_k=4).bind(replace(RUN, vocab_size=3))
    batch = batch_of(family(divergence="forward", top_k=4), at_one("a"))
    with pytest.raises(InvalidInput, match=r"sample sample-of-a: the teacher chose ids 0\.\.3, .* \[0, 3\)"):
        asks.prepare_rollout(batch, JobContext("1:3", NOW, Engine(top_k=4)))
