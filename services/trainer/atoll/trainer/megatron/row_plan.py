"""Deals the rows of a step to data-parallel ranks and cuts each share into micro-batches. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.trainer.megatron.settings import MicroBatchLimit

RowPlan = tuple[tuple[tuple[int, ...], ...], ...]
"""Row indices by data rank, then by micro-batch. Every rank has equally many micro-batches; some may be empty."""


def plan_rows(lengths: Sequence[int], data_ranks: int, limit: MicroBatchLimit) -> RowPlan:
    """Balance rows of ``lengths`` tokens over ``data_ranks`` ranks by tokens, each share in the given order.

    Longest first to the emptiest rank (Graham, 1969). Example: lengths 9, 4, 5 on two ranks: row 0 | rows 1 and 2.
    """
    shares: list[list[int]] = [[] for _ in range(data_ranks)]
    loads = [0] * data_ranks
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        emptiest = loads.index(min(loads))
        shares[emptiest].append(row)
        loads[emptiest] += lengths[row]
    cut = [cut_rows(sorted(share), lengths, limit) for share in shares]
    most = max(1, *(len(micro_batches) for micro_batches in cut))
    return tuple(tuple(micro_batches + [()] * (most - len(micro_batches))) for micro_batches in cut)


def cut_rows(share: Sequence[int], lengths: Sequence[int], limit: MicroBatchLimit) -> list[tuple[int, ...]]:
    """Cut rows, given by their indices into ``lengths``, into micro-batches, in the given order."""
    micro_batches: list[list[int]] = []
    tokens = 0
    for row in share:
        full = not micro_batches or len(micro_batches[-1]) == limit.rows or tokens + lengths[row] > limit.tokens
        if full:
            micro_batches.append([])
            tokens = 0
        micro_batches[-1].append(row)
        tokens += lengths[row]
    return [tuple(micro_batch) for micro_batch in micro_batches]
