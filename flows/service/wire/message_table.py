"""Protobuf messages of the clients (package `tinker_public`), made from the table below.

Field numbers are those of the public client; a line is `number [repeated|optional] type name [oneof]`. The descriptors
live in a pool of their own, beside a client's generated module in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["DTYPES", "STOP_REASONS", "message"]

STOP_REASONS = {"stop": 0, "length": 1}
DTYPES = {"float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}

_TABLE = """
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
    "int32": _Field.TYPE_INT32,  # enums, too: the same bytes
    "int64": _Field.TYPE_INT64,
}
_PACKAGE = "tinker_public"


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _add_map(message: Any, name: str, kind: str) -> str:
    """The type of a map's entries, within the message; keys are texts."""
    entry = message.nested_type.add(name="".join(word.capitalize() for word in name.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
    return f"{message.name}.{entry.name}"


def _add_field(message: Any, line: str) -> None:
    number, *words = line.split()
    label = words.pop(0) if words[0] in ("repeated", "optional") else ""
    kind, name, *oneof = words
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        label, kind = "repeated", _add_map(message, name, kind[4:-1])
    if label == "repeated":
        field.label = _Field.LABEL_REPEATED
    if label == "optional":
        oneof, field.proto3_optional = [f"_{name}"], True
    if oneof:
        known = [one.name for one in message.oneof_decl]
        if oneof[0] not in known:
            message.oneof_decl.add(name=oneof[0])
            known += oneof
        field.oneof_index = known.index(oneof[0])
    _set_type(field, kind)


def _build() -> dict[str, Any]:
    """Message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name="posttrain_service.proto", package=_PACKAGE, syntax="proto3")
    for line in _TABLE.strip().splitlines():
        if line.startswith(" "):
            _add_field(file.message_type[-1], line)
        else:
            file.message_type.add(name=line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names}


_CLASSES = _build()


def message(name: str) -> Any:
    """A new, empty message."""
    return _CLASSES[name]()
