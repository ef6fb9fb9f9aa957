"""Codec of accepted requests: bodies become requests to the engine, results become bodies of responses.

Bodies of evaluations belong to the service's management interface, where an unknown key is an error.
P = tokens of the prompt, K = targets at one position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from posttrain.training_service.commands import (
    Command,
    LoadWeights,
    OpenSampler,
    Result,
    SamplerOpened,
    SaveForSampler,
    SaveWeights,
    UnloadModel,
)
from posttrain.training_service.paths import TinkerPath, check_path_name, parse_tinker_path
from posttrain.training_service.wire.protobuf_messages import (
    DTYPES,
    MAX_DENSE_CELLS,
    STOP_REASONS,
    DenseBudget,
    add_array_records,
    create_message,
    parse_tokens,
    read_tensor,
    write_tensor,
)
from posttrain.training_service.wire.request_bodies import (
    CreateModelBody,
    CreateSamplingSessionBody,
    Finite,
    Id,
    LoadWeightsBody,
    OptimizerFamily,
    OptimStepBody,
    PromptBody,
    ReferenceScoreBody,
    RequestBody,
    SampleBody,
    SamplingBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    TensorBody,
    Text,
    TextList,
    parse_request_body,
)
from posttrain.training_service.wire.request_header import parse_forward_backward
from rl_core.errors import ServiceError
from rl_core.service.request_checks import NO_TARGET, EvaluateRequest
from rl_core.service.requests import (
    RECORDED_TOKENS,
    AdamParameters,
    AdapterConfig,
    CreateModel,
    Datum,
    ForwardBackward,
    OptimizerKind,
    OptimStep,
    ProvenanceSpan,
    SampleParameters,
    SampleRequest,
    ScoreRequest,
    densify_rows,
)
from rl_core.service.responses import ModelEvaluation, ReferenceScores
from rl_core.service.results import (
    ForwardBackwardResult,
    OptimStepResult,
    SampleResult,
    TopLogprobs,
)

Facts = Mapping[str, Any]  # decided by the server at acceptance; see `decode_request`

_INT32 = np.iinfo(np.int32)
_EMPTY_LOGPROB = -99999.0  # marks an empty position of top-k log-probabilities
_OPTIMIZER_FAMILIES: dict[str, OptimizerKind] = {
    "adamw": "adamw",
    "adam": "adamw",
    "dimuon": "muon",
    "muon": "muon",
}


class EvaluateSampling(RequestBody):
    """Sampling parameters of an evaluation."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: Annotated[int, Field(ge=1, le=1 << 18)] = 64
    temperature: Annotated[Finite, Field(ge=0, le=5)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    stop: list[Text] | list[int] | None = None


class EvaluateBody(RequestBody):
    """Evaluation of one model, or comparison of two."""

    model_config = ConfigDict(extra="forbid")

    evaluation_id: Annotated[
        Id | None,
        Field(
            description="chosen by the client; a repeated id is the same evaluation, computed once"
        ),
    ] = None
    model: Annotated[
        Text, Field(description="a saved path (tinker://...) or the name of a base model")
    ]
    against: Annotated[
        Text | None,
        Field(
            description="another path, base model or reference model on the same texts and prompts"
        ),
    ] = None
    texts: Annotated[
        TextList, Field(description="texts, or lists of token ids, that are scored")
    ] = ()
    prompts: Annotated[
        TextList, Field(description="texts, or lists of token ids, that are continued")
    ] = ()
    num_samples: Annotated[int, Field(ge=1, le=1 << 16, description="of each prompt")] = 8
    sampling: EvaluateSampling = EvaluateSampling()
    seed: Annotated[int, Field(ge=0, lt=1 << 53, description="of samples and intervals")] = 0
    confidence: Annotated[Finite, Field(gt=0, lt=1)] = 0.95
    resamples: Annotated[int, Field(ge=1, le=100_000)] = 2000


def _decode_scores(payload: bytes, facts: Facts, target: str) -> ScoreRequest:
    body = parse_request_body(ReferenceScoreBody, payload)
    rows = tuple(np.array(row, dtype=np.int64) for row in body.rows)
    return ScoreRequest(model=str(facts["model"]), rows=rows, temperature=body.temperature)


def decode_evaluation(payload: bytes) -> EvaluateRequest:
    """Decode an evaluation. The worker adds the folders of saved weights. Raises: ServiceError (user)."""
    body = parse_request_body(EvaluateBody, payload)
    sampling = body.sampling
    return EvaluateRequest(
        model=body.model,
        against=body.against,
        texts=_convert_texts(body.texts),
        prompts=_convert_texts(body.prompts),
        num_samples=body.num_samples,
        seed=body.seed,
        confidence=body.confidence,
        resamples=body.resamples,
        parameters=SampleParameters(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=None if sampling.stop is None else tuple(sampling.stop),  # type: ignore[arg-type]
        ),
    )


def _convert_texts(texts: tuple[str | list[int], ...]) -> tuple[str | np.ndarray, ...]:
    return tuple(
        text if isinstance(text, str) else np.array(text, dtype=np.int64) for text in texts
    )


def decode_sample_body(payload: bytes, seed: int, target: str) -> SampleRequest:
    """Decode a sampling request. Raises: ServiceError (user).

    Args:
        seed: drawn at acceptance; a seed in the body replaces it.
        target: sampler.
    """
    body = parse_request_body(SampleBody, payload)
    if body.prompt_alt_tokens_k:
        raise ServiceError("asample: prompt_alt_tokens_k is not supported", "user")
    prompt = join_prompt_tokens(body.prompt)
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and 1 <= last_n < len(prompt)):
        raise ServiceError(
            f"prompt_logprobs_last_n: {last_n}, expected 1 to {len(prompt) - 1}, with prompt_logprobs",
            "user",
        )
    requested_seed = body.sampling_params.seed
    return SampleRequest(
        sampler_id=target,
        prompt=prompt,
        seed=seed if requested_seed is None else requested_seed,
        num_samples=body.num_samples,
        parameters=_decode_sampling(body.sampling_params),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        recorded_tokens=RECORDED_TOKENS if body.record_stability_info else 0,
        target_prompt_logprobs=_decode_targets(body.target_prompt_logprobs),
    )


