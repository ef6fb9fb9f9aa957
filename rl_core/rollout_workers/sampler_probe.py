"""The probe of a sampler: a few tokens after fixed prompts; two samplers of the same weights agree on their
log-probs.
"""

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
    """Fixed prompts, and the settings to continue them."""

    vocab_size: int
    sampling: SamplingSettings

    @classmethod
    def from_sampling(cls, vocab_size: int, sampling: SamplingSettings) -> SamplerProbe:
        """Build the probe at the temperature of these settings, with its own length limits."""
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
    """The continuation of one prompt."""

    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]  # nats, at the probe's temperature


class _ProbeSequence:
    """A `RolloutSequence` of one action."""

    def __init__(self, number: int, length: int, vocab_size: int) -> None:
        self.prompt_ids = [
            (7919 * (number * length + position) + 13) % vocab_size for position in range(length)
        ]
        self.seed = compute_sequence_seed("probe", number)
        self.answer = ProbeCompletion(self.prompt_ids, [], [])

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Store the action; the sequence is over."""
        self.answer = ProbeCompletion(
            self.prompt_ids, list(action_ids), [float(value) for value in logprobs]
        )
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """Return False: there are no stop texts."""
        return False


def sample_probe(backend: RolloutBackend, probe: SamplerProbe) -> list[ProbeCompletion]:
    """Continue the probe's prompts with a sampler."""
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
    """Return the largest difference of log-probs over the tokens that two samplers agree on, in nats.

    Rounding may change a draw: nothing is compared after a token that differs, and at least half of the first tokens
    must agree.
    Raises: SamplerMismatch with the figure beyond `bound`.
    """
    max_gap, num_agreed = 0.0, 0
    for ours, theirs in zip(expected, observed, strict=True):
        num_agreed += ours.tokens[:1] == theirs.tokens[:1]
        pairs = zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=False)
        for token, their_token, logprob, their_logprob in pairs:
            if token != their_token:
                break
            max_gap = max(max_gap, _compute_gap(logprob - their_logprob))
    if num_agreed * 2 < len(expected) or not max_gap <= bound:
        raise SamplerMismatch(
            f"{worker_label}: on {len(expected)} fixed prompts its log-probs differ by up to {max_gap:.3g} nats from "
            f"the trainer's sampler (limit {bound:g}), and {num_agreed} of {len(expected)} first tokens agree: it "
            "does not sample from the weights that were sent. None of its rollouts is used"
        )
    return max_gap


def _compute_gap(difference: float) -> float:
    """Return the absolute difference; infinity for NaN, which `max` would ignore."""
    return math.inf if math.isnan(difference) else abs(difference)


def measure_trainer_difference(
    model: PreTrainedModel, answers: Sequence[ProbeCompletion], probe: SamplerProbe
) -> float:
    """Return the largest difference, in nats, of the answers' log-probs from the trainer's forward pass."""
    temperature = probe.sampling.temperature
    rows = [
        TrainRow(a.prompt_ids, a.tokens, [True] * len(a.tokens), a.logprobs, temperature)
        for a in answers
    ]
    device, max_gap = next(model.parameters()).device, 0.0
    with torch.no_grad(), use_eval_mode(model):
        for batch in build_batches(rows, 1_024, 0):
            batch = batch.to(device)
            logprobs_BS, _ = completion_logprobs(model, batch)
            assert batch.sampler_logprobs_BS is not None
            difference_BS = (logprobs_BS.float() - batch.sampler_logprobs_BS).abs()
            max_gap = max(max_gap, _compute_gap(float(difference_BS[batch.loss_mask_BS].max())))
    return max_gap


def check_trainer_difference(
    model: PreTrainedModel, answers: Sequence[ProbeCompletion], probe: SamplerProbe, bound: float
) -> float:
    """Measure as `measure_trainer_difference` does.

    Raises: SamplerMismatch with the figure beyond `bound`.
    """
    max_gap = measure_trainer_difference(model, answers, probe)
    if not max_gap <= bound:
        raise SamplerMismatch(
            f"rollout engine and trainer differ by up to {max_gap:.3g} nats on {len(answers)} fixed prompts (limit "
            f"{bound:g}), so rollouts would not come from the trained policy"
        )
    return max_gap
