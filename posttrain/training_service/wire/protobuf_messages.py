"""Protobuf messages of the clients (package `tinker_public`), and numpy arrays inside them.

The message classes are built from the table below, with the field numbers of the public client. A line is
`number [repeated|optional] type name [oneof]`. The descriptors use a separate pool, so a client's generated module may
be loaded in the same process.

T = positions, K = entries at one position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rl_core.errors import ServiceError
from rl_core.service.requests import densify_rows

STOP_REASONS = {"stop": 0, "length": 1}
DTYPES = {"float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}
MAX_DENSE_CELLS = 1 << 26  # cells of all sparse tensors of one request together, once dense
MAX_DIMENSIONS = 8
_BFLOAT16 = DTYPES["bfloat16"]
_NUMPY_DTYPES: dict[int, np.dtype[Any]] = {
    DTYPES["float32"]: np.dtype("<f4"),
    DTYPES["int64"]: np.dtype("<i8"),
    DTYPES["int32"]: np.dtype("<i4"),
    _BFLOAT16: np.dtype("<u2"),
}

_MESSAGE_TABLE = """
ForwardBackwardRequest
    1 string model_id
    2 int32 seq_id
    3 repeated Datum data
    4 string loss_fn
    5 map<double> loss_fn_config
    6 bool forward_only
    7 map<LossConfigValue> loss_fn_config_v2
LossConfigValue
    1 double number value
    2 string text value
Datum
    1 repeated Chunk model_input
    2 map<Tensor> loss_fn_inputs
    3 repeated ProvenanceSpan model_input_spans
    4 repeated ProvenanceSpan loss_fn_input_spans
ProvenanceSpan
    1 TokenSpan prompt_tokens source
    2 TokenSpan sampled_tokens source
TokenSpan
    1 string sequence_id
    2 int32 offset
    3 int32 length
Chunk
    1 EncodedTextChunk encoded_text chunk
    2 ImageChunk image chunk
    3 DmelChunk dmel chunk
EncodedTextChunk
    1 bytes tokens
ImageChunk
    1 bytes data
    2 string format
DmelChunk
    1 bytes dmel
Tensor
    1 bytes dense encoding
    2 SparseCsr sparse_csr encoding
    3 int32 dtype
    4 repeated int64 shape
SparseCsr
    1 bytes values
    2 bytes crow_indices
    3 bytes col_indices
ForwardBackwardOutput
    1 string loss_fn_output_type
    2 repeated ArrayRecord loss_fn_outputs
    3 map<double> metrics
ArrayRecord
    1 string type_tag
    2 map<BatchedTensor> fields
    3 int64 num_datums
BatchedTensor
    1 bytes data
    2 bytes offsets
    3 int32 dtype
    4 repeated int64 trailing_shape
SampleResponse
    1 repeated SampledSequence sequences
    2 optional bytes prompt_logprobs
    3 optional TopkLogprobs topk_prompt_logprobs
    4 int32 prompt_cache_hit_tokens
    5 optional Tensor target_prompt_logprobs
SampledSequence
    1 int32 stop_reason
    2 bytes tokens
    3 optional bytes logprobs
    4 optional TopkLogprobs topk_sampled_logprobs
TopkLogprobs
    1 bytes token_ids
    2 bytes logprobs
    3 int32 k
    4 int32 length
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,  # also for enums, which have the same encoding
    "int64": _Field.TYPE_INT64,
}
_PACKAGE = "tinker_public"


def _set_field_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _add_map_field(message: Any, name: str, kind: str) -> str:
    """Add the entry type of a map with string keys to the message; return its name."""
    entry = message.nested_type.add(
        name="".join(word.capitalize() for word in name.split("_")) + "Entry"
    )
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_field_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
    return f"{message.name}.{entry.name}"


def _add_field(message: Any, line: str) -> None:
    number, *parts = line.split()
    label = parts.pop(0) if parts[0] in ("repeated", "optional") else ""
    kind, name, *oneof = parts
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        label, kind = "repeated", _add_map_field(message, name, kind[4:-1])
    if label == "repeated":
        field.label = _Field.LABEL_REPEATED
    if label == "optional":
        oneof, field.proto3_optional = [f"_{name}"], True
    if oneof:
        oneofs = [declared.name for declared in message.oneof_decl]
        if oneof[0] not in oneofs:
            message.oneof_decl.add(name=oneof[0])
            oneofs += oneof
        field.oneof_index = oneofs.index(oneof[0])
    _set_field_type(field, kind)