def join_prompt_tokens(prompt: PromptBody) -> np.ndarray:
    """Join the tokens of all parts, int32 [P]. Raises: ServiceError (user) for parts other than text."""
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise ServiceError(
                f"prompt.chunks[{index}]: {chunk.type} chunks are not supported, only text", "user"
            )
        tokens += chunk.tokens
    return _check_integers(tokens, "prompt").astype(np.int32)


def _check_integers(values: list[int] | list[float], location: str) -> np.ndarray:
    try:
        array = np.array(values, np.int64)
    except (OverflowError, ValueError):
        raise ServiceError(f"{location}: numbers beyond 64 bits", "user") from None
    if len(array) and not _INT32.min <= int(array.min()) <= int(array.max()) <= _INT32.max:
        raise ServiceError(f"{location}: numbers beyond 32 bits", "user")
    return array


def _decode_sampling(body: SamplingBody) -> SampleParameters:
    stop: tuple[str, ...] | tuple[int, ...] | None
    if body.stop is None:
        stop = None
    elif isinstance(body.stop, str):
        stop = (body.stop,)
    else:
        stop = tuple(body.stop)  # type: ignore[assignment]
    return SampleParameters(
        max_tokens=body.max_tokens,
        stop=stop,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
    )


def _decode_targets(body: TensorBody | None) -> np.ndarray | None:
    """Decode the tokens requested at each position after the first, int64 [P - 1, K]; -1 = none."""
    if body is None:
        return None
    key = "target_prompt_logprobs"
    if body.dtype != "int64":
        raise ServiceError(f"{key}: dtype {body.dtype}, expected int64", "user")
    shape = tuple(body.shape or ())
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > MAX_DENSE_CELLS:
        raise ServiceError(f"{key}: shape {shape}, expected (prompt tokens - 1, K)", "user")
    values = _check_integers(body.data, key)
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        if len(values) != shape[0] * shape[1]:
            raise ServiceError(f"{key}: {len(values)} values do not fill shape {shape}", "user")
        return values.reshape(shape)
    starts = _check_integers(body.sparse_crow_indices or [], f"{key}.sparse_crow_indices")
    columns = _check_integers(body.sparse_col_indices or [], f"{key}.sparse_col_indices")
    return densify_rows(values, starts, columns, (shape[0], shape[1]), fill=NO_TARGET)


