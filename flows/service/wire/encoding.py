"""Answers of the engine as bodies of responses."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from flows.service.commands import Result, SamplerOpened
from flows.service.wire.arrays import DTYPES, add_records, write_tensor
from flows.service.wire.bodies import SampleBody, TensorBody
from flows.service.wire.json_body import read_body
from flows.service.wire.message_table import STOP_REASONS, message
from rl_core.service.answers import ForwardBackwardResult, OptimStepResult, SampleResult, TopLogprobs
from rl_core.service.evaluation_answers import ModelEvaluation

__all__ = ["encode"]


def encode(kind: str, answer: Result, payload: bytes = b"") -> tuple[bytes, Literal["json", "protobuf"]]:
    """The body of a result, and its type.

    Args:
        kind: `RequestKind` of the store.
        payload: body of the request; the layout of a sampling request's answer depends on it.
    """
    if isinstance(answer, ForwardBackwardResult):
        return _forward_backward(answer), "protobuf"
    if isinstance(answer, SampleResult):
        return _sample(answer, read_body(SampleBody, payload) if payload else None), "protobuf"
    if isinstance(answer, OptimStepResult):
        # JSON has no NaN; a metric without a value is left out
        found = {name: float(value) for name, value in answer.metrics.items() if math.isfinite(value)}
        return json.dumps({"metrics": found}).encode(), "json"
    if isinstance(answer, SamplerOpened):
        return json.dumps({"type": kind, "sampling_session_id": answer.sampler_id}).encode(), "json"
    if isinstance(answer, ModelEvaluation):
        return json.dumps(asdict(answer), allow_nan=False).encode(), "json"
    return json.dumps({"type": kind, **asdict(answer)}).encode(), "json"


def _forward_backward(answer: ForwardBackwardResult) -> bytes:
    output = message("ForwardBackwardOutput")
    output.loss_fn_output_type = "ArrayRecord"
    add_records(output, answer.outputs)
    for name, value in answer.metrics.items():
        output.metrics[name] = float(value)
    return bytes(output.SerializeToString(deterministic=True))


def _sample(answer: SampleResult, asked: SampleBody | None) -> bytes:
    response = message("SampleResponse")
    for sequence in answer.sequences:
        one = response.sequences.add()
        one.stop_reason = STOP_REASONS[sequence.stop_reason]
        one.tokens = sequence.tokens.astype("<i4").tobytes()
        one.logprobs = sequence.logprobs.astype("<f4").tobytes()
        if sequence.topk is not None:
            _set_top(one.topk_sampled_logprobs, sequence.topk)
    last = asked.prompt_logprobs_last_n if asked is not None else None
    if answer.prompt_logprobs is not None:
        found = answer.prompt_logprobs.astype("<f4")
        if last is not None:
            found[: len(found) - last] = np.nan
        response.prompt_logprobs = found.tobytes()
    if answer.topk_prompt is not None:
        _set_top(response.topk_prompt_logprobs, answer.topk_prompt, last)
    if answer.target_prompt_logprobs is not None:
        layout = asked.target_prompt_logprobs if asked is not None else None
        _set_targets(response.target_prompt_logprobs, answer.target_prompt_logprobs, layout)
    return bytes(response.SerializeToString(deterministic=True))


def _set_top(field: Any, top: TopLogprobs, last: int | None = None) -> None:
    """Args: last: positions that were asked for; the others are empty."""
    tokens, logprobs = top.tokens.astype("<i4"), top.logprobs.astype("<f4")
    if last is not None:
        tokens[: len(tokens) - last], logprobs[: len(logprobs) - last] = 0, -99999.0
    field.token_ids, field.logprobs = tokens.tobytes(), logprobs.tobytes()
    field.length, field.k = tokens.shape


def _set_targets(field: Any, logprobs: np.ndarray, layout: TensorBody | None) -> None:
    """In the layout of the request; 0 where nothing was asked."""
    dense = np.nan_to_num(logprobs.astype(np.float32), nan=0.0)
    if layout is None or layout.sparse_crow_indices is None:
        write_tensor(field, dense)
        return
    starts = np.array(layout.sparse_crow_indices, "<i8")
    columns = np.array(layout.sparse_col_indices or [], "<i8")
    rows = np.repeat(np.arange(len(dense)), np.diff(starts))
    field.sparse_csr.values = dense[rows, columns].astype("<f4").tobytes()
    field.sparse_csr.crow_indices, field.sparse_csr.col_indices = starts.tobytes(), columns.tobytes()
    field.dtype = DTYPES["float32"]
    field.shape.extend(dense.shape)
