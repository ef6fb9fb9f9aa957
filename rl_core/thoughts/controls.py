"""Controls for thoughts: the same question with a shuffled thought, with filler tokens, with half of the thought.

A thought that helps by its content stops helping in the controls; one that helps by its length, its format or extra
compute does not (the converse of the test of Pfau et al. 2024, arXiv:2404.15758).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rl_core.errors import DataError
from rl_core.thoughts.episodes import Span, ThoughtEpisode, ThoughtReader, answer_rows, span_logprobs
from rl_core.thoughts.gain import GainKind, thought_gain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CONTROLS", "FILLER", "control_thoughts", "measure_gains", "shuffle_partners"]

CONTROLS = ("shuffled", "filler", "truncated")
FILLER = "."  # its token stands for every token of a thought in the filler control

Gains = dict[str, list[list[float]]]  # condition -> episode -> answered turn


def shuffle_partners(episodes: Sequence[ThoughtEpisode], seed: int) -> list[int]:
    """Index of another episode of the same level for each episode: a cycle through each level, in seeded order.

    Raises: DataError where a level has a single episode with an answer.
    """
    by_level: dict[str, list[int]] = defaultdict(list)
    for index, episode in enumerate(episodes):
        if any(step.answered for step in episode.steps):
            by_level[episode.level].append(index)
    partners = list(range(len(episodes)))
    for level, members in sorted(by_level.items()):
        if len(members) < 2:
            raise DataError(
                f"level '{level}': of the checked episodes only {len(members)} has an answer, and thoughts "
                "are shuffled between two at least; raise check_episodes, or train longer before"
            )
        order = np.random.default_rng([seed, len(members)]).permutation(members).tolist()
        for place, index in enumerate(order):
            partners[index] = order[place - 1]
    return partners


def control_thoughts(
    thought_ids: Sequence[int], other_ids: Sequence[int], separator: int, filler_id: int
) -> dict[str, list[int]]:
    """The thought in each control.

    shuffled: the other question's thought. filler: as many tokens, all the same one. truncated: the first half
    (rounded down). Filler and truncation keep the blank tokens at the end, which separate thought and answer.

    Args:
        separator: blank tokens at the end of `thought_ids`.
    """
    size = len(thought_ids) - separator
    ending = list(thought_ids[size:])
    return {
        "shuffled": list(other_ids),
        "filler": [filler_id] * size + ending,
        "truncated": list(thought_ids[: size // 2]) + ending,
    }


def measure_gains(
    model: PreTrainedModel,
    reader: ThoughtReader,
    episodes: Sequence[ThoughtEpisode],
    *,
    kind: GainKind,
    clip: float,
    filler_id: int,
    pad_id: int,
    seed: int,
    max_tokens: int = 16384,
) -> Gains:
    """Gains over no thought, of the own thoughts and in each control, per turn and on the same histories.

    Args:
        seed: of the shuffling.
    Returns: {"own", "shuffled", "filler", "truncated"}: for each episode with an answer its answered turns' gains.
    Raises: DataError where no turn was answered or no thought can be shuffled.
    """
    plan = answer_rows(episodes)
    if not plan.steps:
        raise DataError("no turn of these episodes gave an answer, so there is no thought to examine")
    partners = shuffle_partners(episodes, seed)
    rows, spans = list(plan.rows), {"own": plan.with_thought, "none": plan.without, **{name: [] for name in CONTROLS}}
    for place, (index, _) in enumerate(plan.steps):
        episode, other = episodes[index], episodes[partners[index]]
        step = episode.steps[plan.steps[place][1]]
        options = [s for s in other.steps if s.answered]
        partner = options[plan.steps[place][1] % len(options)]
        thought = episode.ids[step.start : step.end]
        controls = control_thoughts(
            thought, other.ids[partner.start : partner.end], reader.separator_length(thought), filler_id
        )
        for name, ids in controls.items():
            if ids == thought:
                spans[name].append(plan.with_thought[place])
                continue
            before = episode.ids[: step.start] + ids
            rows.append(before + step.target_ids)
            spans[name].append(Span(len(rows) - 1, len(before) + step.scored_from, len(rows[-1])))
    every = [span for group in spans.values() for span in group]
    logprobs_N = span_logprobs(model, rows, every, pad_id=pad_id, max_tokens=max_tokens)
    logprobs = dict(zip(spans, logprobs_N.chunk(len(spans)), strict=True))
    gains: Gains = {}
    for name in ("own", *CONTROLS):
        values = thought_gain(logprobs[name], logprobs["none"], kind=kind, clip=clip).tolist()
        grouped: dict[int, list[float]] = defaultdict(list)
        for (index, _), value in zip(plan.steps, values, strict=True):
            grouped[index].append(value)
        gains[name] = list(grouped.values())
    return gains
