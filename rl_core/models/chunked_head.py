"""Output head and log-softmax at selected positions, chunk by chunk, without a [B, S, V] tensor.

N tokens, C of them in a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rl_core.cpu.gemm import multiplies_in_bfloat16
from rl_core.cpu.layer_kernels import add_weight_grad, compute_input_grad, compute_linear
from rl_core.cpu.low_rank import AdapterSpan, AdapterSpans, add_low_rank, compute_low_rank_grads

# replaces -inf, which a bias may hold for excluded tokens: -inf times exp(-inf) = 0 would be NaN
_MIN_LOGPROB = -1e30
_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # logits per chunk: 64 MiB and 1 GiB in float32


def compute_chunk_tokens(device_type: str, vocab_size: int) -> int:
    """Return the number of positions in a chunk, by vocabulary and device."""
    return max(128, _CHUNK_ELEMENTS.get(device_type, 2**24) // vocab_size)


def compute_selected_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    *,
    temperatures_N: torch.Tensor | None = None,
    adapters: Sequence[AdapterSpan] = (),
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log softmax((hidden W^T + bias) / temperature) at the targets, and the entropy, chunk by chunk, with
    gradient.

    Args:
        hidden_NH, weight_VH, bias_V: the head's input and parameters; the product is computed in their dtype (or
            autocast's), everything after it in at least float32.
        targets_N: int64 [N], or [N, K] for K targets per position.
        temperatures_N: float [N], above 0; None = 1.
        adapters: of the head, each over a span of the positions, in order; a span's result does not depend on the
            others if all positions are one chunk.
    Returns: logprobs of the targets' shape and entropy [N] or None, in nats; float32, or float64 for float64 input.
    """
    device = hidden_NH.device.type
    # compiled products round their operands themselves, so that the head is not copied
    in_bf16 = rounds_head_operands(hidden_NH, weight_VH)
    if in_bf16:  # once, not for each chunk
        weight_VH = weight_VH.float()
    if torch.is_autocast_enabled(device) and not in_bf16:
        dtype = torch.get_autocast_dtype(device)
        hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        bias_V = bias_V.to(dtype) if bias_V is not None else None
    if chunk_tokens is None:
        chunk_tokens = compute_chunk_tokens(device, weight_VH.shape[0])
    factors = [factor for span in adapters for factor in (*span.downs, *span.ups)]
    spans = AdapterSpans.from_spans(adapters)
    logprobs_N, entropy_N = _SelectedLogprobs.apply(
        hidden_NH,
        weight_VH,
        bias_V,
        targets_N,
        temperatures_N,
        with_entropy,
        chunk_tokens,
        in_bf16,
        spans,
        *factors,
    )
    return logprobs_N, entropy_N if with_entropy else None


