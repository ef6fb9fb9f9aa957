"""Coherence of thoughts: do the thoughts of an episode follow from each other, without repeating each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from rl_core.thoughts.episodes import ThoughtEpisode

__all__ = ["thought_coherence"]


def thought_coherence(episodes: Sequence[ThoughtEpisode], pooled: Sequence[torch.Tensor]) -> dict[str, float]:
    """Similarity of consecutive thoughts, and repetition, over the episodes; {} where no episode has two thoughts.

    thoughts/coherence: cosine of the mean last hidden states of two consecutive thoughts of an episode, averaged over
    all such pairs. thoughts/repetition: share of the second thoughts of these pairs that stand token by token in an
    earlier turn of the episode.
    Args:
        pooled: for each episode float [2 K + 1, H], mean states of the first tokens up to: the start of each of its K
            turns, the end of the episode, the end of each turn's thought.
    """
    cosines: list[float] = []
    repeated = 0
    for episode, states in zip(episodes, pooled, strict=True):
        count = len(episode.steps)
        places = [place for place, step in enumerate(episode.steps) if step.num_thought_tokens]
        means = {place: _between(episode, states, place, count) for place in places}
        texts = {place: tuple(episode.ids[episode.steps[place].start : episode.steps[place].end]) for place in places}
        for before, place in pairwise(places):
            cosines.append(float(torch.nn.functional.cosine_similarity(means[before], means[place], dim=0)))
            repeated += texts[place] in {texts[earlier] for earlier in places if earlier < place}
    if not cosines:
        return {}
    return {"thoughts/coherence": sum(cosines) / len(cosines), "thoughts/repetition": repeated / len(cosines)}


def _between(episode: ThoughtEpisode, states: torch.Tensor, place: int, count: int) -> torch.Tensor:
    """Mean state of a thought's tokens, float64 [H], from the means up to its two ends."""
    step = episode.steps[place]
    before, after = states[place].double() * step.start, states[count + 1 + place].double() * step.end
    return (after - before) / (step.end - step.start)
