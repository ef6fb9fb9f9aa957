"""Fast path of the training forward pass on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_core.capabilities.decision import (
    Decision,
    decide,
    device_type,
    dtype_name,
    family_obstacles,
    position_obstacles,
    unwrapped,
)
from rl_core.cpu import attention_kernel, gemm, norm_and_gate
from rl_core.distributed.sharded_types import is_sharded_module

__all__ = ["independent_rows", "training_forward"]


def training_forward(model: Any, device: str | None = None) -> Decision:
    """Permission for the packed forward pass on a CPU (`rl_core.cpu.packed_forward`), adapters included.

    It follows the model's present mode: dropout and activation checkpointing speak against it in training mode only.
    Batches of packed rows (`position_ids_BS`) go to transformers in any case.

    Args:
        model: a transformers model with a head, or its trunk.
    """
    trunk = unwrapped(model).base_model
    return decide(
        "training forward",
        _training_obstacles(trunk, device),
        "known family in float32 on a CPU: layers see real tokens only, common prefixes once",
        "transformers' own forward pass over padded rows",
    )


def _training_obstacles(trunk: Any, device: str | None) -> Iterator[str]:
    yield from family_obstacles(trunk, "Model")
    weight, config = trunk.embed_tokens.weight, trunk.config
    if is_sharded_module(trunk.layers[0]):  # its weights are in one piece only while it is called itself
        yield "its weights are sharded layer by layer among processes"
    # A GPU has fused attention over several sequences and does not mind small kernels; in low precision transformers
    # rounds at places that are its own.
    if device_type(weight, device) != "cpu":
        yield f"its weights are on {device_type(weight, device)}; this path is for a CPU, whose small kernels are slow"
    if weight.dtype != torch.float32:
        yield f"its weights are {dtype_name(weight)}, and this path computes in float32"
    if torch.is_autocast_enabled("cpu"):
        yield "autocast is on, and this path computes in float32"
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield f"attention is set to '{getattr(config, '_attn_implementation', None)}'; this path stands for 'sdpa'"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act}; this path computes silu"
    if trunk.training and getattr(config, "attention_dropout", 0.0):
        yield f"attention_dropout is {config.attention_dropout}; this path has none (dropout: false switches it off)"
    if trunk.training and any(getattr(part, "gradient_checkpointing", False) for part in (trunk, *trunk.layers[:1])):
        yield "activation checkpointing is on, which works on transformers' layers"
    yield from position_obstacles(trunk)


def independent_rows(model: Any, device: str | None = None) -> Decision:
    """Guarantee that a row's states and gradients are the same bits whatever rows are computed beside it.

    Compiled code of this project keeps it, on an Intel processor within `gemm.row_by_row`; kernels of torch and MKL
    choose their order of sums by the size of a batch.
    """
    return decide(
        "independent rows",
        _independence_obstacles(unwrapped(model).base_model, device),
        "no row's numbers depend on those beside it: the training service computes runs with adapters together",
        "training service: every run in passes of its own, as exact and slower",
    )


def _independence_obstacles(trunk: Any, device: str | None) -> Iterator[str]:
    if not (decision := training_forward(trunk, device)).allowed:
        yield f"its training passes are transformers' own: {decision.reason}"
    config, head_dim = trunk.config, trunk.layers[0].self_attn.head_dim
    if not attention_kernel.AttentionKernel.suits(head_dim):
        yield f"heads of {head_dim} dimensions are attended to by torch's kernel"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % norm_and_gate.WIDTH:
            yield f"{name} {getattr(config, name)} is no multiple of {norm_and_gate.WIDTH}"
    with gemm.row_by_row():
        products = gemm.load()
    if products is None or norm_and_gate.load() is None or attention_kernel.load() is None:
        yield "matrix products are not this project's compiled code here (no C compiler, or vectors of few numbers)"
