"""Restricted sampling, penalties and stop texts in both rollout backends, against numpy."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.rollout_backends import EOS, create_backends, play
from helpers.scripted_sequences import ROOM, ScriptedSequence, make_model, make_sessions, sampling

from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.settings import SamplingSettings


def compute_processed(
    logits: np.ndarray, context: list[int], settings: SamplingSettings
) -> np.ndarray:
    """Compute the next token's probabilities by vLLM's definitions, float64: penalties, temperature, min_p, top_k,
    top_p.
    """
    z = logits.astype(np.float64).copy()
    for token in set(context):
        z[token] = (
            z[token] / settings.repetition_penalty
            if z[token] > 0
            else z[token] * settings.repetition_penalty
        )
    p = np.exp((z - z.max()) / settings.temperature)
    p[p < settings.min_p] = 0.0
    ranks = np.argsort(-p)
    p[ranks[settings.top_k or len(p) :]] = 0.0
    mass, total = 0.0, p.sum()
    for token in ranks:
        share = p[token] / total
        if mass >= settings.top_p:
            p[token] = 0.0
        mass += share
    return np.asarray(p / p.sum())


RESTRICTED = [
    dict(top_k=3),
    dict(top_p=0.8, temperature=0.7),
    dict(min_p=0.1),
    dict(repetition_penalty=1.3),
    dict(repetition_penalty=1.3, temperature=0.0),
    dict(top_k=8, top_p=0.9, min_p=0.05, temperature=1.5, repetition_penalty=1.2),
]


@pytest.mark.parametrize("options", RESTRICTED)
def test_restricted_sampling_in_both_backends(weights: str, options: dict[str, float]) -> None:
    """Every token's log-probability equals numpy's definition, including turns and observations."""
    model = make_model("llama", head_dim=16)
    engine, fallback = create_backends(model)
    ours, theirs = play(engine, **options), play(fallback, slots=5, **options)
    assert [s.turns for s in ours] == [s.turns for s in theirs]
    assert [s.turns for s in play(engine, slots=4, **options)] == [s.turns for s in ours]
    settings = sampling(**options)
    for sequence in ours[::4]:
        ids = sequence.prompt_ids + sequence.completion_ids
        with torch.no_grad():
            logits_SV = model(torch.tensor([ids])).logits[0].double().numpy()
        for position, is_sampled in enumerate(sequence.loss_mask, start=len(sequence.prompt_ids)):
            if not is_sampled:
                continue
            if settings.temperature:
                expected = compute_processed(logits_SV[position - 1], ids[:position], settings)
            else:
                unscaled = dataclasses.replace(settings, temperature=1.0)
                expected = compute_processed(logits_SV[position - 1], ids[:position], unscaled)
                assert expected.argmax() == ids[position]
            logprob = sequence.logprobs[position - len(sequence.prompt_ids)]
            assert logprob == pytest.approx(math.log(expected[ids[position]]), abs=1e-4)


def test_frequencies_are_the_enumerated_probabilities() -> None:
    """Two tokens of 3,000 sequences: at most 4.5 standard deviations at every pair with an expected count above 5."""
    model = make_model("llama", head_dim=16)
    settings = sampling(
        top_k=5,
        top_p=0.9,
        repetition_penalty=1.5,
        temperature=1.3,
        max_completion_tokens=2,
        slots=500,
    )
    engine = create_rollout_backend(model, eos_ids=[], pad_id=0, max_length=64)
    sequences = [ScriptedSequence([7, 9], seed) for seed in range(3000)]
    engine.run_sequences(sequences, settings)
    pairs = Counter(tuple(s.completion_ids) for s in sequences)

    def compute_next(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return compute_processed(
                model(torch.tensor([ids])).logits[0, -1].double().numpy(), ids, settings
            )

    first = compute_next([7, 9])
    expected = {
        (int(a), int(b)): first[a] * second[b]
        for a in first.nonzero()[0]
        for second in [compute_next([7, 9, int(a)])]
        for b in second.nonzero()[0]
    }
    assert set(pairs) <= set(expected) and sum(expected.values()) == pytest.approx(1.0)
    for pair, p in expected.items():
        if 3000 * p > 5:
            assert abs(pairs[pair] - 3000 * p) < 4.5 * math.sqrt(3000 * p * (1 - p)), pair


class StoppingSequence(ScriptedSequence):
    """A sequence that stops when the newest token is divisible by 7."""

    num_calls: int = 0

    def should_stop(self, action_ids: list[int]) -> bool:
        self.num_calls += 1
        assert action_ids
        return action_ids[-1] % 7 == 0


def test_stop_texts_end_actions_in_both_backends(weights: str) -> None:
    engine, fallback = create_backends(make_model("llama", head_dim=16))

    def play_stopping(
        backend: Engine | TransformersBackend, **options: object
    ) -> list[StoppingSequence]:
        sequences = [
            StoppingSequence(s.prompt_ids, s.seed, [list(o) for o in s._observations], ROOM)
            for s in make_sessions()
        ]
        backend.run_sequences(sequences, sampling(**options))  # type: ignore[arg-type]
        return sequences

    ours, theirs = play_stopping(engine, stop=("x",)), play_stopping(fallback, stop=("x",), slots=5)
    assert [s.turns for s in ours] == [s.turns for s in theirs]
    ends = Counter()
    for turns in (s.turns for s in ours):
        for ids, hit_limit in turns:
            assert not any(token % 7 == 0 or token in EOS for token in ids[:-1])
            ends["stop" if ids[-1] % 7 == 0 else "eos" if ids[-1] in EOS else "limit"] += 1
            assert hit_limit == (ids[-1] % 7 != 0 and ids[-1] not in EOS)
    assert ends["stop"] > 3 and ends["eos"] > 3
    assert not any(s.num_calls for s in play_stopping(engine))  # not called without stop texts
