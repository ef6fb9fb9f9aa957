"""Bodies of accepted requests as requests to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from flows.service.commands import Command, LoadWeights, OpenSampler, SaveForSampler, SaveWeights, UnloadModel
from flows.service.wire.arrays import DenseBudget, read_tensor, tokens_of
from flows.service.wire.bodies import (
    CreateModelBody,
    CreateSamplingSession,
    LoadWeightsBody,
    OptimizerFamily,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from flows.service.wire.evaluate_bodies import decode_evaluate
from flows.service.wire.heads import parse_forward_backward
from flows.service.wire.json_body import read_body
from flows.service.wire.sample_bodies import decode_sample
from flows.service.wire.tinker_paths import TinkerPath, check_name, parse_path
from rl_core.errors import ServiceError
from rl_core.service.evaluation_requests import EvaluateRequest
from rl_core.service.requests import (
    AdamParameters,
    AdapterConfig,
    CreateModel,
    Datum,
    ForwardBackward,
    OptimizerKind,
    OptimStep,
    SampleRequest,
)

__all__ = ["Facts", "decode"]

Facts = Mapping[str, Any]  # decided by the server at acceptance; see `decode`

_FAMILIES: dict[str, OptimizerKind] = {"adamw": "adamw", "adam": "adamw", "dimuon": "muon", "muon": "muon"}


def decode(kind: str, payload: bytes, content_type: Literal["json", "protobuf"], facts: Facts, target: str) -> Command:
    """A request as plain data.

    Args:
        kind: `RequestKind` of the store. payload: body as received, decompressed.
        facts: `refused` = the fault that the server found already; `seed` of an adapter or of samples;
            `sampling_session_id` of a sampler that is published.
        target: training run or sampling session that the server read from the body.
    Raises: ServiceError (user) with the place of the first fault.
    """
    if "refused" in facts:
        raise ServiceError(str(facts["refused"]), "user")
    if kind not in _DECODERS:
        raise ServiceError(f"{kind}: unknown kind of request", "server")
    wanted = "protobuf" if kind == "forward_backward" else "json"
    if content_type != wanted:
        raise ServiceError(f"{kind}: the body is {content_type}, expected {wanted}", "user")
    return _DECODERS[kind](payload, facts, target)


def _family(config: OptimizerFamily | None) -> OptimizerKind | None:
    if config is None:
        return None
    if config.type not in _FAMILIES:
        raise ServiceError(f"optimizer_config.type: '{config.type}', expected adamw or dimuon", "user")
    if config.version != 1:
        raise ServiceError(f"optimizer_config.version: {config.version}, expected 1", "user")
    return _FAMILIES[config.type]


def _create_model(payload: bytes, facts: Facts, target: str) -> CreateModel:
    body = read_body(CreateModelBody, payload)
    adapter = None
    seed = int(facts.get("seed", 0))
    if body.lora_config is not None:
        lora = body.lora_config
        seed = seed if lora.seed is None else lora.seed  # of the heads, too
        adapter = AdapterConfig(
            rank=lora.rank,
            seed=seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )
    optimizer = _family(body.optimizer_config) or "adamw"
    return CreateModel(model_id=target, base=body.base_model, adapter=adapter, optimizer=optimizer, seed=seed)


def _forward_backward(payload: bytes, facts: Facts, target: str) -> ForwardBackward:
    body, budget = parse_forward_backward(payload), DenseBudget()
    config: dict[str, float | str] = dict(body.loss_fn_config)
    for name, value in body.loss_fn_config_v2.items():
        chosen = value.WhichOneof("value")
        if chosen is None:
            raise ServiceError(f"loss_fn_config_v2: '{name}' holds neither a number nor a text", "user")
        config[name] = getattr(value, chosen)
    return ForwardBackward(
        model_id=target,
        data=tuple(_datum(datum, f"data[{index}]", budget) for index, datum in enumerate(body.data)),
        loss_fn=body.loss_fn,
        loss_fn_config=config,
        forward_only=body.forward_only,
    )


def _datum(datum: Any, place: str, budget: DenseBudget) -> Datum:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ServiceError(f"{place}.model_input: {kind or 'empty'} chunks are not supported, only text", "user")
        parts.append(tokens_of(chunk.encoded_text.tokens, f"{place}.model_input"))
    inputs = {
        name: read_tensor(tensor, f"{place}.loss_fn_inputs['{name}']", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(np.concatenate(parts) if parts else np.zeros(0, np.int32), inputs)


def _optim_step(payload: bytes, facts: Facts, target: str) -> OptimStep:
    body = read_body(OptimStepBody, payload)
    if (body.adam_params is None) == (body.optimizer_params is None):
        raise ServiceError("optim_step: expected either adam_params or optimizer_params", "user")
    if body.adam_params is not None:
        return OptimStep(model_id=target, adam=AdamParameters(**body.adam_params.model_dump()))
    given = body.optimizer_params
    assert given is not None
    family = _FAMILIES.get(given.type)
    if family is None:
        raise ServiceError(f"optimizer_params.type: '{given.type}', expected adamw or dimuon", "user")
    if family == "adamw":
        return OptimStep(model_id=target, adam=AdamParameters(**given.model_dump(exclude={"type"})))
    adam = AdamParameters(
        learning_rate=given.learning_rate, weight_decay=given.weight_decay, grad_clip_norm=given.grad_clip_norm
    )
    return OptimStep(model_id=target, adam=adam, muon_momentum=given.beta1, optimizer="muon")


def _save_weights(payload: bytes, facts: Facts, target: str) -> SaveWeights:
    body = read_body(SaveWeightsBody, payload)
    path = TinkerPath(target, "weights", check_name(body.path or f"checkpoint-{body.seq_id:06d}"))
    return SaveWeights(model_id=target, path=str(path), overwrite=body.overwrite, ttl_seconds=body.ttl_seconds)


def _save_weights_for_sampler(payload: bytes, facts: Facts, target: str) -> SaveForSampler:
    body = read_body(SaveForSamplerBody, payload)
    if body.path is None:
        if body.ttl_seconds is not None:
            raise ServiceError(
                "save_weights_for_sampler: ttl_seconds is of weights with a name; a sampler without one lives as long "
                "as the service's worker.sampler_seconds", "user",
            )  # fmt: skip
        return SaveForSampler(model_id=target, sampler_id=str(facts["sampling_session_id"]), kind=body.kind)
    if body.kind != "snapshot":
        raise ServiceError("save_weights_for_sampler: weights with a name are a snapshot; leave out path", "user")
    path = TinkerPath(target, "sampler_weights", check_name(body.path))
    return SaveForSampler(model_id=target, path=str(path), ttl_seconds=body.ttl_seconds)


def _save_weights_external(payload: bytes, facts: Facts, target: str) -> SaveWeights:
    body = read_body(SaveExternalBody, payload)
    if body.age_encryption_recipients:
        raise ServiceError("save_weights_external: age_encryption_recipients is not supported", "user")
    path = TinkerPath(target, "external_weights", check_name(body.path))
    return SaveWeights(model_id=target, path=str(path), ttl_seconds=body.ttl_seconds, external=True)


def _load_weights(payload: bytes, facts: Facts, target: str) -> LoadWeights:
    body = read_body(LoadWeightsBody, payload)
    path = parse_path(body.path)
    if path.kind == "external_weights":
        raise ServiceError(f"load_weights: {path} is for other programs; load from weights or sampler_weights", "user")
    if body.optimizer and path.kind != "weights":
        raise ServiceError(f"load_weights: {path} holds no optimizer state; load it with optimizer=false", "user")
    _family(body.optimizer_config)
    is_new, kind = body.model_seq_id is not None, facts.get("optimizer")
    made = None if body.optimizer or not is_new or kind is None else _family(OptimizerFamily(**kind))
    return LoadWeights(model_id=target, path=str(path), optimizer=body.optimizer, kind=made)


def _create_sampler(payload: bytes, facts: Facts, target: str) -> OpenSampler:
    body = read_body(CreateSamplingSession, payload)
    if body.model_path is not None:
        return OpenSampler(sampler_id=target, path=str(parse_path(body.model_path)))
    return OpenSampler(sampler_id=target, base=body.base_model)


def _sample(payload: bytes, facts: Facts, target: str) -> SampleRequest:
    return decode_sample(payload, int(facts["seed"]), target)


def _unload_model(payload: bytes, facts: Facts, target: str) -> UnloadModel:
    return UnloadModel(model_id=target)


def _evaluate(payload: bytes, facts: Facts, target: str) -> EvaluateRequest:
    return decode_evaluate(payload)


_DECODERS: dict[str, Callable[[bytes, Facts, str], Command]] = {
    "create_model": _create_model,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "save_weights_for_sampler": _save_weights_for_sampler,
    "save_weights_external": _save_weights_external,
    "load_weights": _load_weights,
    "create_sampler": _create_sampler,
    "sample": _sample,
    "unload_model": _unload_model,
    "evaluate": _evaluate,
}
