"""Packed tensors: the bytes that the database stores and the wire carries, as NumPy arrays without a copy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.api.tensor.v1 import tensor_pb2
from atoll.common.errors import InternalError
from numpy.typing import NDArray

Array = NDArray[np.int32] | NDArray[np.uint8] | NDArray[np.float32]

CHUNK_BYTES = 1 << 20
"""Largest piece of a stream: far below gRPC's default limit of 4 MB for a message, large enough to amortise it."""

_DTYPES: dict[int, np.dtype[np.int32] | np.dtype[np.uint8] | np.dtype[np.float32]] = {
    tensor_pb2.D_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.D_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.D_TYPE_FLOAT32: np.dtype("<f4"),
}
_ENUM_OF = {dtype: enum for enum, dtype in _DTYPES.items()}


def spec_of(name: str, array: Array) -> tensor_pb2.TensorSpec:
    """The announcement of an array. Raises KeyError for a dtype that the wire does not have: a defect."""
    return tensor_pb2.TensorSpec(name=name, dtype=_ENUM_OF[array.dtype], shape=array.shape)  # type: ignore[arg-type]


def chunks_of(arrays: Sequence[Array]) -> Iterator[bytes]:
    """Cuts the concatenated bytes of the arrays into pieces of at most CHUNK_BYTES."""
    joined = b"".join(np.ascontiguousarray(array).data.cast("B") if array.size else b"" for array in arrays)
    for start in range(0, len(joined), CHUNK_BYTES):
        yield joined[start : start + CHUNK_BYTES]


class TensorReader:
    """Collects the chunks that follow a list of specs.

    Example: reader = TensorReader(header.tensors); reader.add(chunk); reader.complete and reader.arrays()
    """

    def __init__(self, specs: Sequence[tensor_pb2.TensorSpec]) -> None:
        self._specs = list(specs)
        self._sizes = [int(np.prod(s.shape, dtype=np.int64)) * _DTYPES[s.dtype].itemsize for s in self._specs]
        self._expected = sum(self._sizes)
        self._parts: list[bytes] = []
        self._received = 0

    @property
    def complete(self) -> bool:
        return self._received == self._expected

    def add(self, chunk: bytes) -> None:
        """Raises InternalError when more bytes arrive than were announced."""
        self._parts.append(chunk)
        self._received += len(chunk)
        if self._received > self._expected:
            raise InternalError(
                f"tensor stream: {self._received} bytes arrived, {self._expected} were announced",
                reason=errors_pb2.REASON_INTERNAL,
            )

    def arrays(self) -> Mapping[str, Array]:
        """The tensors by name, read-only views of the received bytes. Raises InternalError when bytes are missing."""
        if not self.complete:
            raise InternalError(f"tensor stream ended after {self._received} of {self._expected} bytes")
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        out: dict[str, Array] = {}
        start = 0
        for spec, size in zip(self._specs, self._sizes, strict=True):
            flat = np.frombuffer(
                data, dtype=_DTYPES[spec.dtype], count=size // _DTYPES[spec.dtype].itemsize, offset=start
            )
            out[spec.name] = cast(Array, flat.reshape(tuple(spec.shape)))
            start += size
        return out
