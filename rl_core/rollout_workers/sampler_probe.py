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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


NUM_SEQUENCES, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 4
TEXT_PROMPT_TOKENS, TEXT_COMPLETION_TOKENS = 24, 16
# Rounding in half precision is larger, and less regular, after tokens that no text has.
_PROBE_TEXTS = (
    "The capital of France is",
    "To make a cup of tea, first boil",
    "def add(a, b):\n    return",
    "In 1969 the first people walked on",
    "Water freezes at a temperature of",
    "She opened the door and saw",
    "The sum of 12 and 30 is",
    "A good scientist always asks",
)


@dataclass(frozen=True, slots=True)
class SamplerProbe:
    """Fixed prompts, and the settings to continue them."""

    vocab_size: int
    sampling: SamplingSettings
    prompts: tuple[tuple[int, ...], ...] = ()  # of texts; () = prompts of arbitrary tokens

    @classmethod
    def from_sampling(
        cls,
        vocab_size: int,
        sampling: SamplingSettings,
        prompts: tuple[tuple[int, ...], ...] = (),
    ) -> SamplerProbe:
        """Build the probe at the temperature of these settings, with its own length limits.

        Args:
            prompts: of `encode_probe_texts`.
        """
        short = dataclasses.replace(
            sampling,
            max_completion_tokens=TEXT_COMPLETION_TOKENS if prompts else COMPLETION_TOKENS,
            max_turns=1,
            slots=NUM_SEQUENCES,
            stop=(),
        )
        return cls(vocab_size, short, prompts)


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Difference of a sampler's log-probs from the trainer's on the sampled tokens, in nats."""

    largest: float
    mean: float  # of the absolute differences
    kl: float  # of the trainer from the sampler, by the k3 estimator (never negative)


def encode_probe_texts(
    tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[tuple[int, ...], ...]:
    """Encode the texts that the probe continues; they leave room for its tokens."""
    room = max(1, min(TEXT_PROMPT_TOKENS, max_length - TEXT_COMPLETION_TOKENS))
    rows = [tokenizer.encode(text, add_special_tokens=True) for text in _PROBE_TEXTS]
    return tuple(tuple(int(token) for token in row[:room]) for row in rows)


@dataclass(frozen=True, slots=True)
class ProbeCompletion:
    """The continuation of one prompt."""

    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]  # nats, at the probe's temperature


class _ProbeSequence:
    """A `RolloutSequence` of one action."""

    def __init__(self, number: int, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
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
    prompts = [list(prompt) for prompt in probe.prompts] or [
        [
            (7919 * (number * length + position) + 13) % probe.vocab_size
            for position in range(length)
        ]
        for number in range(NUM_SEQUENCES)
    ]
    sequences = [_ProbeSequence(number, prompt) for number, prompt in enumerate(prompts)]
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
    return measure_logprob_difference(model, answers, probe).largest


def measure_logprob_difference(
    model: PreTrainedModel, answers: Sequence[ProbeCompletion], probe: SamplerProbe
) -> LogprobDifference:
    """Measure the differences of the answers' log-probs from the trainer's forward pass."""
    temperature = probe.sampling.temperature
    rows = [
        TrainRow(a.prompt_ids, a.tokens, [True] * len(a.tokens), a.logprobs, temperature)
        for a in answers
    ]
    device, gaps = next(model.parameters()).device, list[float]()
    with torch.no_grad(), use_eval_mode(model):
        for batch in build_batches(rows, 1_024, 0):
            batch = batch.to(device)
            logprobs_BS, _ = completion_logprobs(model, batch)
            assert batch.sampler_logprobs_BS is not None
            difference_BS = logprobs_BS.float() - batch.sampler_logprobs_BS
            gaps += difference_BS[batch.loss_mask_BS].tolist()
    # log of trainer over sampler; its k3 is e^x - 1 - x (Schulman 2020)
    kl = sum(_compute_k3(gap) for gap in gaps) / len(gaps)
    sizes = [_compute_gap(gap) for gap in gaps]
    return LogprobDifference(max(sizes), sum(sizes) / len(sizes), kl)


def _compute_k3(gap: float) -> float:
    """Return e^x - 1 - x; infinity where it overflows or x is no number."""
    return math.expm1(gap) - gap if math.isfinite(gap) and gap < 700 else math.inf


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
