"""A small base model in a folder, an engine over it, and requests with random contents."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.model_tokenizer import make_tokenizer
from rl_core.models import causal_lm
from rl_core.service.requests import (
    AdamParameters,
    AdapterConfig,
    CreateModel,
    Datum,
    ForwardBackward,
    OptimStep,
)
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceEngineSettings

VOCAB, CONTEXT = 60, 48
# Widths that compiled code takes, so that rows of several runs are batched.
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=CONTEXT,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)


def make_base(
    folder: Path, seed: int = 0, model_class=LlamaForCausalLM, config_class=LlamaConfig, **options
) -> Path:
    """Make a model folder with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SHAPE, **options}))
    causal_lm.save(model, make_tokenizer(VOCAB), folder)
    return folder


def make_engine(folder: Path, **settings) -> TrainingEngine:
    """Make an engine whose only base model is 'base'."""
    return TrainingEngine(
        ServiceEngineSettings(**{"bases": {"base": str(folder)}, "device": "cpu", **settings})
    )


def new_run(engine: TrainingEngine, name: str, rank: int = 4, seed: int = 0, **adapter) -> None:
    """Make a training run whose adapter is not 0, as after some updates."""
    engine.create_model(
        CreateModel(
            model_id=name, base="base", adapter=AdapterConfig(rank=rank, seed=seed, **adapter)
        )
    )
    state = engine.state_dict(name)
    generator = torch.Generator().manual_seed(seed + 1)
    for key, tensor in state["model"].items():
        if "lora_B" in key:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    engine.restore_model(name, state)


RANKS = {"a": 4, "b": 1, "c": 16}  # of the training runs of `engine_with`, by name


def engine_with(folder: Path, names: Iterable[str], **settings) -> TrainingEngine:
    """Make an engine with these training runs, each of another rank."""
    engine = make_engine(folder, **settings)
    for name in names:
        new_run(engine, name, rank=RANKS[name], seed=sorted(RANKS).index(name))
    return engine


def random_data(
    seed: int, rows: int = 3, *, policy: bool = False, shared: int = 0
) -> tuple[Datum, ...]:
    """Draw ragged datums; with `policy` those of ratio losses. shared: tokens that all of them begin with."""
    rng = np.random.default_rng(seed)
    start = rng.integers(2, VOCAB, shared)
    data = []
    for _ in range(rows):
        tokens = np.concatenate([start, rng.integers(2, VOCAB, int(rng.integers(3, 17)))])
        inputs = {"target_tokens": np.append(tokens[1:], rng.integers(2, VOCAB))}
        size = len(tokens)
        if policy:
            inputs |= {
                "logprobs": -rng.exponential(2.0, size).astype(np.float32) - 1,
                "advantages": rng.standard_normal(size).astype(np.float32),
            }
        else:
            inputs["weights"] = rng.standard_normal(size).astype(np.float32)
        data.append(Datum(tokens, inputs))
    return tuple(data)


def merged_gradient(run, data: tuple[Datum, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute cross entropy and its gradient by torch in float64: W + scale B A for W, one datum after the other."""
    model = copy.deepcopy(run.base.model).double()
    factors = {
        name: p.detach().double().requires_grad_()
        for name, p in run.parameters.items()
        if "lora" in name
    }
    merged = {
        f"{name}.weight": model.get_submodule(name).weight
        + update.scale * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
        for name, update in run.adapter.items()
    }
    loss = 0.0
    for datum in data:
        ids = torch.from_numpy(datum.tokens)[None]
        logits = torch.func.functional_call(model, merged, (ids,), {"use_cache": False}).logits[0]
        p = torch.log_softmax(logits, -1).gather(
            1, torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        )[:, 0]
        loss = loss - (torch.from_numpy(datum.inputs["weights"]).double() * p).sum()
    loss.backward()
    return loss.item(), {name: factor.grad for name, factor in factors.items()}


def loss_request(
    name: str, data: tuple[Datum, ...], loss: str = "cross_entropy", **more
) -> ForwardBackward:
    return ForwardBackward(model_id=name, data=data, loss_fn=loss, **more)


def step_request(name: str, learning_rate: float = 1e-2, **adam) -> OptimStep:
    return OptimStep(model_id=name, adam=AdamParameters(learning_rate=learning_rate, **adam))


def bits(state: object) -> object:
    """Return a state with every tensor and array as its bytes, for comparison to the last bit."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().view(-1).numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.shape, state.tobytes()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    return state
