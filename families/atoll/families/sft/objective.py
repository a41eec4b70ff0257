"""The loss of sft: -l at every trained token."""

from collections.abc import Mapping

from atoll.families.family import HookChannel
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.vocab import token_statistics
from atoll.families.run_settings import HookArgs
from atoll.families.sft.spec import SftOptions
from torch import Tensor


@objective_hook(HookChannel.LOSS)
def sft_loss(
    args: HookArgs[SftOptions], batch: LossBatch, logits: Tensor, reduce: Reducer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy of the response tokens, in nats, at each row's temperature."""
    stats = token_statistics(logits, batch.tokens, batch.temperatures, batch.shard, logit_rows=batch.logit_rows)
    nll = -reduce.neutral(stats.log_probs)
    metrics = {
        "nll": reduce.metric(nll),
        "entropy": reduce.metric(stats.entropy),
        "trained_tokens": batch.mask.sum().double(),
    }
    return reduce(nll), metrics
