"""A job's family inside a worker: resolved from its reference, checked, and fed micro-batches of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.families.catalog import make_family
from atoll.families.losses.batch import LossBatch, build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.policy_loss import LossResult
from atoll.families.losses.vocab import VocabShard
from atoll.families.run_settings import HookArgs
from atoll.families.steps import TrainRow
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.passes import Places
from torch import Tensor


class Objective:
    """The family of one job. Raises what `LossFunction` raises."""

    def __init__(self, binding: FamilyBinding, shard: VocabShard, member: Membership) -> None:
        family = make_family(binding.reference, binding.options).bind(binding.run)
        self.name = family.name
        self.needs = family.configure_backend(binding.run)
        self.args = HookArgs(family.options, binding.run)
        self.function = LossFunction(family, binding.run)
        self._columns = family.run_columns(binding.run)
        self._shard = shard
        self._member = member

    def batch(
        self,
        rows: Sequence[TrainRow],
        places: Places,
        old_log_probs: Sequence[Tensor] | None = None,
        ref_log_probs: Sequence[Tensor] | None = None,
    ) -> LossBatch:
        """A micro-batch as losses see it; log-probs are per row, [R]. Columns that the rows do not have are left out.

        ``places`` are those of the rows in the pack; one of no rows has a dummy's.
        """
        mine = places[: len(rows)]
        return build_loss_batch(
            rows,
            shard=self._shard,
            device=self._member.device,
            positions=mine,
            old_log_probs=_at(old_log_probs, mine),
            ref_log_probs=_at(ref_log_probs, mine),
            columns=[spec for spec in self._columns if all(spec.name in item.columns for item in rows)],
            context_group=self._member.context_group,
        )

    def loss(
        self,
        rows: Sequence[TrainRow],
        places: Places,
        logits: Tensor,
        old_log_probs: Sequence[Tensor] | None,
        ref_log_probs: Sequence[Tensor] | None,
    ) -> LossResult:
        """A micro-batch's part of the step, for logits [n, V_local] of its response tokens on this rank."""
        return self.function(self.batch(rows, places, old_log_probs, ref_log_probs), logits)


def _at(log_probs: Sequence[Tensor] | None, places: Places) -> list[Tensor] | None:
    if log_probs is None:
        return None
    return [whole[at] for whole, at in zip(log_probs, places, strict=True)]
