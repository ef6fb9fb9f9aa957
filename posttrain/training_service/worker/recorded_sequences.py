"""Sequences recorded at sampling: rows for the store, and their use by training requests (loss `stable_reinforce`).

A sample with `record_stability_info` stores, with its answer, the most likely tokens of the distribution at each
sampled position. A training request names the sequence behind each of its tokens (provenance); the worker checks the
claim against the recorded tokens and adds what was recorded to the datum's inputs. Requests of one session only see
that session's sequences.

T tokens of a datum, n tokens of a sequence, K recorded tokens at one position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from safetensors.numpy import load, save

from posttrain.training_service.store import ServiceStore, StoredRequest
from posttrain.training_service.store.records import RecordedSequence
from rl_core.errors import ServiceError
from rl_core.service.requests import Datum, ForwardBackward, ProvenanceSpan, SampleRequest
from rl_core.service.results import SampleResult
from rl_core.service.samplers import NO_LOGPROB

LOSS_WITH_RECORDED_TOKENS = "stable_reinforce"
_TOP_INPUTS = ("sampler_top_tokens", "sampler_top_logprobs")


def build_recorded_rows(
    request: StoredRequest, command: SampleRequest, answer: SampleResult
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Build the rows of a sample's sequences; () if it recorded nothing."""
    rows = []
    ids = request.facts.get("sample_sequence_ids", ())
    for sequence_id, sequence in zip(ids, answer.sequences, strict=False):
        if sequence.recorded is None:
            continue
        content = {
            "prompt": np.ascontiguousarray(command.prompt, dtype=np.int32),
            "tokens": np.ascontiguousarray(sequence.tokens, dtype=np.int32),
            "logprobs": np.ascontiguousarray(sequence.logprobs, dtype=np.float32),
            "top_tokens": np.ascontiguousarray(sequence.recorded.tokens),
            "top_logprobs": np.ascontiguousarray(sequence.recorded.logprobs),
        }
        record = RecordedSequence(
            sequence_id=str(sequence_id),
            session_id=request.session_id,
            touched=request.accepted,
            temperature=float(command.parameters.temperature) or 1.0,
            content=save(content),
        )
        rows.append(("recorded_sequences", dataclasses.asdict(record)))
    return tuple(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    temperature: float
    arrays: Mapping[str, np.ndarray]


def add_recorded_inputs(
    command: ForwardBackward, request: StoredRequest, store: ServiceStore, lifetime: float
) -> tuple[ForwardBackward, tuple[str, ...]]:
    """Add what was recorded about a request's tokens to its inputs; return the request and the sequences it uses.

    The result depends on the store only through sequences that exist until the request cannot be computed again.
    Args:
        lifetime: seconds for which a sequence may be used after sampling, or after its last use.
    Raises: ServiceError (user) with the datum and position of a claim that does not hold; BackendError.
    """
    if command.loss_fn != LOSS_WITH_RECORDED_TOKENS:
        return command, ()
    spans = [span for datum in command.data for span in (*datum.token_spans, *datum.target_spans)]
    ids = tuple(sorted({span.sequence_id for span in spans if span.length}))
    sequences = {
        sequence_id: _Sequence(record.temperature, load(record.content))
        for sequence_id, record in store.find_recorded_sequences(request.session_id, ids).items()
        if record.touched + lifetime >= request.accepted
    }
    num_columns = max((s.arrays["top_tokens"].shape[1] for s in sequences.values()), default=1)
    data = tuple(
        _add_datum_inputs(datum, f"data[{index}]", sequences, num_columns)
        for index, datum in enumerate(command.data)
    )
    sampled = {span.sequence_id for span in spans if span.source == "sampled" and span.length}
    config = dict(command.loss_fn_config)
    temperatures = {sequences[sequence_id].temperature for sequence_id in sampled}
    if len(temperatures) > 1:
        _refuse(
            f"data: sequences sampled at temperatures {sorted(temperatures)}; send one request for each"
        )
    for temperature in temperatures:
        if config.setdefault("temperature", temperature) != temperature:
            _refuse(
                f"loss_fn_config: temperature is {config['temperature']!r}, and the sequences were sampled at "
                f"{temperature:g}; leave it out"
            )
    return dataclasses.replace(command, data=data, loss_fn_config=config), ids


def _refuse(message: str) -> NoReturn:
    raise ServiceError(message, "user")


def _add_datum_inputs(
    datum: Datum, location: str, sequences: Mapping[str, _Sequence], num_columns: int
) -> Datum:
    has_arrays = any(name in datum.inputs for name in _TOP_INPUTS)
    if has_arrays and not datum.target_spans:
        return datum  # the client recorded them itself
    if has_arrays:
        _refuse(f"{location}: has both provenance and {' or '.join(_TOP_INPUTS)}; send only one")
    targets = datum.inputs.get("target_tokens")
    if not isinstance(targets, np.ndarray) or targets.ndim != 1:
        return datum  # refused by the engine
    if not datum.target_spans or not datum.token_spans:
        _refuse(
            f"{location}: stable_reinforce needs provenance on every datum (Datum.with_provenance) and samples with "
            "record_stability_info"
        )
    _check_spans(datum.token_spans, datum.tokens, f"{location}.model_input_spans", sequences)
    _check_spans(datum.target_spans, targets, f"{location}.loss_fn_input_spans", sequences)
    size = len(targets)
    logprobs = np.zeros(size, np.float32)
    top_tokens = np.zeros((size, num_columns), np.int32)
    top_logprobs = np.full((size, num_columns), NO_LOGPROB, np.float32)
    for start, span in _locate_spans(datum.target_spans):
        if span.source != "sampled" or not span.length:
            continue
        arrays = sequences[span.sequence_id].arrays
        rows, part = (
            slice(start, start + span.length),
            slice(span.offset, span.offset + span.length),
        )
        logprobs[rows] = arrays["logprobs"][part]
        columns = arrays["top_tokens"].shape[1]
        top_tokens[rows, :columns] = arrays["top_tokens"][part]
        top_logprobs[rows, :columns] = arrays["top_logprobs"][part]
    recorded = {
        "logprobs": logprobs,
        "sampler_top_tokens": top_tokens,
        "sampler_top_logprobs": top_logprobs,
    }
    return Datum(datum.tokens, {**datum.inputs, **recorded})


def _locate_spans(spans: Iterable[ProvenanceSpan]) -> Iterable[tuple[int, ProvenanceSpan]]:
    """Yield (first position, span)."""
    start = 0
    for span in spans:
        yield start, span
        start += span.length


def _check_spans(
    spans: tuple[ProvenanceSpan, ...],
    tokens: np.ndarray,
    location: str,
    sequences: Mapping[str, _Sequence],
) -> None:
    """Check that spans tile the tokens, lie within their sequences, and that sampled tokens are the recorded ones.

    Prompt positions are not compared: targets there may be placeholders.
    """
    total = sum(span.length for span in spans)
    if total != len(tokens):
        _refuse(f"{location}: cover {total} positions, expected {len(tokens)}")
    for index, (start, span) in enumerate(_locate_spans(spans)):
        if not span.length:
            continue
        sequence = sequences.get(span.sequence_id)
        if sequence is None:
            raise ServiceError(
                f"{location}[{index}]: there is no recorded sequence '{span.sequence_id[:100]}'. Samples with "
                "record_stability_info are recorded, for the session that samples; they expire a day after their last "
                "use (worker.recorded_seconds)",
                "user",
            )
        known = sequence.arrays["prompt" if span.source == "prompt" else "tokens"]
        end = span.offset + span.length
        if end > len(known):
            noun = "prompt" if span.source == "prompt" else "sequence"
            _refuse(
                f"{location}[{index}]: tokens {span.offset} to {end} of '{span.sequence_id[:100]}', whose {noun} has "
                f"{len(known)}"
            )
        if span.source == "prompt":
            continue
        part = known[span.offset : end]
        differing = np.flatnonzero(part != tokens[start : start + span.length])
        if len(differing):
            first = int(differing[0])
            _refuse(
                f"{location}[{index}]: token {int(tokens[start + first])} at position {start + first}, and the "
                f"sequence has {int(part[first])}"
            )
