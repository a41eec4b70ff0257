"""Which candidate teaches a token, and which ids it teaches. Shapes: C candidates, R response tokens, K ids."""

from dataclasses import dataclass

import torch
from atoll.families.openclawrl.spec import HintScope, HintSelection, Subset
from torch import Tensor

NO_ID = -1


@dataclass(frozen=True, slots=True, eq=False)
class CandidateScores:
    """What the teacher says under one candidate."""

    length: int
    """Tokens of the candidate, its response included."""
    native_ids: Tensor
    """int64 [R, K] its own most likely ids, most likely first."""
    native_log_probs: Tensor
    """float32 [R, K]"""
    sampler_log_probs: Tensor
    """float32 [R, K] at the engine's ids; anything where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What is distilled. Example: with ids [[5, 9, -1], [-1, -1, -1]], two ids at the first token and none after."""

    ids: Tensor
    """int32 [R, K], -1 where a place holds none."""
    log_probs: Tensor
    """float32 [R, K], 0 where a place holds none."""
    overlap: Tensor
    """float32 [R]"""


def choose_lesson(
    candidates: list[CandidateScores],
    sampler_ids: Tensor,
    trained: Tensor,
    selection: HintSelection,
    subset: Subset,
    scope: HintScope = HintScope.SAMPLE,
) -> Lesson:
    """Selects a candidate for every token and cuts its subset.

    sampler_ids int64 [R, K], -1 where a place holds none; trained bool [R]. A candidate's own ids count as far as the
    engine named any: its top |S^q|. Ties go to the first candidate.
    """
    present = sampler_ids >= 0
    sizes = present.sum(-1, keepdim=True)
    native = torch.stack([each.native_ids for each in candidates])
    in_native = torch.arange(native.shape[-1]) < sizes
    native = native.masked_fill(~in_native, NO_ID)
    shared = ((sampler_ids[None, :, :, None] == native[:, :, None, :]).any(-1)) & present
    overlaps = shared.sum(-1)
    chosen = _choose(candidates, overlaps, trained, selection, scope)
    tokens = torch.arange(len(sampler_ids))
    log_probs = torch.stack([each.sampler_log_probs for each in candidates])[chosen, tokens]
    match subset:
        case Subset.STUDENT:
            ids = sampler_ids
        case Subset.OVERLAP:
            ids = sampler_ids.masked_fill(~shared[chosen, tokens], NO_ID)
        case Subset.TEACHER:
            ids = native[chosen, tokens]
            log_probs = torch.stack([each.native_log_probs for each in candidates])[chosen, tokens]
    return Lesson(
        ids.to(torch.int32),
        log_probs.float().masked_fill(ids < 0, 0),
        overlaps[chosen, tokens] / sizes[:, 0].clamp(min=1),
    )


def _choose(
    candidates: list[CandidateScores], overlaps: Tensor, trained: Tensor, selection: HintSelection, scope: HintScope
) -> Tensor:
    """int64 [R] the candidate of every token, from overlaps int64 [C, R]."""
    match selection:
        case HintSelection.SHORTEST:
            best = min(range(len(candidates)), key=lambda number: candidates[number].length)
            return torch.full((overlaps.shape[1],), best, dtype=torch.int64)
        case HintSelection.SEQUENCE_OPTIMAL:
            spans = _spans(trained) if scope is HintScope.SPAN else torch.zeros_like(trained, dtype=torch.int64)
            totals = overlaps.new_zeros(len(candidates), len(trained))
            return _first_best(totals.index_add_(1, spans, overlaps * trained))[spans]
        case HintSelection.TOKEN_OPTIMAL:
            return _first_best(overlaps)


def _spans(trained: Tensor) -> Tensor:
    """int64 [R] the number of the run of trained tokens that each token is in, or that came before it."""
    starts = trained.clone()
    starts[1:] &= ~trained[:-1]
    return (starts.cumsum(0) - 1).clamp(min=0)


def _first_best(overlaps: Tensor) -> Tensor:
    """The first candidate of the most, for every column of [C, n]."""
    # Not argmax: which of several maxima it returns is not promised.
    return (overlaps == overlaps.amax(0)).int().cumsum(0).eq(0).sum(0)
