"""The hooks of sdpo: those of the distillation base."""

from collections.abc import Mapping

from atoll.families.distill.objective import distill_actor_pre_train, distill_loss
from atoll.families.family import HookChannel
from atoll.families.losses.actor import Actor, RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.reducer import Reducer
from atoll.families.run_settings import HookArgs
from atoll.families.sdpo.spec import SdpoOptions
from torch import Tensor


@objective_hook(HookChannel.LOSS)
def sdpo_loss(
    args: HookArgs[SdpoOptions], batch: LossBatch, logits: Tensor, reduce: Reducer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """See `distill_loss`."""
    return distill_loss(args, batch, logits, reduce)


@objective_hook(HookChannel.ACTOR_PRE_TRAIN)
def sdpo_actor_pre_train(actor: Actor, rollout_data: RolloutData) -> None:
    """See `distill_actor_pre_train`."""
    distill_actor_pre_train(actor, rollout_data)
