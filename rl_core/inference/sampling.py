"""Protocols of rollout backends and of the sequences that they play; seeds and sampling of tokens.

B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from rl_core.environments.step_pool import ReplacementContext, TurnOutcome
from rl_core.errors import DataError, NonFiniteTensor
from rl_core.settings import SamplingSettings


class RolloutSequence(Protocol):
    """Interface of one episode to a backend: a prompt, then turns of sampled actions and appended observations."""

    prompt_ids: list[int]  # at least one token; sequences with equal prompts share one prefill
    seed: int  # 0 <= seed < 2**128; the sequence's samples depend on it and on the weights alone

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Take one action; give the observation tokens to append (at least one), or None when the episode is over.

        Or a `ReplacementContext`: its tokens take the place of all before, and its limit that of the sequence.

        Or a `PendingTurn`, which gives either once the environment has answered; the sequence waits until then.

        Args:
            action_ids: the sampled tokens of this turn, its end-of-turn token included, where there is one.
            logprobs: their log-probabilities in nats, as `draw` gives them.
            hit_limit: True = cut off by max_completion_tokens or the context; the answer has to be None then.
        """

    def should_stop(self, action_ids: list[int]) -> bool:
        """True = the newest of these tokens completes a stop text. Asked after every token, if there are stop texts."""


class RolloutBackend(Protocol):
    """Samples sequences to their end from the current weights of one model."""

    max_length: int  # prompt and completion together

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """Play every sequence to its end, through its `advance`."""

    def refresh_weights(self) -> None:
        """Notice that the model's weights have changed since the last run."""

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """Tokens that end an action from now on."""


def compute_sequence_seed(*parts: object) -> int:
    """A 128-bit seed from anything printable; equal parts give equal seeds on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def draw_uniforms(seed: int, count: int, first: int = 0) -> np.ndarray:
    """float64 [count] in [0, 1), from number `first` on: number t decides the sequence's t-th sampled token.

    Philox is counter-based (Salmon et al. 2011): the key is the sequence's seed, so what other sequences draw, and in
    which order, changes nothing, and earlier numbers need not be computed.
    """
    numbers = np.random.Philox(key=seed)
    numbers.advance(first // 4)  # a step of its counter gives four numbers
    return np.random.Generator(numbers).random(first % 4 + count)[first % 4 :]


def draw_tokens(
    logits_BV: torch.Tensor,
    uniforms_B: torch.Tensor,
    temperature: float,
    restriction: SamplingSettings | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, by inversion of the cumulative distribution, and its log-probability.

    Args:
        logits_BV: [B, V], any float type; penalties applied.
        uniforms_B: float64 [B] in [0, 1).
        temperature: 0 = the most likely token, whatever the restriction.
        restriction: draw from the tokens that its min_p, top_k and top_p keep; None = from all.
    Returns: tokens int64 [B]; log-probabilities float32 [B] in nats under the distribution that they were drawn from,
        softmax(logits / temperature) renormalised over the kept tokens. Greedy tokens are drawn from none: at
        temperature 0 those of softmax(logits).
    """
    log_p_BV = compute_log_probabilities(logits_BV, temperature, restriction)
    if temperature == 0:
        logprobs_B, tokens_B = log_p_BV.max(dim=-1)
        return tokens_B, logprobs_B
    cumulative_BV = log_p_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    # first token whose cumulative probability exceeds u * total: one of probability 0 is never taken
    levels_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    tokens_B1 = torch.searchsorted(cumulative_BV, levels_B1, right=True).clamp_(
        max=logits_BV.shape[-1] - 1
    )
    return tokens_B1.squeeze(1), log_p_BV.gather(1, tokens_B1).squeeze(1)


def compute_log_probabilities(
    logits_BV: torch.Tensor, temperature: float, restriction: SamplingSettings | None = None
) -> torch.Tensor:
    """Log-probabilities float32 [B, V] that `draw` draws by; at temperature 0 those of softmax(logits)."""
    if temperature in (0, 1):
        log_p_BV = torch.log_softmax(logits_BV, dim=-1, dtype=torch.float32)
    else:
        log_p_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if restriction is None or temperature == 0:
        return log_p_BV
    return torch.log_softmax(filter_log_probabilities(log_p_BV, restriction), dim=-1)


