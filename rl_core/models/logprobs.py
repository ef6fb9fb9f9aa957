"""Log-probabilities of the tokens that carry loss, computed without a [B, S, V] tensor.

B rows, S sequence, N tokens that carry loss, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from rl_core.capabilities import plain_head
from rl_core.cpu.kernels import add_weight_grad, input_grad, linear
from rl_core.errors import DataError
from rl_core.models.hidden_states import hidden_states, model_inputs
from rl_core.models.lora import unwrap
from rl_core.types import TrainBatch

__all__ = [
    "TokenOutputs",
    "completion_logprobs",
    "next_token_logprobs",
    "selected_logprobs",
    "token_outputs",
]

_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # float32 logits of one chunk: 64 MiB and 1 GiB


@dataclass(slots=True)
class TokenOutputs:
    """Outputs of a model at the tokens that carry loss. All [B, S], 0 where the mask is False, with gradient."""

    logprobs_BS: torch.Tensor  # nats
    entropy_BS: torch.Tensor | None = None  # nats, of the distribution over the vocabulary before the token
    values_BS: torch.Tensor | None = None  # value of the state before the token
    value_after_B: torch.Tensor | None = None  # value of the state after each row's last real token


def completion_logprobs(
    model: PreTrainedModel, batch: TrainBatch, *, with_entropy: bool = False, chunk_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(token s | tokens before s) of every token that carries loss, with gradient; and their entropy.

    p is at the batch's temperatures. Args, Raises: as `token_outputs`.
    Returns: logprobs float32 [B, S] in nats; entropy float32 [B, S] in nats or None; both 0 where the mask is False.
        (float64 for a float64 model.)
    """
    outputs = token_outputs(model, batch, with_entropy=with_entropy, chunk_tokens=chunk_tokens)
    return outputs.logprobs_BS, outputs.entropy_BS


