"""Probe of a sampler: a few tokens after fixed prompts, whose log-probs two samplers of the same weights agree on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_core.environments.step_pool import TurnOutcome
from rl_core.errors import SamplerMismatch
from rl_core.inference.sampling import RolloutBackend, compute_sequence_seed
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NUM_SEQUENCES, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 4


@dataclass(frozen=True, slots=True)
class SamplerProbe:
    """Fixed prompts, and how they are continued."""

    vocab_size: int
    sampling: SamplingSettings

    @classmethod
    def from_sampling(cls, vocab_size: int, sampling: SamplingSettings) -> SamplerProbe:
        """The probe at the temperature of these settings, whose limits are its own."""
        short = dataclasses.replace(
            sampling,
            max_completion_tokens=COMPLETION_TOKENS,
            max_turns=1,
            slots=NUM_SEQUENCES,
            stop=(),
        )
        return cls(vocab_size, short)


@dataclass(frozen=True, slots=True)
class ProbeCompletion:
    """Continuation of one prompt."""

    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]  # nats, at the probe's temperature


class _ProbeSequence:
    """A `RolloutSequence` of one action."""

    def __init__(self, number: int, length: int, vocab_size: int) -> None:
        self.prompt_ids = [
            (7919 * (number * length + place) + 13) % vocab_size for place in range(length)
        ]
        self.seed = compute_sequence_seed("probe", number)
        self.answer = ProbeCompletion(self.prompt_ids, [], [])

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Keep the action; the sequence is over."""
        self.answer = ProbeCompletion(
            self.prompt_ids, list(action_ids), [float(value) for value in logprobs]
        )
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """There are no stop texts."""
        return False


def sample_probe(backend: RolloutBackend, probe: SamplerProbe) -> list[ProbeCompletion]:
    """Continue the probe's prompts by a sampler."""
    length = max(1, min(PROMPT_TOKENS, backend.max_length - 1))
    sequences = [
        _ProbeSequence(number, length, probe.vocab_size) for number in range(NUM_SEQUENCES)
    ]
    backend.run_sequences(sequences, probe.sampling)
    return [sequence.answer for sequence in sequences]


def check_probe_completions(
    worker_label: str,
    expected: Sequence[ProbeCompletion],
    observed: Sequence[ProbeCompletion],
    bound: float,
) -> float:
    """Largest difference of log-probs of the tokens that two samplers agree on, nats.

    Rounding may turn a draw: after a token that differs nothing is compared, and half of the first tokens have to
    agree. Raises: SamplerMismatch with the figure beyond `bound`.
    """
    worst, agreed = 0.0, 0
    for mine, other in zip(expected, observed, strict=True):
        agreed += mine.tokens[:1] == other.tokens[:1]
        pairs = zip(mine.tokens, other.tokens, mine.logprobs, other.logprobs, strict=False)
        for token, other_token, logprob, other_logprob in pairs:
            if token != other_token:
                break
            worst = max(worst, _compute_gap(logprob - other_logprob))
    if agreed * 2 < len(expected) or not worst <= bound:
        raise SamplerMismatch(
            f"{worker_label}: on {len(expected)} fixed prompts its log-probs differ by up to {worst:.3g} nats from the trainer's "
            f"sampler (limit {bound:g}), and {agreed} of {len(expected)} first tokens agree: it does not sample from the "
            "weights that were sent. None of its rollouts is used"
        )
    return worst


def _compute_gap(difference: float) -> float:
    """Its size; infinite for NaN, which `max` would pass over."""
    return math.inf if math.isnan(difference) else abs(difference)


def measure_trainer_difference(
    model: PreTrainedModel, answers: Sequence[ProbeCompletion], probe: SamplerProbe
) -> float:
    """Largest difference, in nats, of the answers' log-probs to those of the trainer's own forward pass."""
    rows = [
        TrainRow(
            a.prompt_ids, a.tokens, [True] * len(a.tokens), a.logprobs, probe.sampling.temperature
        )
        for a in answers
    ]
    device, worst = next(model.parameters()).device, 0.0
    with torch.no_grad(), use_eval_mode(model):
        for batch in build_batches(rows, 1_024, 0):
            batch = batch.to(device)
            logprobs_BS, _ = completion_logprobs(model, batch)
            assert batch.sampler_logprobs_BS is not None
            difference_BS = (logprobs_BS.float() - batch.sampler_logprobs_BS).abs()
            worst = max(worst, _compute_gap(float(difference_BS[batch.loss_mask_BS].max())))
    return worst


def check_trainer_difference(
    model: PreTrainedModel, answers: Sequence[ProbeCompletion], probe: SamplerProbe, bound: float
) -> float:
    """As `measure_trainer_difference`. Raises: SamplerMismatch with the figure beyond `bound`."""
    worst = measure_trainer_difference(model, answers, probe)
    if not worst <= bound:
        raise SamplerMismatch(
            f"rollout engine and trainer differ by up to {worst:.3g} nats on {len(answers)} fixed prompts (limit "
            f"{bound:g}), so rollouts would not be from the policy that is trained"
        )
    return worst
