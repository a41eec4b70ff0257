"""OpenClaw-RL in the workers: PPO on the turn's reward, and PPO on what the hinted base would rather have said.

With l_old = sg[l] and the subset S of ids at a token:

    w = softmax(l_old over S)      A_v = clamp(l_T - l_old, +-adv_diff_clip) w_v      opd_t = sum_{v in S} ppo(l_v, A_v)
    loss = w_rl sum_t w_t ppo(l_t, reward) + w_opd sum_t w_t opd_t
"""

from collections.abc import Mapping

import torch
from atoll.families.family import HookChannel
from atoll.families.losses.actor import Actor, RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.policy_loss import PgPrimitive, clipped_surrogate, kl_estimate
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.top_k import log_probs_at_top_ids
from atoll.families.losses.vocab import token_statistics
from atoll.families.openclawrl.losses.candidates import teach, teach_from_service
from atoll.families.openclawrl.spec import HINT_OVERLAP, TEACHER_IDS, TEACHER_LOG_PROBS, HintTeacher, OpenClawRlOptions
from atoll.families.policy_spec import PolicyLossSpec
from atoll.families.run_settings import HookArgs
from torch import Tensor

FROZEN_BASE = "openclawrl_base"
"""The weight set that the family keeps: those of its first job."""


@objective_hook(HookChannel.ACTOR_INIT)
def openclawrl_actor_init(actor: Actor) -> None:
    """Keeps the weights that the family starts from, once; later they come back with the checkpoint."""
    if _options(actor).teacher is HintTeacher.BASE and not actor.has_weights(FROZEN_BASE):
        actor.keep_weights(FROZEN_BASE)


@objective_hook(HookChannel.ACTOR_PRE_TRAIN)
def openclawrl_actor_pre_train(actor: Actor, rollout_data: RolloutData) -> None:
    """Fills the teacher's columns: with the frozen base's scores of the candidates, or with the service's."""
    options = _options(actor)
    if options.teacher is HintTeacher.SERVICE:
        teach_from_service(rollout_data, options)
    else:
        teach(actor, FROZEN_BASE, rollout_data, options)


@objective_hook(HookChannel.LOSS)
def openclawrl_loss(
    args: HookArgs[OpenClawRlOptions], batch: LossBatch, logits: Tensor, reduce: Reducer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """One micro-batch's part of the loss. Raises: ValueError when a column of the teacher is missing."""
    options = args.options
    if batch.advantages is None:
        raise ValueError("openclawrl needs advantages")
    surrogate = clipped_surrogate(
        PolicyLossSpec(options.eps_clip, options.eps_clip if options.eps_clip_high is None else options.eps_clip_high)
    )
    stats = token_statistics(logits, batch.tokens, batch.temperatures, batch.shard, logit_rows=batch.logit_rows)
    log_probs = reduce.neutral(stats.log_probs)
    old = log_probs.detach() if batch.old_log_probs is None else reduce.neutral(batch.old_log_probs)
    pg_losses, clipped = surrogate(old - log_probs, log_probs, reduce.neutral(batch.advantages))
    opd_losses, opd_metrics = _distilled(options, batch, logits, reduce, surrogate)
    loss = options.w_rl * reduce(pg_losses) + options.w_opd * reduce(opd_losses)
    if options.entropy_coef:
        loss = loss - options.entropy_coef * reduce.regularizer(stats.entropy)
    metrics = {
        "pg_loss": reduce.metric(pg_losses),
        "pg_clipfrac": reduce.metric(clipped),
        "entropy": reduce.metric(stats.entropy),
        "trained_tokens": batch.mask.sum().double(),
        **opd_metrics,
    }
    if options.kl_loss_coef:
        if batch.ref_log_probs is None:
            raise ValueError(f"kl_loss_coef {options.kl_loss_coef:g} needs reference log-probs, and there are none")
        kl = kl_estimate(log_probs - reduce.neutral(batch.ref_log_probs), options.kl_loss_type)
        loss = loss + options.kl_loss_coef * reduce.regularizer(kl)
        metrics["kl_loss"] = reduce.metric(kl)
    return loss, metrics


def _options(actor: Actor) -> OpenClawRlOptions:
    options = actor.args.options
    if not isinstance(options, OpenClawRlOptions):
        raise TypeError(f"options of openclawrl expected, got {type(options).__name__}")
    return options


def _distilled(
    options: OpenClawRlOptions, batch: LossBatch, logits: Tensor, reduce: Reducer, surrogate: PgPrimitive
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """opd_t [T], 0 where S is empty, and its metrics."""
    ids = _column(batch, TEACHER_IDS, options.top_k).long()
    present = (ids >= 0) & batch.mask[:, None]
    level = log_probs_at_top_ids(
        logits, ids.masked_fill(~present, 0), batch.temperatures, batch.shard, logit_rows=batch.logit_rows
    ).masked_fill(~present, 0)
    teacher = reduce.neutral(_column(batch, TEACHER_LOG_PROBS, options.top_k).masked_fill(~present, 0))
    old = level.detach()
    # The lowest finite number and not -inf: a softmax over nothing would be NaN.
    weights = old.masked_fill(~present, torch.finfo(old.dtype).min).softmax(-1).masked_fill(~present, 0)
    gap = teacher - old
    bounded = gap.clamp(-options.adv_diff_clip, options.adv_diff_clip) if options.adv_diff_clip else gap
    losses, _ = surrogate(old - level, level, bounded * weights)
    per_token = losses.masked_fill(~present, 0).sum(-1)
    metrics = {
        "opd_loss": reduce.metric(per_token),
        "opd_gap": reduce.metric((weights * gap).sum(-1)),
        "opd_subset_size": reduce.metric(present.sum(-1).to(per_token.dtype)),
        "hint_overlap": reduce.metric(_column(batch, HINT_OVERLAP)),
    }
    return per_token, metrics


def _column(batch: LossBatch, name: str, *shape: int) -> Tensor:
    """What the pre-train hook filled, [T, *shape]; a batch without rows has nothing."""
    column = batch.columns.get(name) if batch.sample_ids else batch.rollout_log_probs.new_zeros(0, *shape)
    if column is None:
        raise ValueError(f"openclawrl needs the column {name}, which its pre-train hook should have filled")
    return column
