"""Score centering: takes the drift towards the sampler out of a policy gradient (*Score Centering Stabilizes
Off-policy Reinforcement Learning*, appendix A, equations 9-14).

For a loss -A sg[f(p/q)] log p(y), with the head H of the sampler's K most likely ids:

    A * sum_{v in H} sg[q_v f(p_v / q_v) - alpha p_v] * log p_v
    rho = max(1 - q(H), eps) / max(1 - p(H), eps)        alpha = rho f(1 / rho)

The sampler's tail is taken for rho p. The term is 0 when q = p, and added before the loss's own reduction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.top_k import log_probs_at_top_ids
from atoll.families.policy_spec import PolicyGradientWeight, WeightForm
from atoll.families.run_settings import RunSettings
from atoll.families.sampler_heads import HEAD_IDS, HEAD_LOG_PROBS
from torch import Tensor

_MASKED_LOG_PROB = -30.0
"""Stands for the head of a masked token: any finite number would do."""


@dataclass(frozen=True, slots=True)
class ScoreCentering:
    """The correction for one loss. Example: `ScoreCentering(PolicyGradientWeight.none(), top_k=128)`."""

    weight: PolicyGradientWeight
    top_k: int = 128
    min_tail_mass: float = 1e-6

    @classmethod
    def of_run(cls, run: RunSettings, weight: PolicyGradientWeight | None) -> "ScoreCentering | None":
        """The correction that a run asks for; None when it is off.

        Raises: ValueError when it is on for a loss without a weight, which the family should have refused.
        """
        if not run.score_centering:
            return None
        if weight is None:
            raise ValueError("score centering needs a loss that declares its policy-gradient weight")
        return cls(weight, run.score_centering_top_k, run.score_centering_min_tail_mass)

    def __call__(
        self, batch: LossBatch, logits: Tensor, advantages: Tensor, reduce: Reducer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The reduced term, to be added to the loss, and its metrics.

        logits [S, V_local]; advantages [T] of the loss, finite everywhere. Raises: ValueError without a head.
        """
        if HEAD_IDS not in batch.columns or HEAD_LOG_PROBS not in batch.columns:
            raise ValueError(f"score centering needs the columns {HEAD_IDS} and {HEAD_LOG_PROBS} in the batch")
        ids = self._head(batch.columns[HEAD_IDS]).long().masked_fill(~batch.mask[:, None], 0)
        recorded = self._head(batch.columns[HEAD_LOG_PROBS])
        # In float64 from here on: coefficients and tails are differences of numbers that are nearly the same.
        log_q = reduce.neutral(recorded, _MASKED_LOG_PROB).double()
        log_p = reduce.neutral(
            log_probs_at_top_ids(logits, ids, batch.temperatures, batch.shard, logit_rows=batch.logit_rows),
            _MASKED_LOG_PROB,
        ).double()
        q, p = log_q.exp(), log_p.detach().exp()
        q_tail, p_tail = 1 - q.sum(-1), 1 - p.sum(-1)
        rho = q_tail.clamp(min=self.min_tail_mass) / p_tail.clamp(min=self.min_tail_mass)
        alpha = rho * self._weight_of(1 / rho)
        coefficients = q * self._weight_of((log_p.detach() - log_q).exp()) - alpha[:, None] * p
        term = reduce(advantages.detach() * (coefficients * log_p).sum(-1))
        clipped = (q_tail < self.min_tail_mass) | (p_tail < self.min_tail_mass)
        return term, {
            "score_centering_term": term.detach(),
            "score_centering_correction_l1": reduce.metric(coefficients.abs().sum(-1)),
            "score_centering_sampler_head_mass": reduce.metric(q.sum(-1)),
            "score_centering_trainer_head_mass": reduce.metric(p.sum(-1)),
            "score_centering_tail_ratio": reduce.metric(rho),
            "score_centering_tail_clipped": reduce.metric(clipped.to(rho.dtype)),
        }

    def _head(self, column: Tensor) -> Tensor:
        # A batch without rows knows no K.
        return column[:, : self.top_k] if column.ndim == 2 else column.new_zeros(0, self.top_k)

    def _weight_of(self, ratio: Tensor) -> Tensor:
        """f(p / q)."""
        match self.weight.form:
            case WeightForm.NONE:
                return torch.ones_like(ratio)
            case WeightForm.TRUNCATED:
                return ratio.clamp(max=self.weight.upper)
            case WeightForm.MASKED:
                inside = (ratio > (self.weight.lower or 0.0)) & (ratio < (self.weight.upper or torch.inf))
                return torch.where(inside, ratio, 0)
