"""Log-probabilities of the tokens that carry loss, computed without a [B, S, V] tensor.

B rows, S sequence, N tokens that carry loss, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from rl_core.capabilities import (
    check_chunked_head,
    check_router_logits,
    check_sequence_packing,
    check_training_forward,
)
from rl_core.errors import DataError, SettingsError
from rl_core.losses.supervised import load_balancing_loss, token_entropy
from rl_core.models.chunked_head import (
    compute_chunk_tokens,
    compute_log_softmax_chunk,
    compute_selected_logprobs,
    promote_to_float32,
)
from rl_core.models.hidden_states import build_model_inputs, compute_hidden_states
from rl_core.models.lora import unwrap_model
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class TokenOutputs:
    """Outputs of a model at the tokens that carry loss. All [B, S], 0 where the mask is False, with gradient."""

    logprobs_BS: torch.Tensor  # nats
    # nats, of the distribution over the vocabulary before the token
    entropy_BS: torch.Tensor | None = None
    values_BS: torch.Tensor | None = None  # value of the state before the token
    value_after_B: torch.Tensor | None = None  # value of the state after each row's last real token
    # of a mixture of experts: how evenly its routers load them over the batch's real tokens, scalar
    load_balancing_loss: torch.Tensor | None = None


def completion_logprobs(
    model: PreTrainedModel,
    batch: TrainBatch,
    *,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(token s | tokens before s) of every token that carries loss, with gradient; and their entropy.

    p is at the batch's temperatures. Args, Raises: as `compute_token_outputs`.
    Returns: logprobs float32 [B, S] in nats; entropy float32 [B, S] in nats or None; both 0 where the mask is False.
        (float64 for a float64 model.)
    """
    outputs = compute_token_outputs(
        model, batch, with_entropy=with_entropy, chunk_tokens=chunk_tokens
    )
    return outputs.logprobs_BS, outputs.entropy_BS


