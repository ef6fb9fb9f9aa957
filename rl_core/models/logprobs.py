"""Log-probabilities of the tokens that carry loss, computed without a [B, S, V] tensor.

B rows, S tokens of a sequence, N tokens that carry loss, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from rl_core.cpu.linear_layers import apply_linears
from rl_core.cpu.packed_forward import PrefixStates
from rl_core.errors import DataError, SettingsError
from rl_core.losses.supervised import load_balancing_loss, token_entropy
from rl_core.models.chunked_head import (
    compute_chunk_tokens,
    compute_log_softmax_chunk,
    compute_selected_logprobs,
    promote_to_float32,
    rounds_head_operands,
)
from rl_core.models.hidden_states import build_model_inputs, compute_prefix_states
from rl_core.models.lora import unwrap_model
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class TokenOutputs:
    """Outputs of a model at the tokens that carry loss, with gradient; [B, S] tensors are 0 where the mask is False."""

    logprobs_BS: torch.Tensor  # nats
    # nats, of the distribution that predicts the token
    entropy_BS: torch.Tensor | None = None
    values_BS: torch.Tensor | None = None  # value of the state before the token
    value_after_B: torch.Tensor | None = None  # value of the state after each row's last real token
    # mixture of experts: how evenly its routers load the experts over the batch's real tokens, scalar
    load_balancing_loss: torch.Tensor | None = None


def completion_logprobs(
    model: PreTrainedModel,
    batch: TrainBatch,
    *,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log p(token s | tokens before s) of every token that carries loss, and the entropy, with gradient.

    p is taken at the batch's temperatures. Args, Raises: as `compute_token_outputs`.
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
    """Compute log-probabilities, entropies and values of every token that carries loss, in one pass through the
    trunk.

    Head and log-softmax run in chunks over the positions whose next token carries loss, so at most two float32
    buffers of [chunk_tokens, V] exist at any time, also in backward. Rows are padded on the right, so the causal mask
    alone keeps padding out of real tokens; without an attention mask the kernels take their fast causal path. Rows
    that hold several sequences are marked by `position_ids_BS`; the model must support it
    (`capabilities.check_sequence_packing`).

    If tokens were drawn from softmax(logits / temperature), `temperatures_BS` holds the temperatures, and
    log-probabilities and entropies are of that distribution: a policy gradient at another temperature belongs to
    another policy.

    Args:
        model: a causal LM, with or without adapters.
        batch: right-padded; loss_mask_BS True = token carries loss, never at position 0 nor at the first token of a
            packed sequence; temperatures_BS above 0 at these tokens, None = 1.
        with_entropy: compute entropies.
        value_head: maps hidden states [N, H] to values [N]; None = no values.
        with_load_balancing: compute `losses.supervised.load_balancing_loss`; needs
            `capabilities.check_router_logits`.
        chunk_tokens: positions whose logits exist at the same time; None = by vocabulary and device.
    Raises: DataError if shapes differ, position 0 carries loss, or a temperature is not above 0.
    """
    _check_batch(batch)
    ids_BS = batch.input_ids_BS
    positions_N = batch.find_loss_positions()
    targets_N = ids_BS.reshape(-1)[positions_N]
    temperatures_N = _select_temperatures(batch, positions_N)
    base = unwrap_model(model)
    if check_chunked_head(base).allowed:
        states, routed = _compute_trunk_states(
            base, batch, with_last=value_head is not None, with_router=with_load_balancing
        )
        logprobs_N, entropy_N = _compute_head_logprobs(
            base.get_output_embeddings(),
            states,
            positions_N - 1,
            targets_N,
            temperatures_N,
            with_entropy=with_entropy,
            chunk_tokens=chunk_tokens,
        )
    else:  # the head scales, caps or adapts its logits, so the model computes them
        inputs: dict[str, Any] = build_model_inputs(base, batch)
        if with_load_balancing:
            inputs["output_router_logits"] = True
        outputs = base(**inputs, use_cache=False, output_hidden_states=value_head is not None)
        routed = getattr(outputs, "router_logits", None)
        hidden_BSH = outputs.hidden_states[-1] if value_head is not None else outputs.logits
        states = PrefixStates.from_padded(hidden_BSH.reshape(*ids_BS.shape, -1))
        logits_NV = _select_rows(outputs.logits, positions_N - 1)
        logprobs_N, entropy_N = _compute_logprobs_from_logits(
            logits_NV, targets_N, temperatures_N, with_entropy=with_entropy
        )

    def scatter(values_N: torch.Tensor) -> torch.Tensor:
        flat = values_N.new_zeros(ids_BS.numel()).index_copy(0, positions_N, values_N)
        return flat.view(ids_BS.shape)

    entropy_BS = scatter(entropy_N) if entropy_N is not None else None
    result = TokenOutputs(scatter(logprobs_N), entropy_BS)
    if with_load_balancing:
        layers = [logits.reshape(-1, logits.shape[-1]) for logits in routed]
        result.load_balancing_loss = load_balancing_loss(
            layers, batch.attention_mask_BS.reshape(-1), top_k=int(base.config.num_experts_per_tok)
        )
    if value_head is not None:
        result.values_BS = scatter(value_head(states.select(positions_N - 1)))
        result.value_after_B = value_head(states.select(_find_last_positions(batch)))
    return result


def _select_rows(values_BSD: torch.Tensor, indices_N: torch.Tensor) -> torch.Tensor:
    """Return [N, D] at flat positions of [B, S, D]."""
    return values_BSD.reshape(-1, values_BSD.shape[-1]).index_select(0, indices_N)


def _find_last_positions(batch: TrainBatch) -> torch.Tensor:
    """Return the flat position [B] of each row's last real token."""
    last_B = batch.attention_mask_BS.sum(1) - 1
    width = batch.input_ids_BS.shape[1]
    return torch.arange(len(last_B), device=last_B.device) * width + last_B


