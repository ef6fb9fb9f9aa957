"""Numpy arrays in messages: dense and sparse tensors, and the ragged arrays of one field of all datums.

T positions, K entries at one position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from flows.service.wire.message_table import DTYPES, message
from rl_core.errors import ServiceError
from rl_core.service.requests import dense_rows

__all__ = ["DenseBudget", "add_records", "read_tensor", "tokens_of", "write_tensor"]

MOST_DENSE = 1 << 26  # cells of all sparse tensors of one request together, made dense
MOST_DIMENSIONS = 8
_BFLOAT16 = DTYPES["bfloat16"]
_NUMPY: dict[int, np.dtype[Any]] = {
    DTYPES["float32"]: np.dtype("<f4"),
    DTYPES["int64"]: np.dtype("<i8"),
    DTYPES["int32"]: np.dtype("<i4"),
    _BFLOAT16: np.dtype("<u2"),
}


class DenseBudget:
    """Cells that the sparse tensors of one request may still take: a few bytes can claim any size."""

    def __init__(self, cells: int = MOST_DENSE) -> None:
        self.left = cells

    def take(self, cells: int, place: str) -> None:
        """Raises: ServiceError (user) when the request has used up its share."""
        self.left -= cells
        if self.left < 0:
            raise ServiceError(f"{place}: sparse tensors of more than {MOST_DENSE} cells in one request", "user")


def _flat(data: bytes, dtype: np.dtype[Any], place: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ServiceError(f"{place}: {len(data)} bytes are no whole number of {dtype.name}", "user")
    return np.frombuffer(data, dtype)


def tokens_of(data: bytes, place: str) -> np.ndarray:
    """Tokens of a text chunk, int32 [T]."""
    return _flat(data, np.dtype("<i4"), place)


def read_tensor(tensor: Any, place: str, budget: DenseBudget, *, fill: int = 0) -> np.ndarray:
    """A tensor message as an array of float32 or integers; sparse rows are made dense.

    Args:
        fill: value of cells that a sparse tensor leaves out.
    Raises: ServiceError (user) where type, shape and bytes do not fit each other.
    """
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise ServiceError(f"{place}: dtype {tensor.dtype}, expected one of {DTYPES}", "user")
    shape = tuple(tensor.shape)
    if len(shape) > MOST_DIMENSIONS or any(not 0 <= size < 1 << 31 for size in shape):
        raise ServiceError(f"{place}: shape {str(shape)[:200]} is not possible", "user")
    encoding = tensor.WhichOneof("encoding")
    if encoding is None:
        raise ServiceError(f"{place}: holds no values", "user")
    if encoding == "dense":
        values = _widened(_flat(tensor.dense, dtype, place), tensor.dtype)
        if shape and math.prod(shape) != len(values):
            raise ServiceError(f"{place}: {len(values)} values do not fill shape {shape}", "user")
        return values.reshape(shape) if shape else values
    if len(shape) != 2:
        raise ServiceError(f"{place}: a sparse tensor has two dimensions, not shape {shape}", "user")
    budget.take(math.prod(shape), place)
    rows, index = tensor.sparse_csr, np.dtype("<i8")
    values = _widened(_flat(rows.values, dtype, place), tensor.dtype)
    starts = _flat(rows.crow_indices, index, f"{place}.crow_indices")
    columns = _flat(rows.col_indices, index, f"{place}.col_indices")
    try:
        return dense_rows(values, starts, columns, (shape[0], shape[1]), fill=fill)
    except ServiceError as error:
        raise ServiceError(f"{place}: {error}", "user") from None


def _widened(values: np.ndarray, dtype: int) -> np.ndarray:
    """Bfloat16 as float32, whose upper half it is; other types as they are."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == _BFLOAT16 else values


def write_tensor(tensor: Any, array: np.ndarray) -> None:
    """A dense array into a tensor message, as float32 or int64."""
    code = DTYPES["float32" if array.dtype.kind == "f" else "int64"]
    tensor.dense, tensor.dtype = array.astype(_NUMPY[code]).tobytes(), code
    tensor.shape.extend(array.shape)


def add_records(output: Any, outputs: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Outputs of all datums into `output.loss_fn_outputs`: one record for datums in a row with the same fields, types
    and sizes of all dimensions but the first, so that lengths may differ within it.
    """

    def kind(datum: Mapping[str, np.ndarray]) -> list[Any]:
        return sorted((name, array.dtype.kind, np.atleast_1d(array).shape[1:]) for name, array in datum.items())

    for _, group in groupby(outputs, kind):
        datums = list(group)
        record = message("ArrayRecord")
        record.num_datums = len(datums)
        for name in datums[0]:
            arrays = [np.atleast_1d(datum[name]) for datum in datums]
            code = DTYPES["float32" if arrays[0].dtype.kind == "f" else "int64"]
            parts = [array.astype(_NUMPY[code]).tobytes() for array in arrays]
            field = record.fields[name]
            field.data, field.dtype = b"".join(parts), code
            field.offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
            field.trailing_shape.extend(arrays[0].shape[1:])
        output.loss_fn_outputs.append(record)
