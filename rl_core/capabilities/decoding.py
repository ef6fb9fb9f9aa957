"""Fast paths of rollouts: the decoder, its packed weights, its compiled kernels."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rl_core.capabilities.decision import (
    Decision,
    build_decision,
    find_family_obstacles,
    find_position_obstacles,
    format_dtype,
    resolve_device_type,
    unwrap_adapters,
)
from rl_core.capabilities.images import find_image_obstacles
from rl_core.cpu import fused_decode, packed_gemm
from rl_core.types import AutocastPrecision

# larger copies need too much memory, and their products are memory-bound anyway
PACKED_BYTES = 1 << 30
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SILU = ("SiLU", "SiLUActivation")


def check_rollout_decoder(model: Any, device: str | None = None) -> Decision:
    """Decide about the rollout engine (`rl_core.inference.decoder`); adapters are merged while it runs."""
    weight = next(unwrap_adapters(model).parameters())
    name, forward_pass = type(unwrap_adapters(model)).__name__, "transformers' own forward pass"
    is_cuda = resolve_device_type(weight, device) == "cuda"
    graphs = "; steps are replayed as CUDA graphs" if is_cuda else ""
    fallback = f"{forward_pass} and cache, batch by batch"
    if not has_key_value_cache(model):
        fallback = f"{forward_pass} over the whole sequence for every token: {name} keeps no key/value cache"
    return build_decision(
        "rollout decoder",
        _find_decoder_obstacles(model),
        f"known family of plain linear layers: prompts prefilled once, slots refilled{graphs}",
        fallback,
    )


def has_key_value_cache(model: Any) -> bool:
    """Return whether the forward pass takes and returns keys and values of earlier tokens (`past_key_values`).

    Recurrent families (Mamba, RWKV) keep another kind of state under another name.
    """
    return "past_key_values" in inspect.signature(type(unwrap_adapters(model)).forward).parameters


def _find_decoder_obstacles(model: Any) -> Iterator[str]:
    base = unwrap_adapters(model)
    yield from find_image_obstacles(base, "which the engine does not prefill")
    yield from find_family_obstacles(base, "ForCausalLM")
    yield from find_position_obstacles(base.model)
    rotated = 2 * base.model.rotary_emb.inv_freq.numel()
    head_dim = base.model.layers[0].self_attn.head_dim
    if rotated != head_dim:
        yield f"rotary embedding rotates {rotated} of the {head_dim} dimensions of a head; the decoder rotates all"
    for owner, name in _iter_linears(base):
        layer = getattr(owner, name)
        if type(getattr(layer, "base_layer", layer)) is not nn.Linear:
            yield f"its {name} is {type(layer).__name__} (quantised?), not a plain linear layer"
    if base is not model and any("modules_to_save" in name for name, _ in model.named_parameters()):
        yield "its adapter replaces whole modules (modules_to_save), which cannot be merged"
    parameters = list(base.parameters())
    if len({parameter.device for parameter in parameters}) > 1:
        yield "its weights lie on several devices"
    if not all(parameter.is_floating_point() for parameter in parameters):
        yield "some of its weights are integers (quantised)"


def _iter_linears(base: Any) -> Iterator[tuple[Any, str]]:
    """Yield (module, attribute) of every linear layer used in decoding."""
    yield base, "lm_head"
    for layer in base.model.layers:
        for part in (layer.self_attn, layer.mlp):
            yield from ((part, name) for name in _LINEARS if hasattr(part, name))


def check_packed_weights(
    model: Any, device: str | None = None, *, autocast: AutocastPrecision = "none"
) -> Decision:
    """Decide about copying the weights before every run into the layout that the CPU multiplies fastest.

    Args:
        autocast: precision in which the trainer multiplies by float32 weights.
    """
    justification = (
        "small enough to be copied before every run, in a layout for products with few rows"
    )
    products = packed_gemm.load_bf16_products() if packs_in_bfloat16(model, autocast) else None
    if products is not None:
        justification += f"; in bfloat16, {packed_gemm.describe_bf16_kernel(products)}"
    return build_decision(
        "packed weights",
        _find_packing_obstacles(model, device, autocast),
        justification,
        "products with the weights in place",
    )


def packs_in_bfloat16(model: Any, autocast: AutocastPrecision = "none") -> bool:
    """Return whether packed copies of the weights are bfloat16: the weights are, or float32 weights are rounded as the
    trainer's `autocast` does, if this processor has products for it.
    """
    head = getattr(unwrap_adapters(model), "lm_head", None)
    dtype = getattr(getattr(head, "weight", None), "dtype", None)
    rounds = autocast == "bfloat16" and packed_gemm.load_bf16_products() is not None
    return dtype == torch.bfloat16 or (dtype == torch.float32 and rounds)


def _find_packing_obstacles(
    model: Any, device: str | None, autocast: AutocastPrecision
) -> Iterator[str]:
    yield from _require_path(check_rollout_decoder(model))
    base = unwrap_adapters(model)
    weight, in_bf16 = base.lm_head.weight, packs_in_bfloat16(model, autocast)
    if resolve_device_type(weight, device) != "cpu":
        yield f"its weights are on {resolve_device_type(weight, device)}; copies only help on a CPU"
    if weight.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        yield f"its weights are {format_dtype(weight)}; only float32, float64 and bfloat16 are copied"
    linears = [getattr(owner, name) for owner, name in _iter_linears(base)]
    dtypes = {format_dtype(getattr(layer, "base_layer", layer).weight) for layer in linears}
    if len(dtypes) > 1:
        yield f"the weights of its linear layers are {' and '.join(sorted(dtypes))}"
    if in_bf16 and packed_gemm.load_bf16_products() is None:
        yield f"its weights are bfloat16; {_explain_missing_products()}"
    sizes = [
        (parameter.numel(), 2 if in_bf16 else parameter.element_size())
        for parameter in base.parameters()
    ]
    size = sum(count * item for count, item in sizes)
    if size > PACKED_BYTES:
        yield f"its weights take {size / 2**30:.1f} GiB, more than the {PACKED_BYTES / 2**30:g} GiB limit for copies"


def check_compiled_decoding(
    model: Any, device: str | None = None, *, autocast: AutocastPrecision = "none"
) -> Decision:
    """Decide about compiled attention, norms, gates and sampling while decoding (`rl_core.cpu.fused_decode`).

    Args:
        autocast: see `check_packed_weights`.
    """
    return build_decision(
        "compiled decoding",
        _find_compiled_obstacles(model, device, autocast),
        "attention, norms, gates and sampling run as compiled code",
        "torch's kernels",
    )


def _find_compiled_obstacles(
    model: Any, device: str | None, autocast: AutocastPrecision
) -> Iterator[str]:
    yield from _require_path(check_packed_weights(model, device, autocast=autocast))
    base = unwrap_adapters(model)
    if base.lm_head.weight.dtype not in (torch.float32, torch.bfloat16):
        yield f"its weights are {format_dtype(base.lm_head.weight)}; compiled code needs float32 or bfloat16"
    attention = base.model.layers[0].self_attn
    heads = {
        "head_dim": attention.head_dim,
        "query_heads": attention.num_key_value_groups,
        "kv_heads": 1,
    }
    if not fused_decode.DecodeKernels.can_attend(**heads):
        yield (
            f"heads of {attention.head_dim} dimensions, {attention.num_key_value_groups} queries a key; compiled code "
            f"supports multiples of {fused_decode.VECTOR_WIDTH} up to {fused_decode.MAX_HEAD_DIM}, at most "
            f"{fused_decode.MAX_GROUP_SIZE} queries a key"
        )
    if fused_decode.load_decode_kernels() is None:
        yield _explain_missing_kernels()


def check_fused_step(
    model: Any, device: str | None = None, *, autocast: AutocastPrecision = "none"
) -> Decision:
    """Decide about running a whole decoding step as one compiled call (`rl_core.cpu.fused_decode.FusedStep`).

    Args:
        autocast: see `check_packed_weights`.
    """
    return build_decision(
        "fused step",
        _find_fused_obstacles(model, device, autocast),
        "a whole decoding step is one call of compiled code",
        "one call per operation",
    )


def _find_fused_obstacles(
    model: Any, device: str | None, autocast: AutocastPrecision
) -> Iterator[str]:
    yield from _require_path(check_compiled_decoding(model, device, autocast=autocast))
    has_float32_products = (
        packed_gemm.load_int8_gemm() is not None or packed_gemm.load_packed_vectors() is not None
    )
    if not has_float32_products and not packs_in_bfloat16(model, autocast):
        yield "this processor has neither tiles for products of 8-bit integers (AMX) nor vectors of 8 numbers (AVX2)"
    activations = {type(layer.mlp.act_fn).__name__ for layer in unwrap_adapters(model).model.layers}
    if not activations <= set(_SILU):
        yield f"its activation is {', '.join(sorted(activations))}; compiled code computes silu"


def check_slot_adapters(model: Any, device: str | None = None) -> Decision:
    """Decide about decoding sequences with different low-rank adapters together, bit for bit as each alone."""
    return build_decision(
        "adapters by slot",
        _require_path(check_fused_step(model, device)),
        "a decoding step applies each sequence's adapter, so samplers of the training service are decoded together",
        "training service: adapters are merged into the weights, one sampler after the other",
    )


def _require_path(other: Decision) -> Iterator[str]:
    if not other.allowed:
        yield f"needs the path '{other.name}'"


def _explain_missing_products() -> str:
    if fused_decode.load_decode_kernels() is None:
        return _explain_missing_kernels()
    return "this processor has no vectors of 8 numbers (AVX2)"


def _explain_missing_kernels() -> str:
    if os.environ.get("POSTTRAIN_NATIVE") == "0":
        return "POSTTRAIN_NATIVE=0 turns compiled code off"
    return "there is no compiled code (no C compiler, or compilation failed)"