def apply_repetition_penalty(
    logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Logits with a repetition penalty: z / penalty where z > 0, else z * penalty, at tokens seen in the sequence.

    Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1, as vLLM and transformers apply it to negative logits.
    """
    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, changed_BV, logits_BV)


def filter_log_probabilities(log_p_BV: torch.Tensor, restriction: SamplingSettings) -> torch.Tensor:
    """log p, minus infinity at tokens that are not kept: first min_p, then top_k, then top_p of what these leave.

    The order is that of vLLM's sampler (penalties, temperature, min_p, top_k, top_p; vllm/v1/sample/sampler.py). Tokens
    as likely as the last one that is kept are kept too, so nothing depends on the order of equal ones.
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


_PARTIAL_SORT_SIZE = 1024  # tokens that a CPU sorts before it sorts the whole vocabulary


def _find_top_p_threshold(log_p_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """log p of the least likely token that is kept [B, 1]: what is more likely than it adds up to less than top_p."""
    totals_B1 = log_p_BV.exp().sum(-1, keepdim=True, dtype=torch.float64)

    def least_of(
        sorted_BK: torch.Tensor, totals_B1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        masses_BK = sorted_BK.exp().cumsum(-1, dtype=torch.float64)
        before_BK = torch.cat([torch.zeros_like(totals_B1), masses_BK[:, :-1]], dim=1)
        count_B1 = (before_BK < top_p * totals_B1).sum(-1, keepdim=True)
        return sorted_BK.gather(1, count_B1 - 1), masses_BK[:, -1:] >= top_p * totals_B1

    if log_p_BV.device.type != "cpu" or log_p_BV.shape[-1] <= _PARTIAL_SORT_SIZE:
        return least_of(log_p_BV.sort(dim=-1, descending=True).values, totals_B1)[0]
    least_B1, is_enough_B1 = least_of(log_p_BV.topk(_PARTIAL_SORT_SIZE, dim=-1).values, totals_B1)
    others = (~is_enough_B1.squeeze(1)).nonzero().squeeze(1)
    if len(others):
        whole = log_p_BV[others].sort(dim=-1, descending=True).values
        least_B1[others] = least_of(whole, totals_B1[others])[0]
    return least_B1


def check_prompt(sequence: RolloutSequence, max_length: int) -> None:
    """DataError when a prompt is empty or leaves no room for a single token."""
    if not 0 < len(sequence.prompt_ids) < max_length:
        raise DataError(
            f"a prompt of {len(sequence.prompt_ids)} tokens cannot be continued in a context of {max_length} tokens"
        )


@torch.no_grad()
def check_weights(model: nn.Module) -> None:
    """Raise NonFiniteTensor naming the first weight with NaN or infinity; called before every run.

    One pass over the weights, which a run reads once per token, and one synchronisation. Log-probabilities alone
    would not do: products of weights in integers make some number of a NaN.
    """
    weights = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel()
    }
    if not weights:
        return
    home = next(iter(weights.values())).device
    bounds = torch.stack(
        [torch.stack(torch.aminmax(weight)).to(home, torch.float64) for weight in weights.values()]
    )
    bad = (~bounds.isfinite().all(1)).tolist()
    if True not in bad:
        return
    name = list(weights)[bad.index(True)]
    places = (~weights[name].isfinite()).nonzero()
    place = tuple(places[0].tolist())
    raise NonFiniteTensor(
        f"weight {name}: {weights[name][place].item()} at {place}, {len(places)} of {weights[name].numel()} are not "
        f"finite, nor are some in {sum(bad) - 1} other weights; no token can be sampled from this model. Take weights "
        "from before, and train on with a lower learning_rate or max_grad_norm"
    )


def check_logprob(logprob: float, index: int, dtype: torch.dtype) -> None:
    """Raise NonFiniteTensor for a sampled token whose log-probability is not finite, though the weights are.

    Args:
        index: sampled tokens before it in its sequence. dtype: of the weights.
    """
    if not math.isfinite(logprob):
        raise NonFiniteTensor(
            f"log-probability of the sampled token number {index + 1} of a sequence: {logprob}, though all weights are "
            f"finite; activations overflow in {str(dtype).removeprefix('torch.')}, which half the digits or a runaway "
            "training can cause: look at the weights' size, and load the model in bfloat16 or float32 (model.dtype)"
        )


def check_observation(
    observation: list[int] | ReplacementContext,
    room: int,
    context: int,
    hit_limit: bool,
    draws: int,
) -> None:
    """DataError when a sequence goes on where it has to end.

    Args:
        room: tokens left before the limit.
        context: tokens that a context of this sequence may have.
        draws: tokens that may still be sampled, in all contexts together.
    """
    if hit_limit:
        raise DataError("a sequence that hit its limit answered with an observation; it has to end")
    if isinstance(observation, ReplacementContext):
        if not 0 < len(observation.ids) < observation.limit <= context:
            raise DataError(
                f"a context of {len(observation.ids)} tokens cannot go on to {observation.limit} where "
                f"{context} tokens fit"
            )
        if observation.limit - len(observation.ids) > draws:
            raise DataError(
                f"a context of {len(observation.ids)} tokens cannot go on to {observation.limit} where {draws} more "
                "tokens may be sampled: max_completion_tokens counts those of all contexts"
            )
        return
    if not 0 < len(observation) < room:
        raise DataError(
            f"an observation of {len(observation)} tokens cannot be appended where {room} tokens are left"
        )
