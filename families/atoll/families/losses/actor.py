"""What lifecycle hooks may do with an actor: keep weights, run rows through them, and attach what they found.

```
actor_init_hook(actor)                    once, after the weights are loaded
actor_pre_train_hook(actor, rollout_data) before every optimizer step:
    forward_rows(weights, rows, read)  ->  columns of origin `worker` on rollout_data.rows  ->  LossBatch.columns
```

A backend implements `Actor`; hooks see nothing else of it. Shapes: R response tokens of a row, T of a micro-batch on a
rank, V_local columns of this rank's vocabulary shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.families.losses.batch import LossBatch
from atoll.families.options import FamilyOptions
from atoll.families.run_settings import HookArgs
from atoll.families.steps import TrainRow
from torch import Tensor

CURRENT_WEIGHTS = "actor"
"""The name of the weights that are trained."""

RowReader = Callable[[LossBatch, Tensor], Mapping[str, Tensor]]
"""(batch, logits [T, V_local]) -> tensors [T, ...] by name, aligned to the batch's tokens."""


def _one_rank(values: Tensor) -> Tensor:
    return values


@dataclass(slots=True, eq=False)
class RolloutData:
    """Rows on one rank, to which hooks add what only a worker can compute: those of one step for
    `actor_pre_train_hook`, those of the whole job for `custom_advantage_function`.

    Tensors of a row are those of its whole response, the same on every rank of its copy of the model.
    """

    rows: Sequence[TrainRow]
    """`actor_pre_train_hook` may replace them by the same rows with more `columns`."""
    values: Sequence[Tensor] | None = None
    """Per row, the critic's float32 [R]."""
    advantages: Sequence[Tensor] | None = None
    """Per row, float32 [R]; filled by `custom_advantage_function`."""
    returns: Sequence[Tensor] | None = None
    """Per row, float32 [R]; filled by `custom_advantage_function` where there is a critic."""
    ref_log_probs: Sequence[Tensor] | None = None
    """Per row, float32 [R] of the reference model, where `BackendNeeds` ask for them. Not for the pre-train hook."""
    sum_over_ranks: Callable[[Tensor], Tensor] = _one_rank
    """Adds up a tensor over the data-parallel ranks, so that every row of the job counts once. A collective: every
    rank calls it equally often, also one without rows."""


class Actor(Protocol):
    """The actor of one job on one rank. Every method is a collective over this rank's copy of the model.

    Weight sets are named; each keeps this rank's shards in float32 on the host.
    """

    @property
    def args(self) -> HookArgs[FamilyOptions]:
        """The family's options and the run: the same that the loss hook gets."""

    def has_weights(self, name: str) -> bool:
        """Whether a weight set of that name is kept, since a hook kept it or since a checkpoint brought it back."""

    def keep_weights(self, name: str) -> None:
        """Keeps a copy of the current weights under a name, in place of an older one.

        It is part of every later checkpoint, and comes back with it.
        """

    def keep_checkpoint_weights(self, name: str, directory: str) -> None:
        """Keeps the weights of a model directory, which must fit the actor's model, under a name.

        Not part of a checkpoint: the bytes are those of the directory. Does nothing when it is kept already.
        Raises: InvalidInput when the model is another one, naming the field.
        """

    def update_moving_average(self, name: str, rate: float) -> None:
        """Once, after the optimizer step that follows: kept += rate (theta_new - kept), in float32.

        Nothing happens when that step is not taken.
        """

    def forward_rows(self, weights: str, rows: Sequence[TrainRow], read: RowReader) -> Sequence[Mapping[str, Tensor]]:
        """Runs rows through a weight set, `CURRENT_WEIGHTS` or a kept one, without gradient and without dropout.

        `read` sees one micro-batch after another, built like those of the loss: `batch.columns` holds the family's
        response-aligned columns that the rows have so far. Returns, for each row, what it read as [R, ...] on the host
        in the dtype it had: the whole response on every rank, put together over the context-parallel group. On a rank
        that computes no loss (a pipeline stage before the last) `read` is not called and the mappings are empty.
        The weights in use are the same after the call as before it, also when it raises. `rows` may be none.
        """
