"""From pulled samples to optimizer steps: the family shapes rows, makes its signal of the batch, and cuts it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from atoll.common.errors import AtollError
from atoll.families.catalog import AnyFamily
from atoll.families.driver import JobContext
from atoll.families.refusals import sample_refused
from atoll.families.rows import Batch, Row, validate_rows
from atoll.families.run_settings import RunSettings
from atoll.families.sampler_heads import sampler_head_columns
from atoll.families.samples import ReportedSample, RowContext
from atoll.families.signal import FamilyState
from atoll.families.steps import TrainStep, build_train_steps
from atoll.trainer.job_families import JobFamily, refuse_other_reports


@dataclass(frozen=True, eq=False)
class PreparedJob:
    """What RUNNING needs."""

    steps: tuple[TrainStep, ...]
    new_state: FamilyState
    """The family's state once the job commits."""
    metrics: Mapping[str, float]


def shape_batch(
    job_id: str,
    attempt: int,
    items: Sequence[ReportedSample],
    job: JobFamily,
) -> Batch:
    """Rows in the order of the samples. Pure.

    Raises InvalidInput (BATCH_REFUSED and others) naming the sample that cannot be trained.
    """
    family, run = job.family, job.run
    if not job.is_own:
        refuse_other_reports(family, items)
    context = RowContext(tuple(items), job.renderer)
    rows = tuple(family.shape_sample_row(item, context) for item in items)
    if run.score_centering:
        rows = tuple(_with_sampler_head(row, item, family, run) for row, item in zip(rows, items, strict=True))
    validate_rows(rows, vocab_size=run.vocab_size, columns=family.run_columns(run))
    for row in rows:
        if len(row.tokens) > run.seq_length:
            raise sample_refused(
                row.sample_id,
                f"{len(row.tokens)} tokens, the workers take at most {run.seq_length}; "
                "raise ATOLL_TRAINER_SEQ_LENGTH or limit the replies",
                field="tokens",
            )
    return Batch(job_id, attempt, rows)


def _with_sampler_head(row: Row, item: ReportedSample, family: AnyFamily, run: RunSettings) -> Row:
    head = sampler_head_columns(
        row,
        family.effective_mask(row),
        item.sample.top_k_ids,
        item.sample.top_k_log_probs,
        top_k=run.score_centering_top_k,
        vocab_size=run.vocab_size,
    )
    return replace(row, columns={**row.columns, **head})


def score_batch(batch: Batch, family: AnyFamily, context: JobContext) -> Batch:
    """What the family does before `prepare`, such as asking the teacher: all of it before the job is RUNNING."""
    return family.prepare_rollout(batch, context)


def prepare_batch(batch: Batch, family: AnyFamily, state: FamilyState, context: JobContext) -> PreparedJob:
    """The family's signal for the whole batch, cut into steps with every row's weights. Pure.

    Raises InvalidInput naming what the family refuses.
    """
    signal = family.prepare(batch, state)
    steps = build_train_steps(family, batch, signal)
    metrics = {
        **{f"{family.name}/{name}": float(value) for name, value in signal.metrics.items()},
        **{f"rollout/{name}": float(value) for name, value in family.rollout_metrics(batch, context).items()},
        "reward/mean": mean_reward(batch),
        "train/optimizer_steps": float(len(steps)),
        "train/rows": float(len(batch.rows)),
        "train/tokens": float(sum(len(row.tokens) for row in batch.rows)),
        "train/trained_tokens": float(sum(int(row.mask.sum()) for step in steps for row in step.rows)),
    }
    return PreparedJob(steps, signal.new_state, metrics)


def mean_reward(batch: Batch) -> float:
    """The mean over rollouts: rows of one trajectory share a reward and count once."""
    return float(np.mean(list({row.rollout_id: row.reward for row in batch.rows}.values())))


def sample_of(error: AtollError, sample_ids: Sequence[str]) -> tuple[str, ...]:
    """The job's samples that a refusal blames."""
    return tuple(sample_id for sample_id in sample_ids if sample_id in error.sample_ids)