def _compute_trunk_states(
    base: PreTrainedModel, batch: TrainBatch, *, with_last: bool, with_router: bool
) -> tuple[PrefixStates, Any]:
    """Compute hidden states before the head, and the layers' router logits if requested, otherwise None."""
    if not with_router:
        needed_BS = _mark_read_positions(batch, with_last=with_last)
        return compute_prefix_states(base, batch, needed_BS), None
    trunk: Any = base.base_model  # models with experts have no packed forward pass
    output = trunk(**build_model_inputs(base, batch), use_cache=False, output_router_logits=True)
    hidden_BSH = output.last_hidden_state.reshape(*batch.input_ids_BS.shape, -1)
    return PrefixStates.from_padded(hidden_BSH), output.router_logits


def _compute_head_logprobs(
    head: Any,
    states: PrefixStates,
    positions_N: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor | None,
    *,
    with_entropy: bool,
    chunk_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute as `compute_selected_logprobs` from the states at flat positions, each distinct state once.

    A state that several rows share has the next token of each of them as targets; rows of another temperature need
    other distributions.
    """
    options: dict[str, Any] = {"with_entropy": with_entropy, "chunk_tokens": chunk_tokens}
    keys_N = states.numbers_BS.reshape(-1)[positions_N]
    if states.is_shared and temperatures_N is not None:
        kinds, kind_N = torch.unique(temperatures_N, return_inverse=True)
        keys_N = keys_N * len(kinds) + kind_N
    counts_n = None
    if states.is_shared:
        _, inverse_N, counts_n = torch.unique(keys_N, return_inverse=True, return_counts=True)
    if counts_n is None or len(counts_n) == len(keys_N):
        return compute_selected_logprobs(
            states.select(positions_N),
            head.weight,
            head.bias,
            targets_N,
            temperatures_N=temperatures_N,
            **options,
        )
    # the tokens of each distinct state side by side: [n, K], K the most that follow one state
    width = int(counts_n.max())
    order_N = inverse_N.argsort(stable=True)
    ranks_N = torch.arange(len(keys_N)) - (counts_n.cumsum(0) - counts_n)[inverse_N[order_N]]
    slots_N = torch.empty_like(order_N)
    slots_N[order_N] = inverse_N[order_N] * width + ranks_N
    targets_nK = targets_N.new_zeros(len(counts_n) * width)
    targets_nK[slots_N] = targets_N
    first_n = order_N[counts_n.cumsum(0) - counts_n]
    logprobs_nK, entropy_n = compute_selected_logprobs(
        states.select(positions_N[first_n]),
        head.weight,
        head.bias,
        targets_nK.view(-1, width),
        temperatures_N=None if temperatures_N is None else temperatures_N[first_n],
        **options,
    )
    entropy_N = None if entropy_n is None else entropy_n.index_select(0, inverse_N)
    return logprobs_nK.reshape(-1).index_select(0, slots_N), entropy_N


def check_contexts(model: PreTrainedModel) -> None:
    """Raise SettingsError if the model would read a row of several contexts as one sequence."""
    base = unwrap_model(model)
    if (
        not check_training_forward(base.base_model).allowed
        and not (decision := check_sequence_packing(base)).allowed
    ):
        raise SettingsError(
            "model.history_thoughts: template, or an agent with several conversations, gives episodes of several "
            f"contexts, which this model cannot be trained on: {decision.reason}; choose another attention"
        )


def check_router(model: PreTrainedModel, coef: float) -> None:
    """Raise SettingsError if `coef` is above 0 and the model has no router logits for a load-balancing loss."""
    if coef > 0 and not (decision := check_router_logits(model)).allowed:
        raise SettingsError(
            f"router_aux_loss_coef: {coef} balances the experts of a mixture; {decision.reason}. Leave it at 0"
        )


def _check_batch(batch: TrainBatch) -> None:
    """Raise DataError if shapes differ, a token without a predecessor carries loss, or a temperature is not above 0."""
    if batch.loss_positions_N is not None:  # checked before it was moved to its device
        return
    if (problem := batch.find_problem()) is not None:
        raise DataError(problem)


def _compute_logprobs_from_logits(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor | None,
    *,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute as `compute_selected_logprobs`, from logits."""
    logits_NV = logits_NV.to(promote_to_float32(logits_NV.dtype))
    if temperatures_N is not None:
        logits_NV = logits_NV / temperatures_N[:, None]
    log_p_NV = functional.log_softmax(logits_NV, dim=-1)
    logprobs_N = log_p_NV.gather(1, targets_N[:, None]).squeeze(1)
    return logprobs_N, token_entropy(log_p_NV) if with_entropy else None


def _select_temperatures(batch: TrainBatch, positions_N: torch.Tensor) -> torch.Tensor | None:
    """Return the temperatures [N] of the tokens that carry loss; None = 1."""
    temperatures_BS = batch.temperatures_BS
    return None if temperatures_BS is None else temperatures_BS.reshape(-1)[positions_N]


def _mark_read_positions(batch: TrainBatch, *, with_last: bool) -> torch.Tensor:
    """Mark the positions [B, S] whose hidden states are read: those before loss tokens and, if requested, each row's
    last.
    """
    needed_BS = torch.cat(
        [batch.loss_mask_BS[:, 1:], torch.zeros_like(batch.loss_mask_BS[:, :1])], dim=1
    )
    if with_last:
        last_B = batch.attention_mask_BS.sum(1) - 1
        rows_B = torch.arange(len(last_B), device=last_B.device)
        needed_BS.index_put_((rows_B, last_B), torch.ones_like(last_B, dtype=torch.bool))
    return needed_BS


def compute_vocabulary_logprobs(model: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    """Compute log p over the vocabulary before every loss token, at the batch's temperatures, with gradient.

    Holds [N, V], so that a divergence can be computed exactly: for micro-batches with few tokens.
    Args, Raises: as `compute_token_outputs`.
    Returns: float [N, V] in nats, at least float32; rows in the order of `loss_mask_BS.reshape(-1).nonzero()`.
    """
    return read_vocabulary_logprobs(model, batch)(None)


def read_vocabulary_logprobs(
    model: PreTrainedModel, batch: TrainBatch
) -> Callable[[torch.Tensor | None], torch.Tensor]:
    """Run the trunk over a batch; return a function that computes `compute_vocabulary_logprobs` of chosen loss tokens.

    Of a model whose head is a plain product, only the hidden states [N, H] are held between calls.
    Returns: function from indices [C] into the loss tokens, None for all, to log p [C, V].
    """
    _check_batch(batch)
    positions_N = batch.find_loss_positions()
    temperatures_N = _select_temperatures(batch, positions_N)
    base = unwrap_model(model)
    head = base.get_output_embeddings()
    is_plain_head = check_chunked_head(base).allowed
    weight = head.weight if is_plain_head else None  # the gathered one of a sharded model
    if is_plain_head:
        states = compute_prefix_states(base, batch, _mark_read_positions(batch, with_last=False))
        states_NX = states.select(positions_N - 1)
    else:
        logits_BSV = base(**build_model_inputs(base, batch), use_cache=False).logits
        states_NX = _select_rows(logits_BSV, positions_N - 1)

    def compute_logprobs(indices_C: torch.Tensor | None) -> torch.Tensor:
        logits_CV, temperatures_C = states_NX, temperatures_N
        if indices_C is not None:
            logits_CV = logits_CV.index_select(0, indices_C)
            temperatures_C = None if temperatures_N is None else temperatures_N[indices_C]
        if weight is not None and rounds_head_operands(logits_CV, weight):
            logits_CV = apply_linears(logits_CV, [head])
        elif weight is not None:
            logits_CV = functional.linear(logits_CV, weight, head.bias)
        logits_CV = logits_CV.to(promote_to_float32(logits_CV.dtype))
        if temperatures_C is not None:
            logits_CV = logits_CV / temperatures_C[:, None]
        return functional.log_softmax(logits_CV, dim=-1)

    return compute_logprobs


@torch.no_grad()
def iter_next_token_logprobs(
    model: PreTrainedModel, batch: TrainBatch, *, chunk_tokens: int | None = None
) -> Iterator[torch.Tensor]:
    """Yield the distributions over the vocabulary before every loss token, at temperature 1, chunk by chunk.

    Args, Raises: as `compute_token_outputs`, but the batch's temperatures are ignored. Two models with the same
    vocabulary and device yield chunks of the same positions.
    Returns: log p float32 [C, V] in nats, C <= chunk_tokens; without gradient.
    """
    positions_N = batch.find_loss_positions() - 1
    base = unwrap_model(model)
    head = base.get_output_embeddings()
    is_plain_head = check_chunked_head(base).allowed
    if is_plain_head:
        needed_BS = _mark_read_positions(batch, with_last=False)
        states = compute_prefix_states(base, batch, needed_BS)
    else:
        logits_BSV = base(**build_model_inputs(base, batch), use_cache=False).logits
        states = PrefixStates.from_padded(logits_BSV.reshape(*batch.loss_mask_BS.shape, -1))
    size = int(base.config.get_text_config().vocab_size)
    chunk = chunk_tokens or compute_chunk_tokens(batch.loss_mask_BS.device.type, size)
    for indices_C in positions_N.split(chunk):
        states_CX = states.select(indices_C)
        if is_plain_head:
            yield compute_log_softmax_chunk(states_CX, head.weight, head.bias)
        else:
            yield torch.log_softmax(states_CX, dim=-1, dtype=promote_to_float32(states_CX.dtype))