def compute_token_outputs(
    model: PreTrainedModel,
    batch: TrainBatch,
    *,
    with_entropy: bool = False,
    value_head: nn.Module | None = None,
    with_load_balancing: bool = False,
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
        with_load_balancing: also give `losses.router.load_balancing_loss`; needs `capabilities.check_router_logits`.
        chunk_tokens: positions whose logits are held at once; None = by vocabulary and device.
    Raises: DataError when shapes differ, position 0 carries loss, or a temperature is not above 0.
    """
    _check_loss_mask(batch)
    ids_BS = batch.input_ids_BS
    positions_N = batch.loss_mask_BS.reshape(-1).nonzero().squeeze(1)
    targets_N, temperatures_N = (
        ids_BS.reshape(-1)[positions_N],
        _select_temperatures(batch, positions_N),
    )
    base = unwrap_model(model)
    if check_chunked_head(base).allowed:
        hidden_BSH, routed = _compute_trunk_states(
            base, batch, with_last=value_head is not None, with_router=with_load_balancing
        )
        hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).index_select(0, positions_N - 1)
        head = base.get_output_embeddings()
        options: dict[str, Any] = {"with_entropy": with_entropy, "chunk_tokens": chunk_tokens}
        logprobs_N, entropy_N = compute_selected_logprobs(
            hidden_NH, head.weight, head.bias, targets_N, temperatures_N=temperatures_N, **options
        )
    else:  # a head that scales, caps or adapts its logits: let the model compute them
        more = {"output_router_logits": True} if with_load_balancing else {}
        outputs = base(
            **build_model_inputs(base, batch),
            use_cache=False,
            output_hidden_states=value_head is not None,
            **more,
        )
        routed = getattr(outputs, "router_logits", None)
        hidden_BSH = outputs.hidden_states[-1] if value_head is not None else outputs.logits
        logits_NV = outputs.logits.reshape(-1, outputs.logits.shape[-1]).index_select(
            0, positions_N - 1
        )
        logprobs_N, entropy_N = _compute_logprobs_from_logits(
            logits_NV, targets_N, temperatures_N, with_entropy=with_entropy
        )

    def scatter(values_N: torch.Tensor) -> torch.Tensor:
        return (
            values_N.new_zeros(ids_BS.numel())
            .index_copy(0, positions_N, values_N)
            .view(ids_BS.shape)
        )

    result = TokenOutputs(
        scatter(logprobs_N), scatter(entropy_N) if entropy_N is not None else None
    )
    if with_load_balancing:
        layers = [logits.reshape(-1, logits.shape[-1]) for logits in routed]
        result.load_balancing_loss = load_balancing_loss(
            layers, batch.attention_mask_BS.reshape(-1), top_k=int(base.config.num_experts_per_tok)
        )
    if value_head is not None:
        flat = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
        result.values_BS = scatter(value_head(flat.index_select(0, positions_N - 1)))
        last_B = batch.attention_mask_BS.sum(1) - 1
        result.value_after_B = value_head(
            hidden_BSH[torch.arange(len(last_B), device=last_B.device), last_B]
        )
    return result


def _compute_trunk_states(
    base: PreTrainedModel, batch: TrainBatch, *, with_last: bool, with_router: bool
) -> tuple[torch.Tensor, Any]:
    """Hidden states [B, S, H] before the head, and the layers' router logits; None = not asked for."""
    if not with_router:
        return compute_hidden_states(
            base, batch, _mark_read_positions(batch, with_last=with_last)
        ), None
    trunk: Any = base.base_model  # experts have no fast path
    output = trunk(**build_model_inputs(base, batch), use_cache=False, output_router_logits=True)
    return output.last_hidden_state, output.router_logits


def check_contexts(model: PreTrainedModel) -> None:
    """Raise SettingsError where a row of several contexts would be read as one sequence."""
    base = unwrap_model(model)
    if (
        not check_training_forward(base.base_model).allowed
        and not (decision := check_sequence_packing(base)).allowed
    ):
        raise SettingsError(
            "model.history_thoughts: template gives episodes of several contexts, which this model cannot be trained "
            f"on: {decision.reason}; set it to keep, or choose another attention"
        )


def check_router(model: PreTrainedModel, coef: float) -> None:
    """Raise SettingsError where a load-balancing loss is asked for (`coef` above 0) and the model gives none."""
    if coef > 0 and not (decision := check_router_logits(model)).allowed:
        raise SettingsError(
            f"router_aux_loss_coef: {coef} balances the experts of a mixture; {decision.reason}. Leave it at 0"
        )


def _check_loss_mask(batch: TrainBatch) -> None:
    """Raises: DataError when shapes differ, or a token carries loss that has no token before it."""
    ids_BS, mask_BS = batch.input_ids_BS, batch.loss_mask_BS
    if ids_BS.ndim != 2 or mask_BS.shape != ids_BS.shape:
        raise DataError(
            f"input_ids {tuple(ids_BS.shape)} and loss_mask {tuple(mask_BS.shape)} must be equal [B, S]"
        )
    if bool(mask_BS[:, 0].any()):
        raise DataError("loss_mask is True at position 0, which has no token before it")
    if batch.position_ids_BS is not None and bool((mask_BS & (batch.position_ids_BS == 0)).any()):
        raise DataError(
            "loss_mask is True at the first token of a packed sequence, which has no token before it"
        )


def _compute_logprobs_from_logits(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor | None,
    *,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `compute_selected_logprobs`, from logits."""
    logits_NV = logits_NV.to(promote_to_float32(logits_NV.dtype))
    if temperatures_N is not None:
        logits_NV = logits_NV / temperatures_N[:, None]
    log_p_NV = functional.log_softmax(logits_NV, dim=-1)
    logprobs_N = log_p_NV.gather(1, targets_N[:, None]).squeeze(1)
    return logprobs_N, token_entropy(log_p_NV) if with_entropy else None


def _select_temperatures(batch: TrainBatch, positions_N: torch.Tensor) -> torch.Tensor | None:
    """Temperatures [N] of the tokens that carry loss; None = 1."""
    temperatures_BS = batch.temperatures_BS
    if temperatures_BS is None:
        return None
    if temperatures_BS.shape != batch.input_ids_BS.shape:
        raise DataError(
            f"temperatures {tuple(temperatures_BS.shape)} must be {tuple(batch.input_ids_BS.shape)}"
        )
    temperatures_N = temperatures_BS.reshape(-1)[positions_N]
    if not bool((temperatures_N > 0).all()):
        raise DataError("temperatures: a token that carries loss has one that is not above 0")
    return temperatures_N


def _mark_read_positions(batch: TrainBatch, *, with_last: bool) -> torch.Tensor:
    """[B, S] positions whose hidden states are read: those before loss tokens and, if asked for, each row's last."""
    places_BS = torch.cat(
        [batch.loss_mask_BS[:, 1:], torch.zeros_like(batch.loss_mask_BS[:, :1])], dim=1
    )
    if with_last:
        last_B = batch.attention_mask_BS.sum(1) - 1
        places_BS[torch.arange(len(last_B), device=last_B.device), last_B] = True
    return places_BS


def compute_vocabulary_logprobs(model: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    """log p over the whole vocabulary before every token that carries loss, at the batch's temperatures, with gradient.

    Holds [N, V], so that a divergence can be taken exactly: for micro-batches of few tokens.
    Args, Raises: as `compute_token_outputs`.
    Returns: float [N, V] in nats, at least float32; rows in the order of `loss_mask_BS.reshape(-1).nonzero()`.
    """
    _check_loss_mask(batch)
    positions_N = batch.loss_mask_BS.reshape(-1).nonzero().squeeze(1)
    temperatures_N = _select_temperatures(batch, positions_N)
    base = unwrap_model(model)
    if check_chunked_head(base).allowed:
        head = base.get_output_embeddings()
        hidden_BSH = compute_hidden_states(
            base, batch, _mark_read_positions(batch, with_last=False)
        )
        hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).index_select(0, positions_N - 1)
        logits_NV = functional.linear(hidden_NH, head.weight, head.bias)
    else:
        logits_BSV = base(**build_model_inputs(base, batch), use_cache=False).logits
        logits_NV = logits_BSV.reshape(-1, logits_BSV.shape[-1]).index_select(0, positions_N - 1)
    logits_NV = logits_NV.to(promote_to_float32(logits_NV.dtype))
    if temperatures_N is not None:
        logits_NV = logits_NV / temperatures_N[:, None]
    return functional.log_softmax(logits_NV, dim=-1)


@torch.no_grad()
def iter_next_token_logprobs(
    model: PreTrainedModel, batch: TrainBatch, *, chunk_tokens: int | None = None
) -> Iterator[torch.Tensor]:
    """Distributions over the vocabulary before every token that carries loss, at temperature 1, chunk by chunk.

    Args, Raises: as `compute_token_outputs`, but the batch's temperatures are ignored. Two models of one vocabulary and device
    give chunks of equal positions.
    Returns: log p float32 [C, V] in nats, C <= chunk_tokens; without gradient.
    """
    mask_BS = batch.loss_mask_BS
    positions_N = mask_BS.reshape(-1).nonzero().squeeze(1) - 1
    base = unwrap_model(model)
    head = base.get_output_embeddings()
    plain = check_chunked_head(base).allowed
    if plain:
        states_BS = compute_hidden_states(base, batch, _mark_read_positions(batch, with_last=False))
    else:
        states_BS = base(**build_model_inputs(base, batch), use_cache=False).logits
    flat = states_BS.reshape(-1, states_BS.shape[-1])
    size = int(base.config.get_text_config().vocab_size)
    chunk = chunk_tokens or compute_chunk_tokens(flat.device.type, size)
    for part_C in positions_N.split(chunk):
        chosen = flat.index_select(0, part_C)
        yield (
            compute_log_softmax_chunk(chosen, head.weight, head.bias)
            if plain
            else torch.log_softmax(chosen, dim=-1, dtype=promote_to_float32(chosen.dtype))
        )
