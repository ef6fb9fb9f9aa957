"""Protocols of rollout backends and of the sequences that they play; seeds and token sampling.

B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rl_core.environments.step_pool import ReplacementContext, TurnOutcome
from rl_core.errors import DataError, NonFiniteTensor
from rl_core.settings import SamplingSettings

_BLOCK_SIZE = 1024  # of the vocabulary, for draws on a GPU
_PARTIAL_SORT_SIZE = 1024  # a CPU sorts this many top tokens before it sorts the whole vocabulary


class RolloutSequence(Protocol):
    """A backend's view of one episode: a prompt, then turns of sampled actions and appended observations."""

    prompt_ids: list[int]  # at least one token; sequences with equal prompts share one prefill
    seed: int  # 0 <= seed < 2**128; the sequence's samples depend on it and on the weights alone

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Take one action and return what follows.

        Args:
            action_ids: sampled tokens of this turn, including the end-of-turn token if there is one.
            logprobs: log-probabilities of the tokens in nats, as returned by `draw_tokens`.
            hit_limit: True = cut off by max_completion_tokens or the context; the result must be None then.
        Returns: observation tokens to append (at least one); a `ReplacementContext`, whose tokens replace all earlier
            ones and whose limit replaces the sequence's; a `PendingTurn`, which returns either once the environment
            has answered, while the sequence waits; or None when the episode is over.
        """

    def should_stop(self, action_ids: list[int]) -> bool:
        """Return whether the newest token completes a stop text. Called after every token if there are stop texts."""


class RolloutBackend(Protocol):
    """A sampler that plays sequences to their end from the current weights of one model."""

    max_length: int  # prompt and completion together

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """Play every sequence to its end through its `take_action`."""

    def refresh_weights(self) -> None:
        """Take note that the model's weights have changed since the last run."""

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """Set the tokens that end an action."""


def compute_sequence_seed(*parts: object) -> int:
    """Compute a 128-bit seed from anything printable; equal parts give equal seeds on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def draw_uniforms(seed: int, count: int, first: int = 0) -> np.ndarray:
    """Draw float64 [count] in [0, 1), starting at index `first`; number t decides the sequence's t-th sampled token.

    Philox is counter-based (Salmon et al. 2011) and keyed by the sequence's seed: draws are independent of other
    sequences and their order, and earlier numbers need not be computed.
    """
    numbers = np.random.Philox(key=seed)
    numbers.advance(first // 4)  # one counter step yields four numbers
    return np.random.Generator(numbers).random(first % 4 + count)[first % 4 :]


def draw_tokens(
    logits_BV: torch.Tensor,
    uniforms_B: torch.Tensor,
    temperature: float,
    restriction: SamplingSettings | None = None,
    textless_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits_BV: [B, V], any float type; penalties applied.
        uniforms_B: float64 [B] in [0, 1).
        temperature: 0 = the most likely token, regardless of the restriction.
        restriction: draw from the tokens that its min_p, top_k and top_p keep; None = from all.
        textless_ids: int64, tokens that are never drawn; they count in the log-probabilities without a restriction, as
            in the trainer's.
    Returns: tokens int64 [B]; log-probabilities float32 [B] in nats under the sampling distribution, softmax(logits /
        temperature) renormalised over the kept tokens. Greedy tokens (temperature 0) get their log-probabilities from
        softmax(logits).
    """
    excluded = textless_ids if textless_ids is not None and len(textless_ids) else None
    if excluded is not None and restriction is not None and temperature != 0:
        logits_BV = logits_BV.index_fill(1, excluded, -torch.inf)
    log_p_BV = compute_log_probabilities(logits_BV, temperature, restriction)
    drawable_BV = log_p_BV
    if excluded is not None:
        drawable_BV = log_p_BV.index_fill(1, excluded, -torch.inf)
    if temperature == 0:
        logprobs_B, tokens_B = drawable_BV.max(dim=-1)
        return tokens_B, logprobs_B
    tokens_B1 = _invert_cumulative(drawable_BV, uniforms_B)
    return tokens_B1.squeeze(1), log_p_BV.gather(1, tokens_B1).squeeze(1)


