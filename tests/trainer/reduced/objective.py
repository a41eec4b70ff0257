"""The reducer of the test's family."""

from atoll.families.family import HookChannel
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import objective_hook
from atoll.families.run_settings import HookArgs
from torch import Tensor

from tests.trainer.reduced.spec import SHARE, ReducedOptions


@objective_hook(HookChannel.REDUCER)
def reduced_reducer(args: HookArgs[ReducedOptions], batch: LossBatch, losses: Tensor) -> Tensor:
    share = batch.columns[SHARE] if batch.sample_ids else batch.policy_weights
    return (losses.double() * share).clamp(-args.options.bound, args.options.bound)
