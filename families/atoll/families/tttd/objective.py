"""TTT-Discover in the workers: a sum over generated tokens, and the centred KL to the base in the advantages."""

from collections.abc import Mapping

import torch
from atoll.families.family import HookChannel
from atoll.families.losses.actor import RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.vocab import token_statistics
from atoll.families.run_settings import HookArgs
from atoll.families.tttd.spec import TttdOptions
from torch import Tensor


@objective_hook(HookChannel.LOSS)
def tttd_loss(
    args: HookArgs[TttdOptions], batch: LossBatch, logits: Tensor, reduce: Reducer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """-sum_t exp(l - lq) A_t over all tokens with a recorded log-prob and an advantage: no clip, no mask, no mean."""
    if batch.advantages is None:
        raise ValueError("tttd needs advantages")
    reduce.require_finite(batch.rollout_log_probs)
    reduce.require_finite(batch.advantages)
    stats = token_statistics(logits, batch.tokens, batch.temperatures, batch.shard, logit_rows=batch.logit_rows)
    generated = batch.rollout_log_probs.isfinite() & batch.advantages.isfinite() & (batch.advantages != 0)
    recorded = batch.rollout_log_probs.masked_fill(~generated, 0)
    advantages = batch.advantages.masked_fill(~generated, 0)
    ratio = (stats.log_probs.masked_fill(~generated, 0) - recorded).exp()
    loss = reduce.token_sum(-ratio * advantages, generated)
    difference = (stats.log_probs - batch.rollout_log_probs).masked_fill(~batch.mask, 0)
    metrics = {
        "ratio": reduce.metric(difference.exp()),
        "rollout_log_prob_abs_diff": reduce.metric(difference.abs()),
        "entropy": reduce.metric(stats.entropy),
        "advantage_abs": reduce.metric(advantages.abs()),
        "trained_tokens": generated.sum().double(),
    }
    if batch.ref_log_probs is not None:
        metrics["base_kl"] = reduce.metric(reduce.neutral(stats.log_probs) - reduce.neutral(batch.ref_log_probs))
    return loss, metrics


@objective_hook(HookChannel.ADVANTAGE)
def tttd_advantages(args: HookArgs[TttdOptions], rollout_data: RolloutData) -> None:
    """A_t += kl_coef m_t (mean d - d_t), d = (lq - l_base) m, the mean over the trained tokens of the whole job."""
    data = rollout_data
    if data.ref_log_probs is None:
        raise ValueError(f"kl_coef {args.options.kl_coef:g} needs log-probs of the base, and there are none")
    masks = [torch.as_tensor(item.mask, dtype=torch.bool) for item in data.rows]
    differences = []
    for item, mask, base in zip(data.rows, masks, data.ref_log_probs, strict=True):
        recorded = torch.as_tensor(item.row.rollout_log_probs, dtype=torch.float64)
        differences.append(recorded.masked_fill(~mask, 0) - base.detach().cpu().double().masked_fill(~mask, 0))
    sums = torch.zeros(2, dtype=torch.float64)
    for mask, difference in zip(masks, differences, strict=True):
        sums += torch.stack([difference.sum(), mask.sum().double()])
    sums = data.sum_over_ranks(sums)
    mean = sums[0] / sums[1].clamp(min=1)
    data.advantages = [
        torch.as_tensor(item.advantages, dtype=torch.float64)
        .add(args.options.kl_coef * (mean - difference).masked_fill(~mask, 0))
        .float()
        for item, mask, difference in zip(data.rows, masks, differences, strict=True)
    ]
