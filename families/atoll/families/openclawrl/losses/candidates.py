"""Scores every hint candidate of a row with the frozen base, and leaves the lesson in the row's columns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from atoll.families.losses.actor import Actor, RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.top_k import log_probs_at_top_ids, top_k_ids
from atoll.families.openclawrl.losses.selection import CandidateScores, choose_lesson
from atoll.families.openclawrl.service import SERVICE_IDS, SERVICE_LOG_PROBS
from atoll.families.openclawrl.spec import (
    HINT_LENGTHS,
    HINT_OVERLAP,
    HINT_TOKENS,
    SAMPLER_IDS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    OpenClawRlOptions,
)
from atoll.families.steps import TrainRow
from torch import Tensor


def teach(actor: Actor, weights: str, data: RolloutData, options: OpenClawRlOptions) -> None:
    """Adds the teacher's columns to the rows. On a rank that computes no loss the rows stay as they are."""
    candidates = [candidate_rows(item) for item in data.rows]
    every = [candidate for of_row in candidates for candidate in of_row]
    found = iter(actor.forward_rows(weights, every, _read_scores))
    taught = []
    for item, of_row in zip(data.rows, candidates, strict=True):
        scores = [next(found) for _ in of_row]
        taught.append(_taught(item, of_row, scores, options) if all(scores) else item)
    data.rows = taught


def teach_from_service(data: RolloutData, options: OpenClawRlOptions) -> None:
    """The same with what the teacher service said before the job."""
    data.rows = [_taught(item, of_row := candidate_rows(item), _told(item, len(of_row)), options) for item in data.rows]


def candidate_rows(item: TrainRow) -> list[TrainRow]:
    """A row per candidate: its prompt and the row's own response; the row itself where there are no candidates."""
    prompts = np.split(item.columns[HINT_TOKENS], np.cumsum(item.columns[HINT_LENGTHS]))[:-1]
    return [
        replace(
            item,
            row=replace(
                item.row,
                sample_id=f"{item.row.sample_id}/hint-{number}",
                tokens=np.concatenate([prompt, item.row.response_tokens]).astype(np.int32),
                prompt_length=len(prompt),
            ),
        )
        for number, prompt in enumerate(prompts)
    ] or [item]


def _read_scores(batch: LossBatch, logits: Tensor) -> Mapping[str, Tensor]:
    sampler = batch.columns[SAMPLER_IDS].long()
    native = top_k_ids(logits, sampler.shape[-1], batch.shard, logit_rows=batch.logit_rows)
    # One pass over the logits for both sets of ids.
    ids = torch.cat([native, sampler.clamp(min=0)], 1)
    log_probs = log_probs_at_top_ids(logits, ids, batch.temperatures, batch.shard, logit_rows=batch.logit_rows)
    top_k = sampler.shape[-1]
    return {
        "native_ids": native,
        "native_log_probs": log_probs[:, :top_k],
        "sampler_log_probs": log_probs[:, top_k:],
    }


def _told(item: TrainRow, candidates: int) -> list[Mapping[str, Tensor]]:
    """The service's scores of every candidate. At an engine's id that is not among its own it said nothing: 0."""
    sampler = torch.as_tensor(item.columns[SAMPLER_IDS], dtype=torch.int64)
    shape = (candidates, *sampler.shape)
    every_ids = torch.as_tensor(item.columns[SERVICE_IDS], dtype=torch.int64).reshape(shape)
    every_log_probs = torch.as_tensor(item.columns[SERVICE_LOG_PROBS]).reshape(shape)
    return [
        {
            "native_ids": ids,
            "native_log_probs": log_probs,
            "sampler_log_probs": torch.where(sampler[:, :, None] == ids[:, None, :], log_probs[:, None, :], 0).sum(-1),
        }
        for ids, log_probs in zip(every_ids, every_log_probs, strict=True)
    ]


def _taught(
    item: TrainRow,
    candidates: Sequence[TrainRow],
    scores: Sequence[Mapping[str, Tensor]],
    options: OpenClawRlOptions,
) -> TrainRow:
    lesson = choose_lesson(
        [
            CandidateScores(
                len(candidate.row.tokens), each["native_ids"], each["native_log_probs"], each["sampler_log_probs"]
            )
            for candidate, each in zip(candidates, scores, strict=True)
        ],
        torch.as_tensor(item.columns[SAMPLER_IDS], dtype=torch.int64),
        torch.as_tensor(item.mask, dtype=torch.bool),
        options.hint_selection,
        options.subset,
        options.hint_scope,
    )
    columns = {
        TEACHER_IDS: lesson.ids.numpy(),
        TEACHER_LOG_PROBS: lesson.log_probs.numpy(),
        HINT_OVERLAP: lesson.overlap.numpy(),
    }
    return replace(item, columns={**item.columns, **columns})
