"""What is trained: rows of tokens with everything the recording knows about them.

Shapes: P prompt tokens, R response tokens. Arrays are NumPy, so that gateway and driver read them without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from atoll.families.refusals import batch_refused, sample_refused

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Column = npt.NDArray[np.generic]
"""An extra per-row array that a family declared with a `ColumnSpec`."""


class ColumnDtype(StrEnum):
    """Element type of an extra column, little-endian on the wire."""

    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class ColumnOrigin(StrEnum):
    """Who fills an extra column."""

    ROW = "row"
    """`LossFamily.shape_sample_row`: known from the sample and its report."""
    DRIVER = "driver"
    """`LossFamily.build_rollout_data`: known once the whole batch was prepared."""
    WORKER = "worker"
    """`actor_pre_train_hook`: known once a model has seen the row. Never on the wire."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """An extra column beyond the default row.

    Example: `ColumnSpec("teacher_tokens", ColumnDtype.INT32)` or
    `ColumnSpec("action_mask", ColumnDtype.UINT8, response_aligned=True)`.
    """

    name: str
    dtype: ColumnDtype
    origin: ColumnOrigin = ColumnOrigin.ROW
    response_aligned: bool = False
    """First axis is [R]: sliced for context parallelism exactly like the log-probs. May hold non-finite
    placeholders under the mask."""
    in_loss_batch: bool = True
    """Handed to the loss hooks as `LossBatch.columns[name]`."""
    logged: bool = False
    """A scalar per row that the step's log may average."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by one weight version. Example: `VersionSpan(0, 17, "1:4")`."""

    start: int
    end: int
    weight_version: str


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One recorded sample, ready to be trained.

    A rollout is one row, or several rows of one trajectory that share `rollout_id`. Example: prompt [5, 6],
    response [7, 2] of which both tokens are trained: `tokens=[5, 6, 7, 2], prompt_length=2, loss_mask=[1, 1]`.
    """

    sample_id: str
    rollout_id: str
    group_id: str
    """Rollouts that answer the same prompt share it; a family without groups repeats the rollout id."""
    tokens: Int32
    """[P+R] prompt, then response."""
    prompt_length: int
    """P, at least 1."""
    loss_mask: UInt8
    """[R] 1 on tokens that the policy is trained on."""
    rollout_log_probs: Float32
    """[R] log q(y_t): the engine's distribution after temperature, before top-k, top-p and min-p filters."""
    temperature: float
    """T > 0: every log-prob of this row is of softmax(logits / T)."""
    reward: float
    exact: bool = True
    """Whether `rollout_log_probs` are those of the plain policy at this temperature."""
    versions: tuple[VersionSpan, ...] = ()
    """Spans that cover [0, R)."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """The family's extra columns of origin `row`, by name."""

    @property
    def response_length(self) -> int:
        """R."""
        return len(self.tokens) - self.prompt_length

    @property
    def response_tokens(self) -> Int32:
        """[R] the response's ids."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows that one training job consumes, in the order of its reports."""

    job_id: str
    attempt: int
    """1 for the first try; a try after a crash counts up."""
    rows: tuple[Row, ...]


def validate_rows(rows: Sequence[Row], *, vocab_size: int, columns: Sequence[ColumnSpec] = ()) -> None:
    """Refuses rows that no loss may see, naming the sample and the field.

    Non-finite numbers under the mask are allowed here; on trained tokens they are refused.
    Raises: InvalidInput.
    """
    if not rows:
        raise batch_refused("the batch has no rows; form it from at least one sample", field="rows")
    seen: set[str] = set()
    for row in rows:
        if row.sample_id in seen:
            raise sample_refused(row.sample_id, "it is in the batch twice", field="sample_id")
        seen.add(row.sample_id)
        _validate_row(row, vocab_size)
        _validate_columns(row, columns)


def _validate_row(row: Row, vocab_size: int) -> None:
    def refuse(name: str, problem: str) -> Exception:
        return sample_refused(row.sample_id, f"{name} {problem}", field=name)

    for name, array, dtype in (
        ("tokens", row.tokens, np.int32),
        ("loss_mask", row.loss_mask, np.uint8),
        ("rollout_log_probs", row.rollout_log_probs, np.float32),
    ):
        if array.dtype != dtype or array.ndim != 1:
            raise refuse(name, f"must be one-dimensional {np.dtype(dtype)}, got {array.dtype} {array.shape}")
    if not 1 <= row.prompt_length < len(row.tokens):
        raise refuse("prompt_length", f"must be in [1, {len(row.tokens) - 1}], got {row.prompt_length}")
    length = row.response_length
    for name, size in (("loss_mask", len(row.loss_mask)), ("rollout_log_probs", len(row.rollout_log_probs))):
        if size != length:
            raise refuse(name, f"must have one entry for each of the {length} response tokens, got {size}")
    if int(row.tokens.min()) < 0 or int(row.tokens.max()) >= vocab_size:
        raise refuse("tokens", f"must be in [0, {vocab_size}), got {row.tokens.min()}..{row.tokens.max()}")
    if bool((row.loss_mask > 1).any()):
        raise refuse("loss_mask", f"must hold 0 and 1 only, got {int(row.loss_mask.max())}")
    if not (np.isfinite(row.temperature) and row.temperature > 0):
        raise refuse("temperature", f"must be above 0, got {row.temperature}: greedy samples have no policy gradient")
    if not row.exact:
        raise refuse("exact", "is false: its log-probs are not those of the plain policy, so no ratio can be formed")
    if not np.isfinite(row.reward):
        raise refuse("reward", f"must be finite, got {row.reward}")
    if not np.isfinite(row.rollout_log_probs[row.loss_mask == 1]).all():
        raise refuse("rollout_log_probs", "must be finite on every trained token")
    ends = [0, *(span.end for span in row.versions)]
    starts = [*(span.start for span in row.versions), length]
    if row.versions and ends != starts:
        raise refuse("versions", f"must cover [0, {length}) without a gap, got {row.versions}")


def _validate_columns(row: Row, columns: Sequence[ColumnSpec]) -> None:
    expected = {spec.name: spec for spec in columns if spec.origin is ColumnOrigin.ROW}
    if set(row.columns) != set(expected):
        raise sample_refused(
            row.sample_id, f"columns must be {sorted(expected)}, got {sorted(row.columns)}", field="columns"
        )
    for name, spec in expected.items():
        check_column(row, spec, row.columns[name])


def check_column(row: Row, spec: ColumnSpec, column: Column) -> None:
    """Refuses an extra column of another dtype, or one that should have an entry per response token and has not.

    Raises: InvalidInput naming the sample and the column.
    """
    if column.dtype != np.dtype(spec.dtype.value):
        raise sample_refused(
            row.sample_id,
            f"column {spec.name} must be {spec.dtype.value}, got {column.dtype}",
            field=spec.name,
        )
    if spec.response_aligned and column.shape[:1] != (row.response_length,):
        raise sample_refused(
            row.sample_id,
            f"column {spec.name} must start with an axis of the {row.response_length} "
            f"response tokens, got shape {column.shape}",
            field=spec.name,
        )
