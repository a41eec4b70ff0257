"""How a sample stands in the database: plain columns, and its tensors as the bytes that go on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import orjson
from atoll.api.errors.v1 import errors_pb2
from atoll.api.tensor.v1 import tensor_pb2
from atoll.common.errors import InternalError, InvalidInput
from atoll.common.structs import check_depth
from atoll.families.rows import Float32, Int32, UInt8, VersionSpan
from atoll.gateway.database import microseconds, moment_of
from atoll.gateway.records import NewSample, PackedSample, Sample, SampleState
from atoll.gateway.tables import sample_claims, samples
from sqlalchemy import Row
from sqlalchemy.sql import ColumnElement


class SampleRow(TypedDict):
    """The columns of `samples` as they are inserted. Example: see `pack`."""

    scenario: str
    receipt: str
    created_us: int
    prompt_length: int
    response_length: int
    top_k: int
    temperature: float
    exact: bool
    aborted: bool
    finish_reason: str
    spans: str
    sampling: str
    request: str
    text: str
    tensors: bytes
    conversation: str | None


@dataclass(frozen=True, slots=True, eq=False)
class SampleTensors:
    """The arrays of a sample or a row, in the order in which their bytes are stored."""

    token_ids: Int32
    """[P + R]"""
    loss_mask: UInt8
    """[R]"""
    log_probs: Float32
    """[R]"""
    top_k_ids: Int32 | None = None
    """[R, K]"""
    top_k_log_probs: Float32 | None = None
    """[R, K]"""


def pack_tensors(tensors: SampleTensors) -> bytes:
    """Little-endian, no padding."""
    parts = [
        tensors.token_ids.astype("<i4", copy=False).tobytes(),
        tensors.loss_mask.tobytes(),
        tensors.log_probs.astype("<f4", copy=False).tobytes(),
    ]
    if tensors.top_k_ids is not None and tensors.top_k_log_probs is not None:
        parts.append(tensors.top_k_ids.astype("<i4", copy=False).tobytes())
        parts.append(tensors.top_k_log_probs.astype("<f4", copy=False).tobytes())
    return b"".join(parts)


def unpack_tensors(packed: PackedSample) -> SampleTensors:
    """Views on the stored bytes, which `check_size` has accepted."""
    sample, data = packed.sample, packed.tensors
    response, k = sample.response_length, sample.top_k
    total = sample.prompt_length + response
    mask_at = 4 * total
    log_probs_at = mask_at + response
    ids_at = log_probs_at + 4 * response
    candidates_at = ids_at + 4 * response * k
    return SampleTensors(
        token_ids=np.frombuffer(data, "<i4", total),
        loss_mask=np.frombuffer(data, "u1", response, offset=mask_at),
        log_probs=np.frombuffer(data, "<f4", response, offset=log_probs_at),
        top_k_ids=np.frombuffer(data, "<i4", response * k, offset=ids_at).reshape(response, k) if k else None,
        top_k_log_probs=np.frombuffer(data, "<f4", response * k, offset=candidates_at).reshape(response, k)
        if k
        else None,
    )


def pack(sample: NewSample) -> SampleRow:
    """The row of a checked sample. Raises InvalidInput for a request that no message could carry."""
    tensors = SampleTensors(
        np.concatenate([sample.prompt_ids, sample.response_ids]),
        sample.loss_mask,
        sample.log_probs,
        sample.top_k_ids,
        sample.top_k_log_probs,
    )
    check_depth(dict(sample.request), "messages")
    try:
        sample.text.encode()
        request, sampling = orjson.dumps(sample.request).decode(), orjson.dumps(sample.sampling).decode()
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidInput(f"the request cannot be recorded: {error}", field="messages") from None
    return SampleRow(
        scenario=sample.scenario,
        receipt=sample.receipt,
        created_us=microseconds(sample.created_at),
        prompt_length=len(sample.prompt_ids),
        response_length=len(sample.response_ids),
        top_k=0 if sample.top_k_ids is None else sample.top_k_ids.shape[1],
        temperature=sample.temperature,
        exact=sample.exact,
        aborted=sample.aborted,
        finish_reason=sample.finish_reason,
        spans=pack_spans(sample.spans),
        sampling=sampling,
        request=request,
        text=sample.text,
        tensors=pack_tensors(tensors),
        conversation=sample.conversation,
    )


def row_bytes(row: SampleRow) -> int:
    """About how much memory and disk a row takes."""
    return len(row["tensors"]) + len(row["request"]) + len(row["text"]) + 512


def pack_spans(spans: Sequence[VersionSpan]) -> str:
    """Example: '[[0,17,"1:4"]]'."""
    return orjson.dumps([[span.start, span.end, span.weight_version] for span in spans]).decode()


def unpack_spans(packed: str) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start, end, version) for start, end, version in orjson.loads(packed))


def sample_columns() -> Sequence[ColumnElement[object]]:
    """What `unpack` reads from `samples` joined with `sample_claims`."""
    own = [column for column in samples.c if column.name not in ("position", "tensors", "conversation")]
    claim = sample_claims.c
    return [*own, claim.state, claim.job_id, claim.code, claim.reason]


def unpack(row: Row[tuple[object, ...]]) -> Sample:
    """The sample of a row of `sample_columns`."""
    at = row._mapping
    return Sample(
        scenario=at[samples.c.scenario],
        receipt=at[samples.c.receipt],
        state=SampleState(at[sample_claims.c.state] or SampleState.PENDING),
        created_at=moment_of(at[samples.c.created_us]),
        prompt_length=at[samples.c.prompt_length],
        response_length=at[samples.c.response_length],
        top_k=at[samples.c.top_k],
        temperature=at[samples.c.temperature],
        exact=at[samples.c.exact],
        finish_reason=at[samples.c.finish_reason],
        aborted=at[samples.c.aborted],
        spans=unpack_spans(at[samples.c.spans]),
        request=orjson.loads(at[samples.c.request]),
        text=at[samples.c.text],
        sampling=orjson.loads(at[samples.c.sampling]),
        job_id=at[sample_claims.c.job_id] or "",
        settled_code=at[sample_claims.c.code] or "",
        settled_reason=at[sample_claims.c.reason] or "",
    )


def tensor_specs(sample: Sample) -> list[tensor_pb2.TensorSpec]:
    """What the stored bytes of a sample hold, in their order."""
    total = sample.prompt_length + sample.response_length
    specs = [
        _spec("token_ids", tensor_pb2.D_TYPE_INT32, total),
        _spec("loss_mask", tensor_pb2.D_TYPE_UINT8, sample.response_length),
        _spec("log_probs", tensor_pb2.D_TYPE_FLOAT32, sample.response_length),
    ]
    if sample.top_k:
        specs.append(_spec("top_k_ids", tensor_pb2.D_TYPE_INT32, sample.response_length, sample.top_k))
        specs.append(_spec("top_k_log_probs", tensor_pb2.D_TYPE_FLOAT32, sample.response_length, sample.top_k))
    return specs


def check_size(sample: Sample, tensors: bytes) -> None:
    """Raises InternalError(SAMPLE_CORRUPT) when the stored bytes are not those that were recorded."""
    response = sample.response_length
    expected = 4 * (sample.prompt_length + response) + 5 * response + 8 * response * sample.top_k
    if len(tensors) != expected:
        raise InternalError(
            f"sample {sample.receipt}: {len(tensors)} bytes of tensors are stored, expected {expected} for "
            f"{sample.prompt_length} prompt and {response} response tokens and top-k {sample.top_k}",
            reason=errors_pb2.REASON_SAMPLE_CORRUPT,
        )


def _spec(name: str, dtype: tensor_pb2.DType.ValueType, *shape: int) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(name=name, dtype=dtype, shape=shape)
