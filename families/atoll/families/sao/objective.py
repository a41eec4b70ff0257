"""SAO in the workers: the masked ratio, and advantages from the critic's values."""

import torch
from atoll.families.family import HookChannel
from atoll.families.losses.actor import RolloutData
from atoll.families.losses.hooks import objective_hook
from atoll.families.run_settings import HookArgs
from atoll.families.sao.gae import length_adaptive_lambda, skip_observation_gae
from atoll.families.sao.row import ACTION_MASK
from atoll.families.sao.spec import SaoOptions
from torch import Tensor


@objective_hook(HookChannel.PG_LOSS)
def sao_loss(
    args: HookArgs[SaoOptions], ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """-sg[f(r)] A l and [f(r) = 0], for ppo_kl = lq - l; all [T]. Both bounds are strict."""
    ratio = (-ppo_kl.detach()).exp()
    inside = (ratio > 1 - args.options.eps_clip) & (ratio < 1 + args.options.eps_clip_high)
    # Selected, not multiplied: a ratio may be inf, and inf times 0 is NaN.
    weight = ratio.masked_fill(~inside, 0)
    return -weight * advantages * log_probs, (~inside).to(log_probs.dtype)


@objective_hook(HookChannel.ADVANTAGE)
def sao_advantages(args: HookArgs[SaoOptions], rollout_data: RolloutData) -> None:
    """Fills advantages with the actor's lambda, and returns with the critic's."""
    if rollout_data.values is None:
        raise ValueError("sao computes advantages from the critic's values, and there are none")
    options = args.options
    advantages, returns = [], []
    for item, tensor in zip(rollout_data.rows, rollout_data.values, strict=True):
        values, actions, reward = tensor.detach().cpu().numpy(), item.columns[ACTION_MASK], item.row.reward
        lam = options.gae_lambda
        if options.length_adaptive_lambda:
            lam = length_adaptive_lambda(item.row.response_length, options.length_adaptive_alpha)
        of_actor = skip_observation_gae(values, actions, reward, gamma=options.gamma, lam=lam)
        of_critic = skip_observation_gae(values, actions, reward, gamma=options.gamma, lam=options.critic_lambda)
        advantages.append(torch.as_tensor(of_actor.advantages, dtype=torch.float32))
        returns.append(torch.as_tensor(of_critic.returns, dtype=torch.float32))
    rollout_data.advantages, rollout_data.returns = advantages, returns