def _build_message_classes() -> dict[str, Any]:
    """Build message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="posttrain_service.proto", package=_PACKAGE, syntax="proto3"
    )
    for line in _MESSAGE_TABLE.strip().splitlines():
        if line.startswith(" "):
            _add_field(file.message_type[-1], line)
        else:
            file.message_type.add(name=line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in names
    }


_CLASSES = _build_message_classes()


def create_message(name: str) -> Any:
    """Create an empty message."""
    return _CLASSES[name]()


class DenseBudget:
    """Number of cells that the sparse tensors of one request may still use: a few bytes can claim any size."""

    def __init__(self, cells: int = MAX_DENSE_CELLS) -> None:
        self.remaining_cells = cells

    def reserve_cells(self, cells: int, location: str) -> None:
        """Reserve cells. Raises: ServiceError (user) if the request exceeds its budget."""
        self.remaining_cells -= cells
        if self.remaining_cells < 0:
            raise ServiceError(
                f"{location}: sparse tensors of more than {MAX_DENSE_CELLS} cells in one request",
                "user",
            )


def _parse_flat_array(data: bytes, dtype: np.dtype[Any], location: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ServiceError(
            f"{location}: {len(data)} bytes are not a multiple of {dtype.name}", "user"
        )
    return np.frombuffer(data, dtype)


def parse_tokens(data: bytes, location: str) -> np.ndarray:
    """Return the tokens of a text chunk, int32 [T]."""
    return _parse_flat_array(data, np.dtype("<i4"), location)


def read_tensor(tensor: Any, location: str, budget: DenseBudget, *, fill: int = 0) -> np.ndarray:
    """Convert a tensor message to an array of float32 or integers. Sparse rows become dense.

    Args:
        fill: value of cells that a sparse tensor omits.
    Raises: ServiceError (user) if type, shape and bytes do not match.
    """
    dtype = _NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ServiceError(f"{location}: dtype {tensor.dtype}, expected one of {DTYPES}", "user")
    shape = tuple(tensor.shape)
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= size < 1 << 31 for size in shape):
        raise ServiceError(f"{location}: shape {str(shape)[:200]} is not possible", "user")
    encoding = tensor.WhichOneof("encoding")
    if encoding is None:
        raise ServiceError(f"{location}: holds no values", "user")
    if encoding == "dense":
        values = _convert_bfloat16(_parse_flat_array(tensor.dense, dtype, location), tensor.dtype)
        if shape and math.prod(shape) != len(values):
            raise ServiceError(
                f"{location}: {len(values)} values do not fill shape {shape}", "user"
            )
        return values.reshape(shape) if shape else values
    if len(shape) != 2:
        raise ServiceError(
            f"{location}: a sparse tensor has two dimensions, not shape {shape}", "user"
        )
    budget.reserve_cells(math.prod(shape), location)
    rows, index = tensor.sparse_csr, np.dtype("<i8")
    values = _convert_bfloat16(_parse_flat_array(rows.values, dtype, location), tensor.dtype)
    starts = _parse_flat_array(rows.crow_indices, index, f"{location}.crow_indices")
    columns = _parse_flat_array(rows.col_indices, index, f"{location}.col_indices")
    try:
        return densify_rows(values, starts, columns, (shape[0], shape[1]), fill=fill)
    except ServiceError as error:
        raise ServiceError(f"{location}: {error}", "user") from None


def _convert_bfloat16(values: np.ndarray, dtype: int) -> np.ndarray:
    """Convert bfloat16, the upper half of a float32, to float32. Other types stay unchanged."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == _BFLOAT16 else values


def write_tensor(tensor: Any, array: np.ndarray) -> None:
    """Write a dense array to a tensor message, as float32 or int64."""
    code = DTYPES["float32" if array.dtype.kind == "f" else "int64"]
    tensor.dense, tensor.dtype = array.astype(_NUMPY_DTYPES[code]).tobytes(), code
    tensor.shape.extend(array.shape)


def add_array_records(output: Any, outputs: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Add the outputs of all datums to `output.loss_fn_outputs`.

    Consecutive datums with the same fields, types and sizes in all dimensions but the first share a record; lengths may
    differ within it.
    """

    def layout(datum: Mapping[str, np.ndarray]) -> list[Any]:
        return sorted(
            (name, array.dtype.kind, np.atleast_1d(array).shape[1:])
            for name, array in datum.items()
        )

    for _, group in groupby(outputs, layout):
        datums = list(group)
        record = create_message("ArrayRecord")
        record.num_datums = len(datums)
        for name in datums[0]:
            arrays = [np.atleast_1d(datum[name]) for datum in datums]
            code = DTYPES["float32" if arrays[0].dtype.kind == "f" else "int64"]
            parts = [array.astype(_NUMPY_DTYPES[code]).tobytes() for array in arrays]
            field = record.fields[name]
            field.data, field.dtype = b"".join(parts), code
            field.offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
            field.trailing_shape.extend(arrays[0].shape[1:])
        output.loss_fn_outputs.append(record)
