"""Fast paths of training: the packed forward pass on a CPU, prefix trees, and properties found by a trial run on a few
tokens.

B rows, S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
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
from rl_core.cpu import attention_kernel, gemm, layer_kernels
from rl_core.cpu.packed_forward import has_active_dropout
from rl_core.distributed.sharding import is_sharded_module

_LOGIT_OPTIONS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_NO_PRODUCTS = "no compiled products in bfloat16 are at hand (AVX-512 BF16 or AMX)"
_NO_CODE = "no compiled code is at hand (a C compiler and vectors of 8 numbers)"
_UNPACKED_IMAGES = "whose positions do not say where a sequence begins"
_NO_TRIAL_REASON = "found by a trial run when training starts; only the configuration was read here"
# of a packed row's difference from a sequence alone in one whose sequences are mixed; rounding in bfloat16 over 48
# layers of large weights is below 0.1, positions or masks that are wrong are near 1
_MAX_PACKING_SHARE = 0.2


def check_training_forward(model: Any, device: str | None = None) -> Decision:
    """Decide about the packed forward pass on a CPU (`rl_core.cpu.packed_forward.run_packed_forward`), adapters
    included.

    The decision depends on the model's current mode: dropout in attention is an obstacle in training mode only.

    Args:
        model: a transformers model with a head, or its trunk.
    """
    trunk = unwrap_adapters(model).base_model
    return build_decision(
        "training forward",
        _find_training_obstacles(trunk, device),
        "known family on a CPU: layers see real tokens only, " + _describe_products(trunk),
        "transformers' own forward pass over padded rows",
    )


def _describe_products(trunk: Any) -> str:
    is_half = next(trunk.parameters()).dtype == torch.bfloat16
    if gemm.multiplies_in_bfloat16() or (is_half and gemm.load_bf16_gemm() is not None):
        return "products round to bfloat16"
    return "all in float32" + (", bfloat16 weights are widened" if is_half else "")


def _find_training_obstacles(trunk: Any, device: str | None) -> Iterator[str]:
    yield from find_image_obstacles(trunk, "whose positions and states this path does not compute")
    yield from find_family_obstacles(trunk, "Model")
    weight, config = trunk.embed_tokens.weight, trunk.config
    # a sharded layer's weights are complete only while it is called itself
    if is_sharded_module(trunk.layers[0]):
        yield "its weights are sharded layer by layer among processes"
    # a GPU has fused attention over several sequences and hides small kernels
    device_type = resolve_device_type(weight, device)
    if device_type != "cpu":
        yield f"its weights are on {device_type}; this path is for CPUs, whose small kernels are slow"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        yield f"its weights are {format_dtype(weight)}, and this path computes in float32 or bfloat16"
    # compiled products of the sampler round as these do, torch's do not
    if weight.dtype == torch.bfloat16 and gemm.load_vectors() is None:
        yield f"its weights are bfloat16, and {_NO_CODE}"
    if torch.is_autocast_enabled("cpu"):
        if not gemm.multiplies_in_bfloat16():
            yield f"autocast is on, and {_NO_PRODUCTS}"
        elif not attention_kernel.AttentionKernel.supports_head_dim(
            trunk.layers[0].self_attn.head_dim
        ):
            yield "autocast is on, and attention over heads of this size needs torch's kernel"
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield f"attention is set to '{getattr(config, '_attn_implementation', None)}'; this path replaces 'sdpa'"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act}; this path computes silu"
    if trunk.training and getattr(config, "attention_dropout", 0.0):
        yield f"attention_dropout is {config.attention_dropout}; this path has none (dropout: false switches it off)"
    yield from find_position_obstacles(trunk)


def check_prefix_sharing(model: Any, device: str | None = None) -> Decision:
    """Decide about prefix trees: rows of a micro-batch that begin alike are computed once up to where they differ
    (`rl_core.cpu.prefix_tree`).

    The decision depends on the model's current mode: dropout is an obstacle in training mode only.

    Args:
        model: as in `check_training_forward`.
    """
    return build_decision(
        "prefix trees",
        _find_sharing_obstacles(unwrap_adapters(model), device),
        "common beginnings of rows are computed once, and micro_batch_tokens counts them once",
        "every row is computed from its first token, and micro_batch_tokens counts padded tokens",
    )


def _find_sharing_obstacles(base: Any, device: str | None) -> Iterator[str]:
    if not (decision := check_training_forward(base, device)).allowed:
        yield f"its training passes are transformers' own: {decision.reason}"
    has_head = getattr(base, "get_output_embeddings", lambda: None)() is not None
    head = check_chunked_head(base) if has_head else None
    if head is not None and not head.allowed and not head.is_undecided:
        yield f"its logits are computed over padded rows: {head.reason}"
    if has_active_dropout(base.base_model):
        yield "dropout of its adapters gives equal tokens different noise (dropout: false switches it off)"


def check_independent_rows(model: Any, device: str | None = None) -> Decision:
    """Decide whether a row's states and gradients are bit-identical regardless of the rows computed with it.

    This project's compiled code guarantees it, on an Intel processor within `gemm.use_row_invariant_products`;
    kernels of torch and MKL choose their summation order by the size of a batch.
    """
    return build_decision(
        "independent rows",
        _find_independence_obstacles(unwrap_adapters(model).base_model, device),
        "rows are independent: the training service computes runs with adapters together",
        "training service: separate passes for every run, equally exact but slower",
    )


def _find_independence_obstacles(trunk: Any, device: str | None) -> Iterator[str]:
    if not (decision := check_training_forward(trunk, device)).allowed:
        yield f"its training passes are transformers' own: {decision.reason}"
    config, head_dim = trunk.config, trunk.layers[0].self_attn.head_dim
    if not attention_kernel.AttentionKernel.supports_head_dim(head_dim):
        yield f"attention over heads of {head_dim} dimensions needs torch's kernel"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % layer_kernels.VECTOR_WIDTH:
            yield f"{name} {getattr(config, name)} is not a multiple of {layer_kernels.VECTOR_WIDTH}"
    with gemm.use_row_invariant_products():
        products = gemm.load_gemm()
    if (
        products is None
        or layer_kernels.load_norm_and_gate() is None
        or attention_kernel.load_attention_kernel() is None
    ):
        yield "matrix products are not compiled code here (no C compiler, or vectors too short)"


def check_chunked_head(model: Any) -> Decision:
    """Decide about computing logits chunk by chunk as output head times the trunk's last hidden state.

    Some families scale or cap their logits. Their configurations say so under known names; a trial on a few tokens,
    once per model, catches the rest.
    """
    base = unwrap_adapters(model)
    head: Any = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    name, fallback = "chunked head", "the model's own logits, [B, S, V] at once"
    obstacle = next(_find_head_obstacles(base, head), None)
    if obstacle is not None:
        return Decision(name, False, obstacle, fallback)
    equal = getattr(base, "_posttrain_plain_head", None)
    if equal is None:
        if head.weight.is_meta:
            return Decision(name, False, _NO_TRIAL_REASON, fallback, is_undecided=True)
        equal = _has_plain_logits(base, head)
        setattr(base, "_posttrain_plain_head", equal)  # noqa: B010 a plain attribute, not in the state dict
    if not equal:
        reason = "in a trial its logits differ from head times last hidden state"
        return Decision(name, False, reason, fallback)
    reason = "logits are head times last hidden state (by a trial): never a [B, S, V] tensor"
    return Decision(name, True, reason, fallback)


def _find_head_obstacles(base: Any, head: Any) -> Iterator[str]:
    if head is None:
        yield "it has no output head"
    if type(head) is not nn.Linear:
        yield f"its output head is {type(head).__name__} of {type(head).__module__}, not torch's"
    for option in _LOGIT_OPTIONS:
        if getattr(base.config, option, None):
            yield f"it scales or caps its logits ({option} = {getattr(base.config, option)})"


def _has_plain_logits(base: Any, head: nn.Linear) -> bool:
    vocab_size = head.weight.shape[0]
    ids = torch.arange(1, vocab_size, max(1, vocab_size // 8), device=head.weight.device)[None]
    with _use_trial_mode(base):
        hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = base(input_ids=ids, use_cache=False).logits
        return torch.equal(head(hidden), logits)


def check_sequence_packing(model: Any) -> Decision:
    """Decide about packing several sequences into one row of a training batch, by a trial on short ones.

    Not every family and attention kernel separates them (recurrent ones, those without position ids, kernels without
    a block mask), and one that does not would mix them silently. The trial runs two rows in eval mode. Tokens in
    front of a sequence must move its hidden states by at most 1/50 of their effect in an unpacked row (on most
    machines by nothing; experts may round with their load), and the states must equal those of the sequence alone, up
    to rounding. Rounding grows with the depth, and its largest value says little in half precision: beyond the bound of
    a shallow model, the mean square counts, against that of a row whose sequences are not separated.
    """
    base = unwrap_adapters(model)
    name, fallback = "sequence packing", "one sequence a row"
    weight = next(base.parameters())
    if (obstacle := next(find_image_obstacles(base, _UNPACKED_IMAGES), None)) is not None:
        return Decision(name, False, obstacle, fallback)
    if weight.is_meta:
        return Decision(name, False, _NO_TRIAL_REASON, fallback, is_undecided=True)
    try:
        leak, effect, difference, share = _measure_packing_leak(base)
    except (TypeError, ValueError, RuntimeError) as error:  # a family without position ids
        reason = f"a trial with position ids failed: {type(error).__name__}: {error}"
        return Decision(name, False, reason, fallback)
    if not leak <= effect / 50:
        reason = "in a trial a sequence attended to the one before it in its row"
        return Decision(name, False, reason, fallback)
    # some families always compute softmax in float32
    eps = max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)
    is_deep_rounding = (
        eps > torch.finfo(torch.float32).eps
        and share <= _MAX_PACKING_SHARE
        and difference <= (eps * max(1, _count_layers(base))) ** 0.5
    )
    if not (difference <= eps**0.5 or is_deep_rounding):
        reason = f"in a trial hidden states differed by {difference:.1e} of their size"
        return Decision(name, False, reason, fallback)
    reason = "sequences in one row are separated (by a trial on short ones)"
    return Decision(name, True, reason, fallback)


def _count_layers(base: Any) -> int:
    config = base.config.get_text_config() if hasattr(base.config, "get_text_config") else None
    return int(getattr(config, "num_hidden_layers", None) or 1)


def _measure_packing_leak(base: Any) -> tuple[float, float, float, float]:
    """Measure the effect of tokens in front in a packed and an unpacked row, the relative difference of packed from
    alone, and its root mean square as a share of the one that an unpacked row has.
    """
    vocab_size = base.get_input_embeddings().weight.shape[0]
    tokens_S = torch.arange(12, device=next(base.parameters()).device)
    first_ids_S, other_ids_S, ids_S = (tokens_S * step % (vocab_size - 1) + 1 for step in (3, 5, 7))
    num_front = 5  # tokens of the sequence in front
    alone_BS = torch.stack([ids_S] * 2)
    rows_BS = torch.stack(
        [torch.cat([front_ids_S[:num_front], ids_S]) for front_ids_S in (first_ids_S, other_ids_S)]
    )
    positions_BS = torch.cat([tokens_S[:num_front], tokens_S]).expand(2, -1)

    def compute_hidden(ids_BS: torch.Tensor, positions_BS: torch.Tensor | None) -> torch.Tensor:
        inputs = {"input_ids": ids_BS}
        if positions_BS is not None:
            inputs["position_ids"] = positions_BS
            if needs_single_packed_row(base):
                inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
        states = base.base_model(**inputs, use_cache=False).last_hidden_state
        return states.reshape(*ids_BS.shape, -1).double()[:, -len(ids_S) :]

    with _use_trial_mode(base):
        alone = compute_hidden(alone_BS, None)
        unpacked = compute_hidden(rows_BS, None)
        packed = compute_hidden(rows_BS, positions_BS)
    leak, effect = (float((rows[0] - rows[1]).abs().max()) for rows in (packed, unpacked))
    difference = float((packed - alone).abs().max()) / float(alone.abs().max())
    rounding, mixing = (float((row - alone).square().mean()) ** 0.5 for row in (packed, unpacked))
    return leak, effect, difference, rounding / mixing if mixing > 0 else math.inf


def check_causal_attention(model: Any, device: str | None = None) -> Decision:
    """Decide about causal attention without a mask and without reads of the GPU (`rl_core.models.device_attention`)."""
    trunk = unwrap_adapters(model).base_model
    return build_decision(
        "causal attention",
        _find_device_attention_obstacles(trunk, device),
        "known family on a GPU: no mask is made, and the device is not asked whether rows are packed",
        "transformers' masks, with one read of the device in each pass",
    )


def _find_device_attention_obstacles(trunk: Any, device: str | None) -> Iterator[str]:
    yield from find_image_obstacles(trunk, "whose positions this path does not compute")
    yield from find_family_obstacles(trunk, "Model")
    yield from find_position_obstacles(trunk)
    device_type = resolve_device_type(trunk.embed_tokens.weight, device)
    if device_type != "cuda":
        yield f"its weights are on {device_type}; this path is for GPUs"
    if getattr(trunk.config, "_attn_implementation", None) != "sdpa":
        yield f"attention is set to '{getattr(trunk.config, '_attn_implementation', None)}'; this path replaces 'sdpa'"


def check_packed_attention(model: Any, device: str | None = None) -> Decision:
    """Decide about attention within packed sequences by torch's kernel for them (`rl_core.models.device_attention`).

    A trial when the first packed batch arrives decides whether the kernel runs here and separates the sequences.
    """
    trunk = unwrap_adapters(model).base_model
    return build_decision(
        "packed attention",
        _find_packed_attention_obstacles(trunk, device),
        "known family in half precision on a GPU: attention within each sequence of a row, without a mask",
        "attention over whole rows with a mask of their sequences",
    )


def _find_packed_attention_obstacles(trunk: Any, device: str | None) -> Iterator[str]:
    yield from _find_device_attention_obstacles(trunk, device)
    weight, config = trunk.embed_tokens.weight, trunk.config
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    if not is_half and not torch.is_autocast_enabled("cuda"):
        yield f"its weights are {format_dtype(weight)} without autocast; the kernel needs half precision"
    if find_spec("torch.nn.attention.varlen") is None:
        yield f"torch {torch.__version__} has no such kernel"
    if trunk.training and getattr(config, "attention_dropout", 0.0):
        yield f"attention_dropout is {config.attention_dropout}; this path has none (dropout: false switches it off)"
    if any(getattr(module, "gradient_checkpointing", False) for module in trunk.modules()):
        yield "activation checkpointing recomputes attention where this path is no longer set"


def check_router_logits(model: Any) -> Decision:
    """Decide about a load-balancing loss: whether the trunk returns the logits of its routers, by a trial."""
    base = unwrap_adapters(model)
    name, fallback = "router logits", "no load-balancing loss"
    weight = next(base.parameters())
    if weight.is_meta:
        return Decision(name, False, _NO_TRIAL_REASON, fallback, is_undecided=True)
    ids_BS = torch.ones(1, 3, dtype=torch.int64, device=weight.device)
    experts = getattr(base.config, "num_experts_per_tok", None)
    try:
        with _use_trial_mode(base):
            output = base.base_model(ids_BS, use_cache=False, output_router_logits=True)
            router_logits = getattr(output, "router_logits", None)
    except (TypeError, ValueError) as error:  # a family without this option
        reason = f"a trial with output_router_logits failed: {type(error).__name__}: {error}"
        return Decision(name, False, reason, fallback)
    if (
        not router_logits
        or experts is None
        or any(logits is None or logits.shape[:-1].numel() != 3 for logits in router_logits)
    ):
        reason = f"{type(base).__name__} returns no router logits: it has no experts, or hides them"
        return Decision(name, False, reason, fallback)
    reason = (
        f"{len(router_logits)} routers of {router_logits[0].shape[-1]} experts, {experts} per token"
    )
    return Decision(name, True, reason, fallback)


def needs_single_packed_row(model: Any) -> bool:
    """Return whether the attention kernel separates packed sequences only in a batch of one row (flash kernels)."""
    return "flash" in str(getattr(model.config, "_attn_implementation", None))


@contextmanager
def _use_trial_mode(model: nn.Module) -> Iterator[None]:
    """Disable gradients and put every module into eval mode; restore each mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