def decode_request(
    kind: str, payload: bytes, content_type: Literal["json", "protobuf"], facts: Facts, target: str
) -> Command:
    """Decode a request to plain data.

    Args:
        kind: `RequestKind` of the store.
        payload: body as received, decompressed.
        facts: `refused` = problem that the server already detected; `seed` of an adapter or of samples;
            `sampling_session_id` of a sampler that is published.
        target: training run or sampling session that the server read from the body.
    Raises: ServiceError (user) with the location of the first problem.
    """
    if "refused" in facts:
        raise ServiceError(str(facts["refused"]), "user")
    if kind not in _DECODERS:
        raise ServiceError(f"{kind}: unknown kind of request", "server")
    expected = "protobuf" if kind == "forward_backward" else "json"
    if content_type != expected:
        raise ServiceError(f"{kind}: the body is {content_type}, expected {expected}", "user")
    return _DECODERS[kind](payload, facts, target)


def _resolve_optimizer(config: OptimizerFamily | None) -> OptimizerKind | None:
    if config is None:
        return None
    if config.type not in _OPTIMIZER_FAMILIES:
        raise ServiceError(
            f"optimizer_config.type: '{config.type}', expected adamw or dimuon", "user"
        )
    if config.version != 1:
        raise ServiceError(f"optimizer_config.version: {config.version}, expected 1", "user")
    return _OPTIMIZER_FAMILIES[config.type]


def _decode_create_model(payload: bytes, facts: Facts, target: str) -> CreateModel:
    body = parse_request_body(CreateModelBody, payload)
    adapter = None
    seed = int(facts.get("seed", 0))
    if body.lora_config is not None:
        lora = body.lora_config
        seed = seed if lora.seed is None else lora.seed  # also seeds the heads
        adapter = AdapterConfig(
            rank=lora.rank,
            seed=seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )
    optimizer = _resolve_optimizer(body.optimizer_config) or "adamw"
    return CreateModel(
        model_id=target, base=body.base_model, adapter=adapter, optimizer=optimizer, seed=seed
    )


def _decode_forward_backward(payload: bytes, facts: Facts, target: str) -> ForwardBackward:
    body, budget = parse_forward_backward(payload), DenseBudget()
    config: dict[str, float | str] = dict(body.loss_fn_config)
    for name, value in body.loss_fn_config_v2.items():
        field = value.WhichOneof("value")
        if field is None:
            raise ServiceError(
                f"loss_fn_config_v2: '{name}' is neither a number nor a text", "user"
            )
        config[name] = getattr(value, field)
    return ForwardBackward(
        model_id=target,
        data=tuple(
            _decode_datum(datum, f"data[{index}]", budget) for index, datum in enumerate(body.data)
        ),
        loss_fn=body.loss_fn,
        loss_fn_config=config,
        forward_only=body.forward_only,
    )


