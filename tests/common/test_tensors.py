import numpy as np
import pytest
from atoll.common.errors import InternalError
from atoll.common.tensors import CHUNK_BYTES, TensorReader, chunks_of, spec_of


def read_back(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    reader = TensorReader([spec_of(name, array) for name, array in arrays.items()])
    for chunk in chunks_of(list(arrays.values())):
        assert len(chunk) <= CHUNK_BYTES
        reader.add(chunk)
    return dict(reader.arrays())


def test_arrays_of_every_dtype_and_shape_come_back_equal() -> None:
    arrays = {
        "ids": np.arange(700_000, dtype="<i4"),
        "mask": np.array([1, 0, 255], dtype="u1"),
        "log_probs": np.array([[-1.5, -np.inf], [np.float32(1e-30), 0.0]], dtype="<f4"),
        "nothing": np.zeros((0, 8), dtype="<f4"),
    }
    back = read_back(arrays)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_a_row_without_bytes_is_complete_at_once() -> None:
    back = read_back({"nothing": np.zeros(0, dtype="<i4")})
    assert back["nothing"].shape == (0,)


def test_bytes_are_little_endian_row_major() -> None:
    assert b"".join(chunks_of([np.array([[1, 2], [3, 4]], dtype="<i4").T])) == bytes.fromhex(
        "01000000 03000000 02000000 04000000"
    )


def test_missing_and_extra_bytes_are_errors() -> None:
    specs = [spec_of("ids", np.zeros(2, dtype="<i4"))]
    short = TensorReader(specs)
    short.add(b"1234")
    with pytest.raises(InternalError, match="4 of 8 bytes"):
        short.arrays()
    with pytest.raises(InternalError, match="12 bytes arrived, 8 were announced"):
        TensorReader(specs).add(b"123456789012")