def rounds_head_operands(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
    """Return whether compiled products of the head round float32 states to bfloat16, as those of the layers."""
    if hidden_NH.device.type != "cpu" or hidden_NH.dtype != torch.float32:
        return False
    return weight_VH.dtype == torch.bfloat16 or multiplies_in_bfloat16()


class _SelectedLogprobs(torch.autograd.Function):
    """Chunked head and log-softmax.

    With p = softmax(z / T), z = h W^T + b, for upstream gradients g (log-prob) and e (entropy S = -sum p log p):
        dL/dz = (g (onehot(target) - p) - e p (log p + S)) / T
    If everything fits into one chunk, log p is kept for backward; otherwise backward recomputes it chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor | None,
        with_entropy: bool,
        chunk: int,
        in_bf16: bool,
        spans: AdapterSpans,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden_NH.shape[0]
        accurate = promote_to_float32(hidden_NH.dtype)
        logprobs_N = hidden_NH.new_empty(targets_N.shape, dtype=accurate)
        entropy_N = hidden_NH.new_empty(count if with_entropy else 0, dtype=accurate)
        cached: list[torch.Tensor] = []
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            log_p_CV, saved = _compute_log_softmax(
                hidden_NH[part],
                weight_VH,
                bias_V,
                _slice_optional(temperatures_N, part),
                _clip_spans(spans, start, start + chunk, count),
                in_bf16=in_bf16,
            )
            logprobs_N[part] = log_p_CV.gather(1, _to_columns(targets_N[part])).view(
                targets_N[part].shape
            )
            if with_entropy:
                if bias_V is not None:
                    log_p_CV.clamp_(min=_MIN_LOGPROB)
                entropy_N[part] = -_sum_products(log_p_CV.exp(), log_p_CV)
            if count <= chunk and any(ctx.needs_input_grad):
                cached = [log_p_CV, *saved]
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N, *cached
        )
        ctx.chunk, ctx.spans, ctx.count, ctx.in_bf16 = chunk, spans, len(factors), in_bf16
        # an entropy that is only logged costs the backward pass nothing
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N, *cached = (
            ctx.saved_tensors
        )
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        accurate = promote_to_float32(hidden_NH.dtype)
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(targets_N, dtype=accurate)
        # scaled here instead of at the [C, V] gradients, which are linear in these
        if temperatures_N is not None:
            grad_logprobs_N = (_to_columns(grad_logprobs_N) / temperatures_N[:, None]).view(
                targets_N.shape
            )
            grad_entropy_N = grad_entropy_N / temperatures_N if grad_entropy_N is not None else None
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Summed over chunks in float32: bfloat16 sums would lose small contributions.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=accurate) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=accurate) if needs_bias else None
        grad_factors = _FactorGrads(ctx.spans, ctx.count)
        count = hidden_NH.shape[0]
        for start in range(0, count, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            spans = _clip_spans(ctx.spans, start, start + ctx.chunk, count)
            if cached:
                log_p_CV, saved = cached[0], cached[1:]
            else:
                log_p_CV, saved = _compute_log_softmax(
                    hidden_NH[part],
                    weight_VH,
                    bias_V,
                    _slice_optional(temperatures_N, part),
                    spans,
                    in_bf16=ctx.in_bf16,
                )
                if bias_V is not None:
                    log_p_CV.clamp_(min=_MIN_LOGPROB)
            grad_CV, grad_CK = log_p_CV.exp(), _to_columns(grad_logprobs_N[part])
            grad_C1 = grad_CK.sum(1, keepdim=True)
            if grad_entropy_N is not None:
                # -p (g + e (log p + S)); log p is finite, so p = 0 gives 0
                factor_CV = (log_p_CV + entropy_N[part, None]).mul_(grad_entropy_N[part, None])
                grad_CV.mul_(factor_CV.add_(grad_C1).neg_())
            else:
                grad_CV.mul_(grad_C1.neg())
            grad_CV.scatter_add_(1, _to_columns(targets_N[part]), grad_CK)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            added_CH = None
            if spans:
                added_CH, grads = compute_low_rank_grads(
                    grad_CV, hidden_NH[part], saved, spans, with_x=needs_hidden
                )
                grad_factors.add_chunk(start, start + ctx.chunk, grads)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[part] = compute_input_grad(grad_CV, [weight_VH], in_bf16=ctx.in_bf16)
                if added_CH is not None:
                    grad_hidden_NH[part] += added_CH
            if grad_weight_VH is not None:
                if accurate == weight_VH.dtype:
                    add_weight_grad(grad_weight_VH, grad_CV, hidden_NH[part], in_bf16=ctx.in_bf16)
                else:
                    grad_weight_VH += grad_CV.t() @ hidden_NH[part]
        return (
            grad_hidden_NH,
            grad_weight_VH.to(weight_VH.dtype) if grad_weight_VH is not None else None,
            grad_bias_V.to(bias_V.dtype) if grad_bias_V is not None else None,
            None,
            None,
            None,
            None,
            None,
            None,
            *grad_factors.sums,
        )


class _FactorGrads:
    """Gradients of adapters' factors, summed over chunks in order."""

    def __init__(self, spans: Sequence[AdapterSpan], count: int) -> None:
        self._spans = spans
        self.sums: list[torch.Tensor | None] = [None] * count

    def add_chunk(self, start: int, stop: int, grads: Sequence[torch.Tensor]) -> None:
        """Add the gradients of the spans that overlap a chunk."""
        next_grads = iter(grads)
        for index, span in enumerate(self._spans):
            if span.start < stop and start < span.stop:
                for factor in (2 * index, 2 * index + 1):
                    grad, total = next(next_grads), self.sums[factor]
                    self.sums[factor] = grad if total is None else total + grad


def _clip_spans(spans: AdapterSpans, start: int, stop: int, count: int) -> AdapterSpans:
    """Clip spans to a chunk and shift them to its positions."""
    if start == 0 and count <= stop:
        return spans
    return AdapterSpans(
        [
            replace(span, start=max(span.start, start) - start, stop=min(span.stop, stop) - start)
            for span in spans
            if span.start < stop and start < span.stop
        ]
    )


def expand_temperatures(
    values: Sequence[float], counts: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """Expand one temperature per group to positions [N], float32 regardless of the model's dtype.

    Returns: None if all are 1.
    """
    if all(value == 1 for value in values):
        return None
    return (
        torch.tensor(list(values), dtype=torch.float32)
        .repeat_interleave(torch.tensor(list(counts)))
        .to(device)
    )


def promote_to_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, promoted to at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _slice_optional(values_N: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return values_N[part] if values_N is not None else None


def _to_columns(values: torch.Tensor) -> torch.Tensor:
    """View [N] or [N, K] as [N, K]."""
    return values if values.ndim == 2 else values[:, None]


def compute_log_softmax_chunk(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperatures_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute log softmax of the logits over the temperatures, [C, V], in at least float32."""
    return _compute_log_softmax(
        hidden_CH, weight_VH, bias_V, temperatures_C, [], in_bf16=multiplies_in_bfloat16()
    )[0]


def _compute_log_softmax(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperatures_C: torch.Tensor | None,
    spans: Sequence[AdapterSpan],
    *,
    in_bf16: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute as `compute_log_softmax_chunk`, with adapters; also return the `saved` argument of
    `compute_low_rank_grads`.
    """
    logits_CV = compute_linear(hidden_CH, [weight_VH], in_bf16=in_bf16)
    saved: list[torch.Tensor] = []
    if spans:
        logits_CV = logits_CV.to(promote_to_float32(logits_CV.dtype))
        saved = add_low_rank(logits_CV, hidden_CH, spans)
    if bias_V is not None:
        logits_CV += bias_V
    accurate = promote_to_float32(logits_CV.dtype)
    if temperatures_C is not None:  # in float32 as in the sampler; in place, to save a third buffer
        logits_CV = logits_CV.to(accurate).div_(temperatures_C[:, None])
    return torch.log_softmax(logits_CV, dim=-1, dtype=accurate), saved


def _sum_products(left_CV: torch.Tensor, right_CV: torch.Tensor) -> torch.Tensor:
    """Compute row-wise dot products [C], without a third [C, V] buffer."""
    return left_CV.mul_(right_CV).sum(-1)
