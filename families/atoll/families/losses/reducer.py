"""Turns token values into this micro-batch's part of the step's sums, and finds the rows that are not finite."""

from collections.abc import Callable

import torch.distributed as dist
from atoll.families.losses.batch import LossBatch
from torch import Tensor, zeros_like

TokenShares = Callable[[Tensor], Tensor]
"""token losses [T], 0 where masked -> what each token adds to the step's loss [T]"""


class Reducer:
    """The `reduce` of a loss hook. Every sum is partial: micro-batches and ranks only add them up.

    Sums are float64: advantages of a group cancel, and what is left must not depend on the cut into micro-batches.

    Masked tokens are selected away, so they reach neither the value nor the gradient. Make one for each micro-batch.
    `shares` takes the place of the rows' policy weights: what a token adds must not depend on the other tokens of its
    micro-batch, or the loss depends on the cut.
    """

    def __init__(self, batch: LossBatch, shares: TokenShares | None = None) -> None:
        self._batch = batch
        self._shares = shares
        self._bad_tokens = zeros_like(batch.mask)

    def __call__(self, values: Tensor) -> Tensor:
        """The policy (or divergence, or cross-entropy) term of token values [T]; a scalar.

        Raises: ValueError when `shares` does not answer for every token.
        """
        if self._shares is None:
            return self._sum(values, self._batch.policy_weights)
        self.require_finite(values)
        shares = self._shares(self._masked(values))
        if shares.shape != values.shape:
            raise ValueError(f"custom_reducer must return a share for each of {len(values)} tokens, got {shares.shape}")
        self.require_finite(shares)
        return self._masked(shares).double().sum()

    def regularizer(self, values: Tensor) -> Tensor:
        """An entropy or KL term of token values [T]; a scalar."""
        return self._sum(values, self._batch.regularizer_weights)

    def metric(self, values: Tensor) -> Tensor:
        """A metric of token values [T], averaged by sample_mean; a detached scalar."""
        return self._masked(values.detach()).mul(self._batch.metric_weights).sum()

    def neutral(self, values: Tensor, constant: float = 0.0) -> Tensor:
        """An input [T] or [T, K] of the loss with masked places replaced by a constant, before any arithmetic.

        A trained token that is not finite marks its row: `bad_rows`.
        """
        self.require_finite(values)
        return self._masked(values, constant)

    def require_finite(self, values: Tensor) -> None:
        """Marks the rows whose trained tokens are not finite. It never raises: all ranks must reach the collective."""
        finite = values.detach().isfinite().flatten(1).all(-1) if values.ndim > 1 else values.detach().isfinite()
        self._bad_tokens |= self._batch.mask & ~finite

    def token_sum(self, values: Tensor, where: Tensor) -> Tensor:
        """The plain sum of token values [T] where bool [T] says so, whatever mask and weights say; a scalar.

        A value there that is not finite marks its row.
        """
        self._bad_tokens |= where & ~values.detach().isfinite()
        return values.masked_fill(~where, 0).double().sum()

    def row_mean(self, values: Tensor) -> Tensor:
        """The mean of detached token values [T] over all trained tokens of their row, for each token [T].

        A row that is split over the context-parallel group is summed over it: every rank of the group must call.
        """
        batch = self._batch
        if batch.row_trained_tokens is None:
            raise ValueError("the mean over a row needs its trained tokens, and the batch does not have them")
        sums = batch.metric_weights.new_zeros(len(batch.sample_ids))
        sums = sums.index_add(0, batch.row_of_token, self._masked(values.detach()).to(sums.dtype))
        if batch.context_group is not None:
            dist.all_reduce(sums, group=batch.context_group)
        means = sums / batch.row_trained_tokens.clamp(min=1)
        return means[batch.row_of_token].to(values.dtype)

    @property
    def bad_rows(self) -> Tensor:
        """bool [B] rows with a value that is not finite at a trained token."""
        batch = self._batch
        counts = batch.row_of_token.new_zeros(len(batch.sample_ids))
        return counts.index_add(0, batch.row_of_token, self._bad_tokens.long()) > 0

    def _sum(self, values: Tensor, weights: Tensor) -> Tensor:
        self.require_finite(values)
        return self._masked(values).mul(weights).sum()

    def _masked(self, values: Tensor, constant: float = 0.0) -> Tensor:
        masked = ~self._batch.mask
        return values.masked_fill(masked.view(-1, *[1] * (values.ndim - 1)), constant)