def _decode_datum(datum: Any, location: str, budget: DenseBudget) -> Datum:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ServiceError(
                f"{location}.model_input: {kind or 'empty'} chunks are not supported, only text",
                "user",
            )
        parts.append(parse_tokens(chunk.encoded_text.tokens, f"{location}.model_input"))
    inputs = {
        name: read_tensor(tensor, f"{location}.loss_fn_inputs['{name}']", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(
        np.concatenate(parts) if parts else np.zeros(0, np.int32),
        inputs,
        _decode_spans(datum.model_input_spans, f"{location}.model_input_spans"),
        _decode_spans(datum.loss_fn_input_spans, f"{location}.loss_fn_input_spans"),
    )


def _decode_spans(spans: Any, location: str) -> tuple[ProvenanceSpan, ...]:
    decoded = []
    for index, span in enumerate(spans):
        source = span.WhichOneof("source")
        if source is None:
            raise ServiceError(f"{location}[{index}]: names no tokens", "user")
        tokens = getattr(span, source)
        if min(tokens.offset, tokens.length) < 0:
            raise ServiceError(
                f"{location}[{index}]: offset {tokens.offset} and length {tokens.length}, expected 0 or more",
                "user",
            )
        kind: Literal["prompt", "sampled"] = "prompt" if source == "prompt_tokens" else "sampled"
        decoded.append(ProvenanceSpan(kind, tokens.sequence_id, tokens.offset, tokens.length))
    return tuple(decoded)


def _decode_optim_step(payload: bytes, facts: Facts, target: str) -> OptimStep:
    body = parse_request_body(OptimStepBody, payload)
    if (body.adam_params is None) == (body.optimizer_params is None):
        raise ServiceError("optim_step: expected either adam_params or optimizer_params", "user")
    if body.adam_params is not None:
        return OptimStep(model_id=target, adam=AdamParameters(**body.adam_params.model_dump()))
    parameters = body.optimizer_params
    assert parameters is not None
    family = _OPTIMIZER_FAMILIES.get(parameters.type)
    if family is None:
        raise ServiceError(
            f"optimizer_params.type: '{parameters.type}', expected adamw or dimuon", "user"
        )
    if family == "adamw":
        return OptimStep(
            model_id=target, adam=AdamParameters(**parameters.model_dump(exclude={"type"}))
        )
    adam = AdamParameters(
        learning_rate=parameters.learning_rate,
        weight_decay=parameters.weight_decay,
        grad_clip_norm=parameters.grad_clip_norm,
    )
    return OptimStep(model_id=target, adam=adam, muon_momentum=parameters.beta1, optimizer="muon")


def _decode_save_weights(payload: bytes, facts: Facts, target: str) -> SaveWeights:
    body = parse_request_body(SaveWeightsBody, payload)
    path = TinkerPath(
        target, "weights", check_path_name(body.path or f"checkpoint-{body.seq_id:06d}")
    )
    return SaveWeights(
        model_id=target, path=str(path), overwrite=body.overwrite, ttl_seconds=body.ttl_seconds
    )


def _decode_sampler_weights(payload: bytes, facts: Facts, target: str) -> SaveForSampler:
    body = parse_request_body(SaveForSamplerBody, payload)
    if body.path is None:
        if body.ttl_seconds is not None:
            raise ServiceError(
                "save_weights_for_sampler: ttl_seconds needs a path; a sampler without a path lives for the service's "
                "worker.sampler_seconds",
                "user",
            )
        return SaveForSampler(
            model_id=target, sampler_id=str(facts["sampling_session_id"]), kind=body.kind
        )
    if body.kind != "snapshot":
        raise ServiceError(
            "save_weights_for_sampler: weights with a path are always a snapshot; leave out path",
            "user",
        )
    path = TinkerPath(target, "sampler_weights", check_path_name(body.path))
    return SaveForSampler(model_id=target, path=str(path), ttl_seconds=body.ttl_seconds)


def _decode_external_weights(payload: bytes, facts: Facts, target: str) -> SaveWeights:
    body = parse_request_body(SaveExternalBody, payload)
    if body.age_encryption_recipients:
        raise ServiceError(
            "save_weights_external: age_encryption_recipients is not supported", "user"
        )
    path = TinkerPath(target, "external_weights", check_path_name(body.path))
    return SaveWeights(model_id=target, path=str(path), ttl_seconds=body.ttl_seconds, external=True)


def _decode_load_weights(payload: bytes, facts: Facts, target: str) -> LoadWeights:
    body = parse_request_body(LoadWeightsBody, payload)
    path = parse_tinker_path(body.path)
    if path.kind == "external_weights":
        raise ServiceError(
            f"load_weights: {path} is for other programs; load from weights or sampler_weights",
            "user",
        )
    if body.optimizer and path.kind != "weights":
        raise ServiceError(
            f"load_weights: {path} holds no optimizer state; load it with optimizer=false", "user"
        )
    _resolve_optimizer(body.optimizer_config)
    is_new, family = body.model_seq_id is not None, facts.get("optimizer")
    kind = None
    if is_new and not body.optimizer and family is not None:
        kind = _resolve_optimizer(OptimizerFamily(**family))
    return LoadWeights(model_id=target, path=str(path), optimizer=body.optimizer, kind=kind)


def _decode_create_sampler(payload: bytes, facts: Facts, target: str) -> OpenSampler:
    body = parse_request_body(CreateSamplingSessionBody, payload)
    if body.model_path is not None:
        return OpenSampler(sampler_id=target, path=str(parse_tinker_path(body.model_path)))
    return OpenSampler(sampler_id=target, base=body.base_model)


def _decode_sample(payload: bytes, facts: Facts, target: str) -> SampleRequest:
    return decode_sample_body(payload, int(facts["seed"]), target)


def _decode_unload_model(payload: bytes, facts: Facts, target: str) -> UnloadModel:
    return UnloadModel(model_id=target)


def _decode_evaluate(payload: bytes, facts: Facts, target: str) -> EvaluateRequest:
    return decode_evaluation(payload)


_DECODERS: dict[str, Callable[[bytes, Facts, str], Command]] = {
    "create_model": _decode_create_model,
    "forward_backward": _decode_forward_backward,
    "optim_step": _decode_optim_step,
    "save_weights": _decode_save_weights,
    "save_weights_for_sampler": _decode_sampler_weights,
    "save_weights_external": _decode_external_weights,
    "load_weights": _decode_load_weights,
    "create_sampler": _decode_create_sampler,
    "sample": _decode_sample,
    "unload_model": _decode_unload_model,
    "evaluate": _decode_evaluate,
    "score": _decode_scores,
}


def encode_result(
    kind: str, result: Result, payload: bytes = b""
) -> tuple[bytes, Literal["json", "protobuf"]]:
    """Encode a result; return its body and content type.

    Args:
        kind: `RequestKind` of the store.
        payload: body of the request; it determines the layout of a sampling request's answer.
    """
    if isinstance(result, ForwardBackwardResult):
        return _encode_forward_backward(result), "protobuf"
    if isinstance(result, SampleResult):
        body = parse_request_body(SampleBody, payload) if payload else None
        return _encode_sample(result, body), "protobuf"
    if isinstance(result, OptimStepResult):
        # JSON has no NaN, so metrics without a value are omitted.
        metrics = {
            name: float(value) for name, value in result.metrics.items() if math.isfinite(value)
        }
        return json.dumps({"metrics": metrics}).encode(), "json"
    if isinstance(result, SamplerOpened):
        return json.dumps({"type": kind, "sampling_session_id": result.sampler_id}).encode(), "json"
    if isinstance(result, ModelEvaluation | ReferenceScores):
        return json.dumps(asdict(result), allow_nan=False).encode(), "json"
    return json.dumps({"type": kind, **asdict(result)}).encode(), "json"


def _encode_forward_backward(answer: ForwardBackwardResult) -> bytes:
    output = create_message("ForwardBackwardOutput")
    output.loss_fn_output_type = "ArrayRecord"
    add_array_records(output, answer.outputs)
    for name, value in answer.metrics.items():
        output.metrics[name] = float(value)
    return bytes(output.SerializeToString(deterministic=True))


def _encode_sample(answer: SampleResult, body: SampleBody | None) -> bytes:
    response = create_message("SampleResponse")
    for sequence in answer.sequences:
        sequence_message = response.sequences.add()
        sequence_message.stop_reason = STOP_REASONS[sequence.stop_reason]
        sequence_message.tokens = sequence.tokens.astype("<i4").tobytes()
        sequence_message.logprobs = sequence.logprobs.astype("<f4").tobytes()
        if sequence.topk is not None:
            _write_top_logprobs(sequence_message.topk_sampled_logprobs, sequence.topk)
    last_n = body.prompt_logprobs_last_n if body is not None else None
    if answer.prompt_logprobs is not None:
        prompt_logprobs = answer.prompt_logprobs.astype("<f4")
        if last_n is not None:
            prompt_logprobs[: len(prompt_logprobs) - last_n] = np.nan
        response.prompt_logprobs = prompt_logprobs.tobytes()
    if answer.topk_prompt is not None:
        _write_top_logprobs(response.topk_prompt_logprobs, answer.topk_prompt, last_n)
    if answer.target_prompt_logprobs is not None:
        layout = body.target_prompt_logprobs if body is not None else None
        _write_target_logprobs(
            response.target_prompt_logprobs, answer.target_prompt_logprobs, layout
        )
    return bytes(response.SerializeToString(deterministic=True))


def _write_top_logprobs(field: Any, top: TopLogprobs, last_n: int | None = None) -> None:
    """Write top-k log-probabilities. Args: last_n: requested positions at the end; the others are empty."""
    tokens, logprobs = top.tokens.astype("<i4"), top.logprobs.astype("<f4")
    if last_n is not None:
        tokens[: len(tokens) - last_n] = 0
        logprobs[: len(logprobs) - last_n] = _EMPTY_LOGPROB
    field.token_ids, field.logprobs = tokens.tobytes(), logprobs.tobytes()
    field.length, field.k = tokens.shape


def _write_target_logprobs(field: Any, logprobs: np.ndarray, layout: TensorBody | None) -> None:
    """Write log-probabilities in the layout of the request; 0 where none was requested."""
    dense = np.nan_to_num(logprobs.astype(np.float32), nan=0.0)
    if layout is None or layout.sparse_crow_indices is None:
        write_tensor(field, dense)
        return
    starts = np.array(layout.sparse_crow_indices, "<i8")
    columns = np.array(layout.sparse_col_indices or [], "<i8")
    rows = np.repeat(np.arange(len(dense)), np.diff(starts))
    field.sparse_csr.values = dense[rows, columns].astype("<f4").tobytes()
    field.sparse_csr.crow_indices = starts.tobytes()
    field.sparse_csr.col_indices = columns.tobytes()
    field.dtype = DTYPES["float32"]
    field.shape.extend(dense.shape)
