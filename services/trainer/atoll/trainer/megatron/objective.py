"""A job's family inside a worker: resolved from its reference, checked, and fed micro-batches of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from atoll.families.catalog import make_family
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.policy_loss import LossResult
from atoll.families.losses.vocab import VocabShard, log_probs_at_ids
from atoll.families.rows import Row
from atoll.families.steps import TrainRow
from atoll.trainer.backend import FamilyBinding
from torch import Tensor


class Objective:
    """The loss of one job. Raises what `LossFunction` raises."""

    def __init__(self, binding: FamilyBinding, shard: VocabShard, device: torch.device) -> None:
        family = make_family(binding.reference, binding.options).bind(binding.run)
        self.needs = family.configure_backend(binding.run)
        self._loss = LossFunction(family, binding.run)
        self._columns = family.run_columns(binding.run)
        self._shard = shard
        self._device = device

    def loss(
        self,
        rows: Sequence[TrainRow],
        logits: Tensor,
        old_log_probs: Sequence[Tensor] | None,
        ref_log_probs: Sequence[Tensor] | None,
    ) -> LossResult:
        """A micro-batch's part of the step, for logits [T, V_local] of its response tokens."""
        batch = build_loss_batch(
            rows,
            shard=self._shard,
            device=self._device,
            old_log_probs=old_log_probs,
            ref_log_probs=ref_log_probs,
            columns=self._columns,
        )
        return self._loss(batch, logits)


def response_log_probs(rows: Sequence[Row], logits: Tensor, shard: VocabShard) -> Tensor:
    """float32 [T]: log-probs of the rows' response tokens, row after row, each row at its temperature."""
    if not rows:
        return logits.new_zeros(0)
    ids = np.concatenate([row.response_tokens for row in rows])
    temperatures = np.repeat([row.temperature for row in rows], [row.response_length for row in rows])
    return log_probs_at_ids(
        logits,
        torch.as_tensor(ids, dtype=torch.int64, device=logits.device),
        torch.as_tensor(temperatures, dtype=torch.float32, device=logits.device),
        shard,
    )
