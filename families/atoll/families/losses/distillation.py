"""The loss of distillation on the student's own samples: a divergence to a teacher at every trained token.

With the divergence D_t, sample weight s_i, truncated importance weight v = min(exp(l - lq), cap) of the token or the
mean of those over the row, and row weights w (the mean over trained tokens, then over rollouts):

    loss = sum_t w_t sg[s_i v_t] D_t

What the teacher said is in columns that a worker's forward-only pass or a teacher engine has filled.
"""

from collections.abc import Mapping

import torch
from atoll.families.divergence_spec import DistillationSpec, Estimator, ImportanceLevel, TeacherColumn
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.divergence import full_divergence, restricted_divergence, sampled_reverse_kl
from atoll.families.losses.policy_loss import MAX_LOG_RATIO
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.top_k import log_probs_at_top_ids
from atoll.families.losses.vocab import log_probs_at_ids
from torch import Tensor


def distillation_loss(
    spec: DistillationSpec,
    batch: LossBatch,
    logits: Tensor,
    reduce: Reducer,
    sample_weights: Tensor,
    centering: ScoreCentering | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """One micro-batch's part of the loss and of its metrics.

    logits [S, V_local]; sample_weights float32 [B], finite. `centering` needs `Estimator.SAMPLED` and weights of the
    token. Non-finite inputs under the mask change neither value nor gradient.
    Raises: ValueError when the batch lacks a column that the teacher should have filled.
    """
    sampled = spec.estimator is Estimator.SAMPLED
    log_probs = log_probs_at_ids(
        logits if sampled else logits.detach(),
        batch.tokens,
        batch.temperatures,
        batch.shard,
        logit_rows=batch.logit_rows,
    )
    log_probs = reduce.neutral(log_probs)
    weights, clipped = _importance(spec, batch, log_probs.detach(), reduce)
    per_token = sample_weights[batch.row_of_token]
    if sampled:
        teacher = reduce.neutral(_column(batch, TeacherColumn.SAMPLED))
        divergence = sampled_reverse_kl(log_probs, teacher)
    else:
        divergence = _distribution_divergence(spec, batch, logits, reduce)
    loss = reduce(per_token * weights * divergence)
    metrics = {
        "divergence": reduce.metric(divergence),
        "importance_weight": reduce.metric(weights),
        "importance_clipfrac": reduce.metric(clipped),
        "sample_weight": reduce.metric(per_token),
    }
    if centering is not None:
        if not sampled:
            raise ValueError(f"score centering corrects the sampled reverse KL only, got {spec.estimator.value}")
        term, centering_metrics = centering(batch, logits, per_token * (teacher - log_probs.detach()), reduce)
        loss, metrics = loss + term, {**metrics, **centering_metrics}
    return loss, metrics


def _distribution_divergence(spec: DistillationSpec, batch: LossBatch, logits: Tensor, reduce: Reducer) -> Tensor:
    """[T], neutral under the mask."""
    if spec.estimator is Estimator.FULL:
        values = full_divergence(
            logits,
            _column(batch, TeacherColumn.ROWS, logits.shape[1]),
            batch.temperatures,
            batch.shard,
            spec.divergence,
            logit_rows=batch.logit_rows,
        )
        return reduce.neutral(values)
    ids = _column(batch, TeacherColumn.TOP_K_IDS, 1).long().masked_fill(~batch.mask[:, None], 0)
    student = log_probs_at_top_ids(logits, ids, batch.temperatures, batch.shard, logit_rows=batch.logit_rows)
    teacher = reduce.neutral(_column(batch, TeacherColumn.TOP_K_LOG_PROBS, 1))
    return restricted_divergence(reduce.neutral(student), teacher, spec.divergence, spec.estimator)


def _importance(spec: DistillationSpec, batch: LossBatch, log_probs: Tensor, reduce: Reducer) -> tuple[Tensor, Tensor]:
    """v [T], and 1.0 where the cap was reached; detached."""
    if spec.importance_cap is None:
        return torch.ones_like(log_probs), torch.zeros_like(log_probs)
    recorded = reduce.neutral(batch.rollout_log_probs)
    ratios = (log_probs - recorded).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = ratios.clamp(max=spec.importance_cap)
    if spec.importance_level is ImportanceLevel.SEQUENCE:
        weights = reduce.row_mean(weights)
    return weights, (ratios > spec.importance_cap).to(ratios.dtype)


def _column(batch: LossBatch, name: TeacherColumn, *shape: int) -> Tensor:
    """What the teacher said, [T, *shape]; a batch without rows has nothing to say."""
    column = batch.columns.get(name) if batch.sample_ids else batch.rollout_log_probs.new_zeros(0, *shape)
    if column is None:
        raise ValueError(f"distillation needs the column {name}, which the teacher's pass should have filled")
    return column
