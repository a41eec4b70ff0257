"""Hint candidates scored by the teacher service before the job runs, in place of the frozen base in the workers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from atoll.common.errors import BadConfiguration
from atoll.families.driver import JobContext, ScoreRequest, TeacherScores
from atoll.families.refusals import sample_refused
from atoll.families.rows import Batch, Column, Int32, Row
from atoll.families.run_settings import RunSettings
from atoll.families.teacher_ids import refuse_foreign_ids

SERVICE_IDS = "hint_native_ids"
"""int32 [C * R, K] the service's own most likely ids under every candidate, one candidate after another."""
SERVICE_LOG_PROBS = "hint_native_log_probs"
"""float32 [C * R, K] its log-probs there."""


def candidate_prompts(row: Row, tokens: Column, lengths: Column) -> list[Int32]:
    """The prompts that teach the row: its candidates', or its own where it has none."""
    found = np.split(tokens, np.cumsum(lengths))[:-1]
    return [prompt.astype(np.int32) for prompt in found] or [row.tokens[: row.prompt_length]]


def with_service_scores(
    batch: Batch, context: JobContext, prompts: Sequence[Sequence[Int32]], top_k: int, run: RunSettings | None
) -> Batch:
    """The rows with what the service says about every candidate. `prompts`: of every row.

    Raises: BadConfiguration without a service; InvalidInput naming a sample that it cannot score faithfully.
    """
    if context.teacher is None:
        raise BadConfiguration(
            "openclawrl: teacher service needs a teacher service; set ATOLL_TRAINER_TEACHER or teacher base",
            field="teacher",
        )
    requests = [
        _request(row, number, prompt, top_k)
        for row, of_row in zip(batch.rows, prompts, strict=True)
        for number, prompt in enumerate(of_row)
    ]
    scores = iter(context.teacher.score(requests))
    rows = []
    for row, of_row in zip(batch.rows, prompts, strict=True):
        told = _told(row, [next(scores) for _ in of_row], top_k)
        refuse_foreign_ids(row, told[SERVICE_IDS].astype(np.int32), run, SERVICE_IDS)
        rows.append(replace(row, columns={**row.columns, **told}))
    return replace(batch, rows=tuple(rows))


def _request(row: Row, number: int, prompt: Int32, top_k: int) -> ScoreRequest:
    if row.temperature != 1:
        raise sample_refused(
            row.sample_id,
            f"a teacher service scores at temperature 1, got {row.temperature:g}; sample at "
            "temperature 1 or set teacher base",
            field="temperature",
        )
    tokens = np.concatenate([prompt, row.response_tokens]).astype(np.int32)
    return ScoreRequest(f"{row.sample_id}/hint-{number}", tokens, len(prompt), top_k)


def _told(row: Row, scores: Sequence[TeacherScores], top_k: int) -> dict[str, Column]:
    ids, log_probs = [], []
    for each in scores:
        wanted = (row.response_length, top_k)
        if each.top_k_ids is None or each.top_k_log_probs is None or each.top_k_ids.shape != wanted:
            raise sample_refused(
                row.sample_id,
                f"the teacher should answer {top_k} ids for each of {row.response_length} "
                f"tokens, got {None if each.top_k_ids is None else list(each.top_k_ids.shape)}",
                field=SERVICE_IDS,
            )
        ids.append(each.top_k_ids)
        log_probs.append(each.top_k_log_probs)
    return {
        SERVICE_IDS: np.concatenate(ids).astype(np.int32),
        SERVICE_LOG_PROBS: np.concatenate(log_probs).astype(np.float32),
    }
