"""The stock policy loss: PPO's clipped surrogate with its options (arXiv 1707.06347; dual clip: arXiv 1912.09729).

With l = log p(y_t), l_old, A, r = exp(l - l_old):

    pg_t = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high));   dual clip, for A < 0: min(pg_t, -c A)
    loss = sum_t w_t pg_t min(exp(l_old - lq), cap) + kl_coef sum_t w'_t kl(l - l_ref) - entropy_coef sum_t w'_t H_t

w are whole-step facts of the rows, so this rank's part of the sum is all there is to compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.reducer import Reducer, TokenShares
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.vocab import token_statistics
from atoll.families.policy_spec import KlKind, OldPolicy, PolicyLossSpec
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: float32 overflows at 88, and a clipped branch of inf has gradient NaN."""

PgPrimitive = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(ppo_kl = l_old - l, l, A) -> (pg loss, 1.0 where the clip takes the gradient away); all [T]."""


@dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """One micro-batch's part of an optimizer step. All sums are over this rank's tokens only."""

    loss: Tensor
    """float64 scalar with gradient: add over micro-batches and over data- and context-parallel ranks."""
    metrics: Mapping[str, Tensor]
    """Detached float64 scalars, to be added up like the loss; the same keys in every micro-batch."""
    bad_rows: Tensor
    """bool [B] rows with a non-finite value at a trained token. All-reduce over all ranks before anyone raises."""


def policy_loss(
    spec: PolicyLossSpec,
    batch: LossBatch,
    logits: Tensor,
    primitive: PgPrimitive | None = None,
    centering: ScoreCentering | None = None,
    shares: TokenShares | None = None,
) -> LossResult:
    """The stock policy loss of one micro-batch, or the same loss around another per-token primitive.

    logits [S, V_local]. `centering` adds its term with the loss's own advantages and weights; `shares` reduces the
    policy term in place of the rows' weights. Non-finite inputs under the mask change neither value nor gradient.
    Raises: ValueError when the batch lacks advantages, or reference log-probs that the KL term needs.
    """
    if batch.advantages is None:
        raise ValueError("the policy loss needs advantages; the family declares where they come from")
    reduce = Reducer(batch, shares)
    stats = token_statistics(logits, batch.tokens, batch.temperatures, batch.shard, logit_rows=batch.logit_rows)
    log_probs = reduce.neutral(stats.log_probs)
    advantages = reduce.neutral(batch.advantages)
    old = reduce.neutral(_old_log_probs(spec, batch, log_probs))
    pg_losses, clipped = (primitive or clipped_surrogate(spec))(old - log_probs, log_probs, advantages)
    metrics = {
        "pg_clipfrac": reduce.metric(clipped),
        "ppo_kl": reduce.metric(old - log_probs),
        "entropy": reduce.metric(stats.entropy),
        "trained_tokens": batch.mask.sum().double(),
        "clipped_tokens": (clipped.detach() * batch.mask).sum().double(),
    }
    if spec.needs_rollout_log_probs:
        reduce.require_finite(batch.rollout_log_probs)
    recorded = batch.rollout_log_probs.masked_fill(~batch.mask, 0)
    own = log_probs if spec.old_policy is OldPolicy.ROLLOUT else old
    metrics["rollout_log_prob_abs_diff"] = reduce.metric((own - recorded).abs())
    if spec.tis_cap is not None:
        weights = (old - recorded).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        metrics["tis_weight"] = reduce.metric(weights)
        metrics["tis_clipfrac"] = reduce.metric((weights > spec.tis_cap).float())
        pg_losses = pg_losses * weights.clamp(max=spec.tis_cap)
    metrics["pg_loss"] = reduce.metric(pg_losses)
    loss = reduce(pg_losses)
    if centering is not None:
        term, centering_metrics = centering(batch, logits, advantages, reduce)
        loss = loss + term
        metrics |= centering_metrics
    if spec.needs_reference:
        if batch.ref_log_probs is None:
            raise ValueError(f"kl_coef {spec.kl_coef:g} needs reference log-probs, and the batch has none")
        kl = kl_estimate(log_probs - reduce.neutral(batch.ref_log_probs), spec.kl_kind)
        metrics["kl_loss"] = reduce.metric(kl)
        loss = loss + spec.kl_coef * reduce.regularizer(kl)
    if spec.entropy_coef:
        loss = loss - spec.entropy_coef * reduce.regularizer(stats.entropy)
    metrics["loss"] = loss.detach()
    return LossResult(loss, metrics, reduce.bad_rows)


def clipped_surrogate(spec: PolicyLossSpec) -> PgPrimitive:
    """PPO's clipped surrogate, with dual clip where `eps_clip_c` is set."""

    def primitive(ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        ratio = (-ppo_kl).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        unclipped = -advantages * ratio
        bounded = -advantages * ratio.clamp(1 - spec.eps_clip, 1 + spec.eps_clip_high)
        losses = torch.maximum(unclipped, bounded)
        clipped = bounded > unclipped
        if spec.eps_clip_c is not None:
            ceiling = -spec.eps_clip_c * advantages
            beyond = (advantages < 0) & (ceiling < losses)
            losses = torch.where(beyond, ceiling, losses)
            clipped = clipped | beyond
        return losses, clipped.to(losses.dtype)

    return primitive


def kl_estimate(difference: Tensor, kind: KlKind) -> Tensor:
    """KL(p || p_ref) at the sampled token from d = l - l_ref [T] (k1, k2, k3: joschu.net/blog/kl-approx.html)."""
    match kind:
        case KlKind.K1:
            return difference
        case KlKind.K2:
            return difference.square() / 2
        case KlKind.K3 | KlKind.LOW_VAR_KL:
            bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            k3 = torch.expm1(-bounded) + bounded
            return k3.clamp(-10, 10) if kind is KlKind.LOW_VAR_KL else k3


def _old_log_probs(spec: PolicyLossSpec, batch: LossBatch, log_probs: Tensor) -> Tensor:
    if spec.old_policy is OldPolicy.ROLLOUT:
        return batch.rollout_log_probs
    return log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
