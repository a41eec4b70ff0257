"""Ids that a teacher service chose. Its model may have columns that the student's vocabulary has not: the tokenizers
are the same, but models pad their vocabularies differently."""

from atoll.families.refusals import sample_refused
from atoll.families.rows import Int32, Row
from atoll.families.run_settings import RunSettings


def refuse_foreign_ids(row: Row, ids: Int32, run: RunSettings | None, field: str) -> None:
    """Raises InvalidInput naming the sample for ids [..., K] outside the student's vocabulary; `run` None: unknown."""
    if run is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < run.vocab_size:
        raise sample_refused(
            row.sample_id,
            f"the teacher chose ids {ids.min()}..{ids.max()}, the student has those of "
            f"[0, {run.vocab_size}); lower top_k, or take a teacher with the student's vocabulary",
            field=field,
        )
