"""Teacher-forced measurements on existing texts: perplexity, entropy, KL, coherence, reward model scores.

Suffixes: N loss tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from rl_core.analysis.results import ModelProbeResult
from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import Row
from rl_core.data.training_sequences import build_training_sequences
from rl_core.losses.kl import exact_forward_kl
from rl_core.losses.supervised import token_entropy
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.hidden_states import compute_turn_embeddings, find_turn_spans
from rl_core.models.logprobs import completion_logprobs, iter_next_token_logprobs
from rl_core.models.rotary import read_model_max_length
from rl_core.out_of_memory import MemoryFit
from rl_core.rewards.state_components import CoherenceReward
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import CoherenceSettings
from rl_core.types import Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_TOKENS = 4096  # padded tokens per forward pass; more exceeds CPU caches without a gain
MAX_TURNS = 8  # turns reported separately; later turns count only in the total


@dataclass(frozen=True)
class ProbedModel:
    """A model to measure, and its renderer."""

    model: PreTrainedModel
    renderer: ChatRenderer


@dataclass(frozen=True, slots=True)
class PolicyDivergence:
    """Means over sampled tokens, in nats per token."""

    entropy: float
    kl: float | None  # None without a reference
    reference_nll: (
        float  # of the sampled tokens under the reference, or under the model without one
    )
    entropy_by_turn: list[float]
    kl_by_turn: list[float]


def probe_model(
    subject: ProbedModel,
    first: ProbedModel | None,
    rollouts: Sequence[Rollout],
    demonstrations: Sequence[Row] = (),
    coherence: CoherenceSettings | None = None,
) -> ModelProbeResult:
    """Measure everything about one model.

    Args:
        first: reference model for KL and hidden states; None = `subject` itself, with KL 0.
        rollouts: sampled by `subject`. demonstrations: held-out rows of {messages, tools}; those longer than the
            model's context are skipped.
    """
    nll, num_demonstrations = compute_mean_nll(subject, demonstrations)
    divergence = measure_divergence(
        subject.model, first.model if first else None, rollouts, subject.renderer.pad_id
    )
    embedding_model = first or subject
    coherence_score = None
    if rollouts:
        states = compute_turn_embeddings(
            embedding_model.model,
            rollouts,
            pad_id=embedding_model.renderer.pad_id,
            max_tokens=MAX_TOKENS,
        )
        coherence_score = fmean(CoherenceReward(coherence or CoherenceSettings())(rollouts, states))
    return ModelProbeResult(
        perplexity=math.exp(min(nll, 700.0)) if nll is not None else None,
        demonstrations=num_demonstrations,
        entropy=divergence.entropy if divergence else None,
        kl_to_first=(divergence.kl if first else 0.0) if divergence else None,
        perplexity_under_first=math.exp(min(divergence.reference_nll, 700.0))
        if divergence
        else None,
        coherence=coherence_score,
        trajectories=len(rollouts),
        entropy_by_turn=divergence.entropy_by_turn if divergence else [],
        kl_by_turn=divergence.kl_by_turn if divergence else [],
    )


def compute_mean_nll(
    subject: ProbedModel, conversations: Sequence[Row]
) -> tuple[float | None, int]:
    """Compute the mean nats per assistant token (including the end-of-turn token), and the number of conversations.

    Perplexity is its exponential, comparable only between models with the same tokenizer.
    """
    context = read_model_max_length(subject.model)
    rows, count = [], 0
    for row in conversations:
        sequences = build_training_sequences(
            subject.renderer, row["messages"], row.get("tools"), max_tokens=row.get("max_tokens")
        )
        if max(len(ids) for ids, _ in sequences) <= context:
            count += 1
            rows += [
                TrainRow(
                    prompt_ids=ids[:1],
                    completion_ids=ids[1:],
                    loss_mask=mask[1:],
                    images=tuple(subject.renderer.read_images(row["messages"])),
                )
                for ids, mask in sequences
            ]
    if not rows:
        return None, 0
    device = next(subject.model.parameters()).device

    def measure_batch(batch: TrainBatch) -> tuple[float, int]:
        logprobs_BS, _ = completion_logprobs(subject.model, batch.to(device))
        nll = -float(logprobs_BS.double().sum())  # log-prob 0 for tokens without loss
        return nll, batch.num_loss_tokens

    with use_eval_mode(subject.model), torch.no_grad():
        batches = build_batches(rows, MAX_TOKENS, subject.renderer.pad_id)
        sums = MemoryFit("perplexity").compute_batches(batches, measure_batch)
    return sum(nll for nll, _ in sums) / sum(tokens for _, tokens in sums), count


@torch.no_grad()
def measure_divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    rollouts: Sequence[Rollout],
    pad_id: int,
) -> PolicyDivergence | None:
    """Measure the entropy of `model` and KL(model || reference) at every sampled token, exactly over the vocabulary.

    H = -sum_v p log p, KL = sum_v p (log p - log q), NLL of a sampled token y = -log q(y), or -log p(y) without a
    reference; all at temperature 1 regardless of the sampling temperature.
    Returns: None without rollouts.
    """
    if not rollouts:
        return None
    device = next(model.parameters()).device

    def measure_batch(
        batch: TrainBatch,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[int]]:
        batch = batch.to(device)
        chunks = iter_next_token_logprobs(model, batch)
        ref_chunks = iter_next_token_logprobs(reference, batch) if reference is not None else None
        ids_N = batch.input_ids_BS[batch.loss_mask_BS]
        entropies, kls, nlls, start = [], [], [], 0
        for log_p_CV in chunks:
            entropies.append(token_entropy(log_p_CV).cpu())
            log_q_CV = log_p_CV
            if ref_chunks is not None:
                log_q_CV = next(ref_chunks)
                kls.append(exact_forward_kl(log_p_CV, log_q_CV).cpu())
            ids_C1 = ids_N[start : start + len(log_q_CV), None]
            nlls.append(-log_q_CV.gather(1, ids_C1).squeeze(1).cpu())
            start += len(log_q_CV)
        return entropies, kls, nlls, batch.rows

    with use_eval_mode(model), use_eval_mode(reference or model):
        batches = build_batches(list(rollouts), MAX_TOKENS, pad_id)
        measured = MemoryFit("entropy and KL").compute_batches(batches, measure_batch)
    turns: list[int] = []
    for row in (row for *_, rows in measured for row in rows):
        spans = find_turn_spans(rollouts[row].loss_mask)
        turns += [turn for turn, (start, end, _) in enumerate(spans) for _ in range(start, end)]
    turns_N = torch.tensor(turns)
    entropy_N = torch.cat([chunk for entropies, *_ in measured for chunk in entropies])
    kl_chunks = [chunk for _, kls, _, _ in measured for chunk in kls]
    nll_N = torch.cat([chunk for _, _, nlls, _ in measured for chunk in nlls])
    kl_N = torch.cat(kl_chunks) if kl_chunks else None
    return PolicyDivergence(
        entropy=float(entropy_N.double().mean()),
        kl=float(kl_N.double().mean()) if kl_N is not None else None,
        reference_nll=float(nll_N.double().mean()),
        entropy_by_turn=_compute_turn_means(entropy_N, turns_N),
        kl_by_turn=_compute_turn_means(kl_N, turns_N) if kl_N is not None else [],
    )


def has_same_vocabulary(renderer: ChatRenderer, other: ChatRenderer) -> bool:
    """Return whether equal token ids mean equal text for both."""
    return bool(renderer.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def _compute_turn_means(values_N: torch.Tensor, turns_N: torch.Tensor) -> list[float]:
    """Compute the mean per turn, up to the first turn without data."""
    means = []
    for turn in range(MAX_TURNS):
        turn_values_N = values_N[turns_N == turn]
        if not len(turn_values_N):
            break
        means.append(float(turn_values_N.double().mean()))
    return means