@dataclass(slots=True)
class RowDrawing:
    """Sampling settings of each row as tensors [B]: one computation for every mixture of settings."""

    temperature_B: (
        torch.Tensor
    )  # float32; 0 = the most likely token, regardless of the other settings
    top_k_B: torch.Tensor  # int64; 0 = all tokens
    top_p_B: torch.Tensor  # float64
    log_min_p_B: torch.Tensor  # float32; -inf = all tokens
    is_restricted: bool  # False = no row has a top_k, top_p or min_p

    @property
    def greedy_rows(self) -> torch.Tensor:
        """Rows that take the most likely token."""
        return (self.temperature_B == 0)[:, None]

    @property
    def restricted_rows(self) -> torch.Tensor:
        """Rows that draw from part of the vocabulary."""
        has_limit_B = (self.top_k_B > 0) | (self.top_p_B < 1) | (self.log_min_p_B > -torch.inf)
        return has_limit_B[:, None] & ~self.greedy_rows


def draw_row_tokens(
    logits_BV: torch.Tensor,
    uniforms_B: torch.Tensor,
    drawing: RowDrawing,
    textless_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as `draw_tokens`, each row by its settings, without a read of the device.

    Temperatures divide as tensors, as in the trainer.
    """
    excluded = textless_ids if textless_ids is not None and len(textless_ids) else None
    if excluded is not None and drawing.is_restricted:
        filled_BV = logits_BV.index_fill(1, excluded, -torch.inf)
        logits_BV = torch.where(drawing.restricted_rows, filled_BV, logits_BV)
    log_p_BV = compute_row_log_probabilities(logits_BV, drawing)
    drawable_BV = log_p_BV
    if excluded is not None:
        drawable_BV = log_p_BV.index_fill(1, excluded, -torch.inf)
    likeliest_B1 = drawable_BV.max(dim=-1, keepdim=True).indices
    drawn_B1 = _invert_cumulative(drawable_BV, uniforms_B)
    tokens_B1 = torch.where(drawing.greedy_rows, likeliest_B1, drawn_B1)
    return tokens_B1.squeeze(1), log_p_BV.gather(1, tokens_B1).squeeze(1)


def compute_row_log_probabilities(logits_BV: torch.Tensor, drawing: RowDrawing) -> torch.Tensor:
    """Compute as `compute_log_probabilities`, each row by its settings."""
    scale_B1 = torch.where(drawing.greedy_rows, 1.0, drawing.temperature_B[:, None])
    log_p_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    if not drawing.is_restricted:
        return log_p_BV
    filtered_BV = torch.log_softmax(_filter_rows(log_p_BV, drawing), dim=-1)
    return torch.where(drawing.restricted_rows, filtered_BV, log_p_BV)


def _filter_rows(log_p_BV: torch.Tensor, drawing: RowDrawing) -> torch.Tensor:
    """Filter as `filter_log_probabilities`, each row by its settings, with one sort."""
    least_B1 = log_p_BV.amax(-1, keepdim=True) + drawing.log_min_p_B[:, None]
    log_p_BV = log_p_BV.masked_fill(log_p_BV < least_B1, -torch.inf)
    sorted_BV = log_p_BV.sort(dim=-1, descending=True).values
    vocab_size = log_p_BV.shape[-1]
    top_k_B = torch.where(drawing.top_k_B > 0, drawing.top_k_B, vocab_size)
    least_B1 = sorted_BV.gather(1, top_k_B.clamp(max=vocab_size)[:, None] - 1)
    log_p_BV = log_p_BV.masked_fill(log_p_BV < least_B1, -torch.inf)
    sorted_BV = sorted_BV.masked_fill(sorted_BV < least_B1, -torch.inf)
    totals_B1 = log_p_BV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    top_p_B1 = drawing.top_p_B[:, None]
    least_B1, _ = _find_least(sorted_BV, totals_B1, top_p_B1)
    least_B1 = torch.where(top_p_B1 < 1, least_B1, -torch.inf)
    return log_p_BV.masked_fill(log_p_BV < least_B1, -torch.inf)


def _invert_cumulative(log_p_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Return the first token [B, 1] whose cumulative probability exceeds u times the total."""
    if log_p_BV.device.type == "cpu":
        return _find_first_above(log_p_BV.exp().cumsum(dim=-1, dtype=torch.float64), uniforms_B)
    return _invert_cumulative_by_blocks(log_p_BV, uniforms_B)


def _invert_cumulative_by_blocks(log_p_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Find the block of the vocabulary first, then the token in it.

    A cumulative sum in float64 over the vocabulary would write twice the bytes of the logits. Sums of blocks are in
    float64 too, so a token's interval differs by rounding only.
    """
    rows, vocab_size = log_p_BV.shape
    padding = -vocab_size % _BLOCK_SIZE
    p_BNK = functional.pad(log_p_BV.exp(), (0, padding)).view(rows, -1, _BLOCK_SIZE)
    cumulative_BN = p_BNK.sum(-1, dtype=torch.float64).cumsum(-1)
    block_B1 = _find_first_above(cumulative_BN, uniforms_B)
    before_BN = functional.pad(cumulative_BN, (1, 0))[:, :-1]
    level_B1 = uniforms_B[:, None] * cumulative_BN[:, -1:] - before_BN.gather(1, block_B1)
    p_BK = p_BNK.gather(1, block_B1[:, :, None].expand(-1, 1, _BLOCK_SIZE)).squeeze(1)
    cumulative_BK = p_BK.cumsum(-1, dtype=torch.float64)
    totals_B1 = cumulative_BK[:, -1:]
    level_B1 = torch.minimum(
        level_B1.clamp(min=0.0), torch.nextafter(totals_B1, torch.zeros_like(totals_B1))
    )
    index_B1 = torch.searchsorted(cumulative_BK, level_B1, right=True)
    return (block_B1 * _BLOCK_SIZE + index_B1).clamp_(max=vocab_size - 1)


def _find_first_above(cumulative_BK: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Return the first index [B, 1] whose cumulative probability exceeds u * total: never one of probability 0."""
    totals_B = cumulative_BK[:, -1]
    levels_B1 = torch.minimum(
        uniforms_B * totals_B, torch.nextafter(totals_B, torch.zeros_like(totals_B))
    )[:, None]
    indices_B1 = torch.searchsorted(cumulative_BK, levels_B1, right=True)
    return indices_B1.clamp_(max=cumulative_BK.shape[-1] - 1)


def compute_log_probabilities(
    logits_BV: torch.Tensor, temperature: float, restriction: SamplingSettings | None = None
) -> torch.Tensor:
    """Compute the log-probabilities, float32 [B, V], that `draw_tokens` samples from; softmax(logits) at temperature
    0.
    """
    if temperature in (0, 1):
        log_p_BV = torch.log_softmax(logits_BV, dim=-1, dtype=torch.float32)
    else:
        log_p_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if restriction is None or temperature == 0:
        return log_p_BV
    return torch.log_softmax(filter_log_probabilities(log_p_BV, restriction), dim=-1)


def apply_repetition_penalty(
    logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float | torch.Tensor
) -> torch.Tensor:
    """Penalise the logits z of tokens seen in the sequence: z / penalty where z > 0, otherwise z * penalty.

    Args: penalty: a number, or float [B, 1].
    Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1, extended to negative logits as in vLLM and
        transformers.
    """
    penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def filter_log_probabilities(log_p_BV: torch.Tensor, restriction: SamplingSettings) -> torch.Tensor:
    """Set log p to minus infinity for tokens that are filtered out: first by min_p, then top_k, then top_p of the
    rest.

    The order is that of vLLM's sampler (penalties, temperature, min_p, top_k, top_p; vllm/v1/sample/sampler.py).
    Tokens as likely as the last kept one are kept too, so the result does not depend on the order of equal tokens.
    """
    if restriction.min_p > 0:
        least_B1 = log_p_BV.amax(-1, keepdim=True) + math.log(restriction.min_p)
        log_p_BV = log_p_BV.masked_fill(log_p_BV < least_B1, -torch.inf)
    if 0 < restriction.top_k < log_p_BV.shape[-1]:
        least_B1 = log_p_BV.topk(restriction.top_k, dim=-1).values[:, -1:]
        log_p_BV = log_p_BV.masked_fill(log_p_BV < least_B1, -torch.inf)
    if restriction.top_p < 1:
        log_p_BV = log_p_BV.masked_fill(
            log_p_BV < _find_top_p_threshold(log_p_BV, restriction.top_p), -torch.inf
        )
    return log_p_BV


def _find_top_p_threshold(log_p_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return log p of the least likely token to keep, [B, 1].

    The probabilities of all more likely tokens add up to less than top_p.
    """
    totals_B1 = log_p_BV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    if log_p_BV.device.type != "cpu" or log_p_BV.shape[-1] <= _PARTIAL_SORT_SIZE:
        return _find_least(log_p_BV.sort(dim=-1, descending=True).values, totals_B1, top_p)[0]
    least_B1, is_enough_B1 = _find_least(
        log_p_BV.topk(_PARTIAL_SORT_SIZE, dim=-1).values, totals_B1, top_p
    )
    incomplete_rows = (~is_enough_B1.squeeze(1)).nonzero().squeeze(1)
    if len(incomplete_rows):
        sorted_RV = log_p_BV[incomplete_rows].sort(dim=-1, descending=True).values
        least_B1[incomplete_rows] = _find_least(sorted_RV, totals_B1[incomplete_rows], top_p)[0]
    return least_B1


def _find_least(
    sorted_BK: torch.Tensor, totals_B1: torch.Tensor, top_p: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p of the last token needed for a mass of top_p, and whether these K tokens have that mass, [B, 1]."""
    masses_BK = sorted_BK.exp().cumsum(-1, dtype=torch.float64)
    before_BK = torch.cat([torch.zeros_like(totals_B1), masses_BK[:, :-1]], dim=1)
    count_B1 = (before_BK < top_p * totals_B1).sum(-1, keepdim=True)
    return sorted_BK.gather(1, count_B1 - 1), masses_BK[:, -1:] >= top_p * totals_B1


def check_prompt(sequence: RolloutSequence, max_length: int) -> None:
    """Raise DataError if a prompt is empty or leaves no room for a single token."""
    if not 0 < len(sequence.prompt_ids) < max_length:
        raise DataError(
            f"a prompt of {len(sequence.prompt_ids)} tokens cannot be continued in a context of {max_length} tokens"
        )


@torch.no_grad()
def check_weights(model: nn.Module) -> None:
    """Raise NonFiniteTensor naming the first weight with NaN or infinity; called before every run.

    Costs one pass over the weights, which a run reads once per token, and one synchronisation. Checking
    log-probabilities is not enough: integer matrix products turn a NaN into some finite number.
    """
    weights = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel()
    }
    if not weights:
        return
    device = next(iter(weights.values())).device
    bounds = torch.stack(
        [
            torch.stack(torch.aminmax(weight)).to(device, torch.float64)
            for weight in weights.values()
        ]
    )
    is_bad = (~bounds.isfinite().all(1)).tolist()
    if True not in is_bad:
        return
    name = list(weights)[is_bad.index(True)]
    indices = (~weights[name].isfinite()).nonzero()
    index = tuple(indices[0].tolist())
    raise NonFiniteTensor(
        f"weight {name}: {weights[name][index].item()} at {index}, {len(indices)} of {weights[name].numel()} values "
        f"are not finite, and {sum(is_bad) - 1} other weights have such values; no token can be sampled from this "
        "model. Return to an earlier checkpoint and lower learning_rate or max_grad_norm"
    )


def check_logprob(logprob: float, index: int, dtype: torch.dtype) -> None:
    """Raise NonFiniteTensor if a sampled token's log-probability is not finite although the weights are.

    Args:
        index: tokens sampled before it in its sequence.
        dtype: of the weights.
    """
    if not math.isfinite(logprob):
        raise NonFiniteTensor(
            f"log-probability of sampled token number {index + 1} of a sequence: {logprob}, although all weights are "
            f"finite; activations overflow in {str(dtype).removeprefix('torch.')}, because of half precision or "
            "diverged training: check the size of the weights, and load the model in bfloat16 or float32 (model.dtype)"
        )


def check_observation(
    observation: list[int] | ReplacementContext,
    room: int,
    context: int,
    hit_limit: bool,
    draws: int,
) -> None:
    """Raise DataError if a sequence cannot continue with an observation.

    Args:
        room: tokens left before the limit.
        context: longest context of this sequence in tokens.
        draws: tokens that may still be sampled, over all contexts.
    """
    if hit_limit:
        raise DataError(
            "a sequence that hit its limit returned an observation; it must return None"
        )
    if isinstance(observation, ReplacementContext):
        if not 0 < len(observation.ids) < observation.limit <= context:
            raise DataError(
                f"a context of {len(observation.ids)} tokens cannot grow to {observation.limit} tokens where "
                f"{context} tokens fit"
            )
        if observation.limit - len(observation.ids) > draws:
            raise DataError(
                f"a context of {len(observation.ids)} tokens cannot grow to {observation.limit} tokens where {draws} "
                "more tokens may be sampled: max_completion_tokens limits the sum over all contexts"
            )
        return
    if not 0 < len(observation) < room:
        raise DataError(
            f"an observation of {len(observation)} tokens cannot be appended where {room} tokens are left"
        )
