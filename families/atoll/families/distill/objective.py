"""The hooks of every distillation family: one pass of the teacher before the step, then the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from atoll.families.distill.family import SAMPLE_WEIGHT, TEACHER_TOKENS
from atoll.families.distill.options import DistillOptions, Teacher
from atoll.families.divergence_spec import Estimator, TeacherColumn
from atoll.families.family import HookChannel
from atoll.families.losses.actor import CURRENT_WEIGHTS, Actor, RolloutData, RowReader
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.distillation import distillation_loss
from atoll.families.losses.divergence import teacher_log_prob_rows
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.top_k import log_probs_at_top_ids, top_k_ids
from atoll.families.losses.vocab import log_probs_at_ids
from atoll.families.run_settings import HookArgs
from atoll.families.steps import TrainRow
from torch import Tensor

TEACHER_WEIGHTS = "distill_teacher"
"""Name of the kept weights of a self teacher that is not the current actor."""
CHECKPOINT_WEIGHTS = "distill_checkpoint"
"""Name of those of a separate teacher: another one, so that a self teacher never takes them for its own."""


@objective_hook(HookChannel.LOSS)
def distill_loss(
    args: HookArgs[DistillOptions], batch: LossBatch, logits: Tensor, reduce: Reducer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The divergence to the teacher, corrected where score centering is on."""
    options = args.options
    weights = torch.cat([batch.rollout_log_probs.new_zeros(0), *batch.row_columns.get(SAMPLE_WEIGHT, ())])
    centering = ScoreCentering.of_run(args.run, options.policy_gradient_weight())
    return distillation_loss(options.distillation_spec(), batch, logits, reduce, weights, centering)


@objective_hook(HookChannel.ACTOR_PRE_TRAIN)
def distill_actor_pre_train(actor: Actor, rollout_data: RolloutData) -> None:
    """Fills what the teacher says about the step's rows, with the student's ids where it selects them."""
    options = cast(DistillOptions, actor.args.options)
    if options.from_engine:
        return
    weights = _teacher_weights(actor, options)
    rows = rollout_data.rows
    if options.student_selects:
        rows = _with_columns(rows, actor.forward_rows(CURRENT_WEIGHTS, rows, _ids_reader(options.top_k)))
    said = actor.forward_rows(weights, [_as_teacher_reads(item) for item in rows], _teacher_reader(options))
    rollout_data.rows = _with_columns(rows, said)
    if options.teacher is Teacher.SELF and 0 < options.teacher_update_rate < 1:
        actor.update_moving_average(weights, options.teacher_update_rate)


def _teacher_weights(actor: Actor, options: DistillOptions) -> str:
    if options.teacher_checkpoint is not None:
        actor.keep_checkpoint_weights(CHECKPOINT_WEIGHTS, options.teacher_checkpoint)
        return CHECKPOINT_WEIGHTS
    if options.teacher_update_rate == 1:
        return CURRENT_WEIGHTS
    # The family's first job: the teacher starts as a copy of the actor.
    if not actor.has_weights(TEACHER_WEIGHTS):
        actor.keep_weights(TEACHER_WEIGHTS)
    return TEACHER_WEIGHTS


def _as_teacher_reads(item: TrainRow) -> TrainRow:
    tokens = item.columns[TEACHER_TOKENS].astype("int32")
    row = replace(item.row, tokens=tokens, prompt_length=len(tokens) - item.row.response_length)
    return replace(item, row=row)


def _ids_reader(k: int) -> RowReader:
    def read(batch: LossBatch, logits: Tensor) -> Mapping[str, Tensor]:
        ids = top_k_ids(logits, k, batch.shard, logit_rows=batch.logit_rows)
        return {TeacherColumn.TOP_K_IDS: ids.int()}

    return read


def _teacher_reader(options: DistillOptions) -> RowReader:
    def read(batch: LossBatch, logits: Tensor) -> Mapping[str, Tensor]:
        place = batch.temperatures, batch.shard
        match options.estimator:
            case Estimator.FULL:
                return {TeacherColumn.ROWS: teacher_log_prob_rows(logits, *place, logit_rows=batch.logit_rows)}
            case Estimator.SAMPLED:
                sampled = log_probs_at_ids(logits, batch.tokens, *place, logit_rows=batch.logit_rows)
                return {TeacherColumn.SAMPLED: sampled}
            case Estimator.RENORMALIZED | Estimator.TAIL:
                if options.student_selects:
                    ids = batch.columns[TeacherColumn.TOP_K_IDS].long()
                else:
                    ids = top_k_ids(logits, options.top_k, batch.shard, logit_rows=batch.logit_rows)
                log_probs = log_probs_at_top_ids(logits, ids, *place, logit_rows=batch.logit_rows)
                return {TeacherColumn.TOP_K_IDS: ids.int(), TeacherColumn.TOP_K_LOG_PROBS: log_probs}

    return read


def _with_columns(rows: Sequence[TrainRow], read: Sequence[Mapping[str, Tensor]]) -> list[TrainRow]:
    return [
        replace(item, columns={**item.columns, **{str(name): values.numpy() for name, values in found.items()}})
        for item, found in zip(rows, read, strict=True)
    ]
