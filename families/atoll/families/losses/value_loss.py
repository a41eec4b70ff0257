"""The critic's clipped value loss (arXiv 1707.06347, section 5, as PPO implementations clip it), without a factor 1/2.

loss_t = max((v - ret)^2, (v_old + clamp(v - v_old, +-value_clip) - ret)^2)
"""

import torch
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.policy_loss import LossResult
from atoll.families.losses.reducer import Reducer
from torch import Tensor


def value_loss(batch: LossBatch, values: Tensor, value_clip: float) -> LossResult:
    """One micro-batch's part of the critic's step.

    values [T], differentiable: the value head's output at the position that predicts each response token, so the value
    of the state before it; no temperature. The batch comes from a step of `critic.critic_steps`: its mask and its
    weights are the critic's. Non-finite inputs under the mask change neither value nor gradient.
    Raises: ValueError when the batch lacks old values or returns.
    """
    if batch.old_values is None or batch.returns is None:
        raise ValueError("the value loss needs old values and returns; the job computes them before the critic moves")
    reduce = Reducer(batch)
    new = reduce.neutral(values)
    old = reduce.neutral(batch.old_values)
    returns = reduce.neutral(batch.returns)
    free = (new - returns).square()
    bounded = (old + (new - old).clamp(-value_clip, value_clip) - returns).square()
    losses = torch.maximum(free, bounded)
    loss = reduce(losses)
    metrics = {
        "loss": loss.detach(),
        "value_clipfrac": reduce.metric((bounded > free).float()),
        "value": reduce.metric(new),
        "return": reduce.metric(returns),
        "trained_tokens": batch.mask.sum().double(),
    }
    return LossResult(loss, metrics, reduce.bad_rows)