def token_outputs(
    model: PreTrainedModel,
    batch: TrainBatch,
    *,
    with_entropy: bool = False,
    value_head: nn.Module | None = None,
    chunk_tokens: int | None = None,
) -> TokenOutputs:
    """Log-probabilities, entropies and values of every token that carries loss, from one pass through the trunk.

    Head and log-softmax run at the positions whose next token carries loss, in chunks, so that at most two float32
    buffers of [chunk_tokens, V] exist at any time, in backward too. Rows are padded on the right, so the causal mask
    alone keeps padding out of real tokens: no attention mask is passed, and the attention kernels take their fast
    causal path. Rows that hold several sequences say so by `position_ids_BS`; the model must be one that heeds it
    (`capabilities.sequence_packing`).

    Where tokens were drawn from softmax(logits / temperature), `temperatures_BS` says so, and log-probabilities and
    entropies are of that distribution: a policy gradient taken at another temperature is another policy's.

    Args:
        model: a causal LM, with or without adapters.
        batch: right-padded; loss_mask_BS True = token carries loss, never at position 0, nor at the first token of a
            packed sequence; temperatures_BS above 0 at these tokens, None = 1.
        with_entropy: also give the entropies.
        value_head: maps hidden states [N, H] to values [N]; None = no values.
        chunk_tokens: positions whose logits are held at once; None = by vocabulary and device.
    Raises: DataError when shapes differ, position 0 carries loss, or a temperature is not above 0.
    """
    ids_BS, mask_BS = batch.input_ids_BS, batch.loss_mask_BS
    if ids_BS.ndim != 2 or mask_BS.shape != ids_BS.shape:
        raise DataError(f"input_ids {tuple(ids_BS.shape)} and loss_mask {tuple(mask_BS.shape)} must be equal [B, S]")
    if bool(mask_BS[:, 0].any()):
        raise DataError("loss_mask is True at position 0, which has no token before it")
    if batch.position_ids_BS is not None and bool((mask_BS & (batch.position_ids_BS == 0)).any()):
        raise DataError("loss_mask is True at the first token of a packed sequence, which has no token before it")
    positions_N = mask_BS.reshape(-1).nonzero().squeeze(1)
    targets_N = ids_BS.reshape(-1)[positions_N]
    temperatures_N = _temperatures(batch, positions_N)
    base = unwrap(model)
    head = base.get_output_embeddings()
    if plain_head(base).allowed:
        hidden_BSH = hidden_states(base, batch, _read_places(batch, with_last=value_head is not None))
        hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).index_select(0, positions_N - 1)
        logprobs_N, entropy_N = selected_logprobs(
            hidden_NH,
            head.weight,
            head.bias,
            targets_N,
            temperatures_N=temperatures_N,
            with_entropy=with_entropy,
            chunk_tokens=chunk_tokens,
        )
    else:  # a head that scales, caps or adapts its logits: let the model compute them
        outputs = base(**model_inputs(base, batch), use_cache=False, output_hidden_states=value_head is not None)
        hidden_BSH = outputs.hidden_states[-1] if value_head is not None else outputs.logits
        logits_NV = outputs.logits.reshape(-1, outputs.logits.shape[-1]).index_select(0, positions_N - 1)
        logits_NV = logits_NV.to(_accurate(logits_NV.dtype))
        if temperatures_N is not None:
            logits_NV = logits_NV / temperatures_N[:, None]
        log_p_NV = functional.log_softmax(logits_NV, dim=-1)
        logprobs_N = log_p_NV.gather(1, targets_N[:, None]).squeeze(1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1) if with_entropy else None

    def scatter(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(ids_BS.numel()).index_copy(0, positions_N, values_N).view(ids_BS.shape)

    result = TokenOutputs(scatter(logprobs_N), scatter(entropy_N) if entropy_N is not None else None)
    if value_head is not None:
        flat = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
        result.values_BS = scatter(value_head(flat.index_select(0, positions_N - 1)))
        last_B = batch.attention_mask_BS.sum(1) - 1
        result.value_after_B = value_head(hidden_BSH[torch.arange(len(last_B), device=last_B.device), last_B])
    return result


def _temperatures(batch: TrainBatch, positions_N: torch.Tensor) -> torch.Tensor | None:
    """Temperatures [N] of the tokens that carry loss; None = 1."""
    temperatures_BS = batch.temperatures_BS
    if temperatures_BS is None:
        return None
    if temperatures_BS.shape != batch.input_ids_BS.shape:
        raise DataError(f"temperatures {tuple(temperatures_BS.shape)} must be {tuple(batch.input_ids_BS.shape)}")
    temperatures_N = temperatures_BS.reshape(-1)[positions_N]
    if not bool((temperatures_N > 0).all()):
        raise DataError("temperatures: a token that carries loss has one that is not above 0")
    return temperatures_N


def _read_places(batch: TrainBatch, *, with_last: bool) -> torch.Tensor:
    """[B, S] positions whose hidden states are read: those before loss tokens and, if asked for, each row's last."""
    places_BS = torch.cat([batch.loss_mask_BS[:, 1:], torch.zeros_like(batch.loss_mask_BS[:, :1])], dim=1)
    if with_last:
        last_B = batch.attention_mask_BS.sum(1) - 1
        places_BS[torch.arange(len(last_B), device=last_B.device), last_B] = True
    return places_BS


@torch.no_grad()
def next_token_logprobs(
    model: PreTrainedModel, batch: TrainBatch, *, chunk_tokens: int | None = None
) -> Iterator[torch.Tensor]:
    """Distributions over the vocabulary before every token that carries loss, at temperature 1, chunk by chunk.

    Args, Raises: as `token_outputs`, but the batch's temperatures are ignored. Two models of one vocabulary and device
    give chunks of equal positions.
    Returns: log p float32 [C, V] in nats, C <= chunk_tokens; without gradient.
    """
    mask_BS = batch.loss_mask_BS
    positions_N = mask_BS.reshape(-1).nonzero().squeeze(1) - 1
    base = unwrap(model)
    head = base.get_output_embeddings()
    plain = plain_head(base).allowed
    if plain:
        states_BS = hidden_states(base, batch, _read_places(batch, with_last=False))
    else:
        states_BS = base(**model_inputs(base, batch), use_cache=False).logits
    flat = states_BS.reshape(-1, states_BS.shape[-1])
    size = int(base.config.get_text_config().vocab_size)
    chunk = chunk_tokens or max(128, _CHUNK_ELEMENTS.get(flat.device.type, 2**24) // size)
    for part_C in positions_N.split(chunk):
        chosen = flat.index_select(0, part_C)
        yield (
            _log_softmax(chosen, head.weight, head.bias)
            if plain
            else torch.log_softmax(chosen, dim=-1, dtype=_accurate(chosen.dtype))
        )


def selected_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    *,
    temperatures_N: torch.Tensor | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax((hidden W^T + bias) / temperature) at the targets, and the entropy, chunk by chunk, with gradient.

    Args:
        hidden_NH, weight_VH, bias_V: the head's input and parameters; the product is taken in their dtype (or in that
            of autocast), everything after it in at least float32.
        targets_N: int64 [N].
        temperatures_N: float [N], above 0; None = 1.
    Returns: logprobs [N] in nats, entropy [N] in nats or None; float32, or float64 for float64 input.
    """
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        bias_V = bias_V.to(dtype) if bias_V is not None else None
    if chunk_tokens is None:
        chunk_tokens = max(128, _CHUNK_ELEMENTS.get(device, 2**24) // weight_VH.shape[0])
    logprobs_N, entropy_N = _SelectedLogprobs.apply(
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, with_entropy, chunk_tokens
    )
    return logprobs_N, entropy_N if with_entropy else None


class _SelectedLogprobs(torch.autograd.Function):
    """Chunked head + log-softmax.

    With p = softmax(z / T), z = h W^T + b, for upstream gradients g (log-prob) and e (entropy S = -sum p log p):
        dL/dz = (g (onehot(target) - p) - e p (log p + S)) / T
    When everything fits into one chunk, log p is kept for backward; else each chunk's is computed again there.
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden_NH.shape[0]
        logprobs_N = hidden_NH.new_empty(count, dtype=_accurate(hidden_NH.dtype))
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else logprobs_N.new_empty(0)
        kept: torch.Tensor | None = None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            log_p_CV = _log_softmax(hidden_NH[part], weight_VH, bias_V, _part(temperatures_N, part))
            logprobs_N[part] = log_p_CV.gather(1, targets_N[part, None]).squeeze(1)
            if with_entropy:
                entropy_N[part] = -_sum_of_products(log_p_CV.exp(), log_p_CV)
            if count <= chunk and any(ctx.needs_input_grad[:3]):
                kept = log_p_CV
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N, kept)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs the backward pass nothing
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        accurate = _accurate(hidden_NH.dtype)
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(targets_N, dtype=accurate)
        if temperatures_N is not None:  # here rather than at the [C, V] gradients, which are linear in these
            grad_logprobs_N = grad_logprobs_N / temperatures_N
            grad_entropy_N = grad_entropy_N / temperatures_N if grad_entropy_N is not None else None
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Summed over chunks in float32: partial sums in bfloat16 would lose the small ones.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=accurate) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=accurate) if needs_bias else None
        for start in range(0, hidden_NH.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p_CV = kept
            if log_p_CV is None:
                log_p_CV = _log_softmax(hidden_NH[part], weight_VH, bias_V, _part(temperatures_N, part))
            grad_CV = log_p_CV.exp()
            if grad_entropy_N is not None:
                # -p (g + e (log p + S)); log p is finite, so p = 0 gives 0
                factor_CV = (log_p_CV + entropy_N[part, None]).mul_(grad_entropy_N[part, None])
                grad_CV.mul_(factor_CV.add_(grad_logprobs_N[part, None]).neg_())
            else:
                grad_CV.mul_(grad_logprobs_N[part, None].neg())
            grad_CV.scatter_add_(1, targets_N[part, None], grad_logprobs_N[part, None])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[part] = input_grad(grad_CV, [weight_VH])
            if grad_weight_VH is not None:
                if accurate == weight_VH.dtype:
                    add_weight_grad(grad_weight_VH, grad_CV, hidden_NH[part])
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
        )


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


def _part(values_N: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return values_N[part] if values_N is not None else None


def _log_softmax(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperatures_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """log softmax of the logits [C, V] over the temperatures, at least float32."""
    logits_CV = linear(hidden_CH, [weight_VH])
    if bias_V is not None:
        logits_CV += bias_V
    accurate = _accurate(logits_CV.dtype)
    if temperatures_C is not None:  # in float32 as the sampler does it, in place: no third buffer
        logits_CV = logits_CV.to(accurate).div_(temperatures_C[:, None])
    return torch.log_softmax(logits_CV, dim=-1, dtype=accurate)


def _sum_of_products(left_CV: torch.Tensor, right_CV: torch.Tensor) -> torch.Tensor:
    """Row-wise dot products [C], in place of a third [C, V] buffer."""
    return left_CV.mul_(right_CV).sum(-1)
