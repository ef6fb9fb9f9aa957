"""Controls for thoughts: the same question with a shuffled thought, with filler tokens, with half of the thought.

A thought that helps by its content stops helping in the controls; one that helps by its length, its format or extra
compute does not (the converse of the test of Pfau et al. 2024, arXiv:2404.15758).

The test for genuine thoughts while training: every N episodes, on the validation's episodes, and by choice an end.

The stage's own test comes at the end, on other episodes. Here the same episodes are looked at again and again, so a
verdict of one of these checks is a curve to read and a reason to stop, no proof.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.errors import DataError, SettingsError
from rl_core.settings import ThoughtsSettings
from rl_core.thoughts.episodes import (
    GainKind,
    ThoughtEpisode,
    ThoughtReader,
    ThoughtRenderer,
    TokenSpan,
    build_answer_rows,
    compute_span_logprobs,
    compute_thought_gain,
)
from rl_core.thoughts.verdict import ThoughtVerdict, judge_thoughts
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CONTROL_CONDITIONS = ("shuffled", "filler", "truncated")
FILLER_TEXT = "."  # its token stands for every token of a thought in the filler control

GainsByCondition = dict[str, list[list[float]]]  # condition -> episode -> answered turn


def choose_shuffle_partners(episodes: Sequence[ThoughtEpisode], seed: int) -> list[int]:
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


def build_control_thoughts(
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
) -> GainsByCondition:
    """Gains over no thought, of the own thoughts and in each control, per turn and on the same histories.

    Args:
        seed: of the shuffling.
    Returns: {"own", "shuffled", "filler", "truncated"}: for each episode with an answer its answered turns' gains.
    Raises: DataError where no turn was answered or no thought can be shuffled.
    """
    plan = build_answer_rows(episodes)
    if not plan.steps:
        raise DataError(
            "no turn of these episodes gave an answer, so there is no thought to examine"
        )
    partners = choose_shuffle_partners(episodes, seed)
    rows, spans = (
        list(plan.rows),
        {
            "own": plan.with_thought,
            "none": plan.without,
            **{name: [] for name in CONTROL_CONDITIONS},
        },
    )
    for place, (index, _) in enumerate(plan.steps):
        episode, other = episodes[index], episodes[partners[index]]
        step = episode.steps[plan.steps[place][1]]
        options = [s for s in other.steps if s.answered]
        partner = options[plan.steps[place][1] % len(options)]
        thought = episode.ids[step.start : step.end]
        controls = build_control_thoughts(
            thought,
            other.ids[partner.start : partner.end],
            reader.count_separator_tokens(thought),
            filler_id,
        )
        for name, ids in controls.items():
            if ids == thought:
                spans[name].append(plan.with_thought[place])
                continue
            before = episode.ids[: step.start] + ids
            rows.append(before + step.target_ids)
            spans[name].append(
                TokenSpan(len(rows) - 1, len(before) + step.scored_from, len(rows[-1]))
            )
    every = [span for group in spans.values() for span in group]
    logprobs_N = compute_span_logprobs(model, rows, every, pad_id=pad_id, max_tokens=max_tokens)
    logprobs = dict(zip(spans, logprobs_N.chunk(len(spans)), strict=True))
    gains: GainsByCondition = {}
    for name in ("own", *CONTROL_CONDITIONS):
        values = compute_thought_gain(
            logprobs[name], logprobs["none"], kind=kind, clip=clip
        ).tolist()
        grouped: dict[int, list[float]] = defaultdict(list)
        for (index, _), value in zip(plan.steps, values, strict=True):
            grouped[index].append(value)
        gains[name] = list(grouped.values())
    return gains


def examine_thoughts(
    model: PreTrainedModel,
    reader: ThoughtReader,
    renderer: ThoughtRenderer,
    optimizer_step: OptimizerStep,
    episodes: Sequence[ThoughtEpisode],
    settings: ThoughtsSettings,
    *,
    pad_id: int,
    seed: int,
) -> ThoughtVerdict:
    """Controls on these episodes, and the verdict. Raises: DataError where no thought can be examined."""
    measure = functools.partial(
        measure_gains,
        model,
        reader,
        episodes,
        kind=settings.reward,
        clip=settings.gain_clip,
        filler_id=renderer.action_ids(FILLER_TEXT)[0],
        pad_id=pad_id,
        seed=seed,
        max_tokens=settings.micro_batch_tokens,
    )
    return judge_thoughts(
        optimizer_step.sharded.run_independently_with_full_weights(measure),
        min_dependence=settings.min_dependence,
        bootstrap_samples=settings.bootstrap_samples,
        seed=seed,
    )


class GenuinenessCheck:
    """Schedule of the checks, and the end of training that one of them may ask for."""

    def __init__(self, settings: ThoughtsSettings, num_heldout: int) -> None:
        """Raises: SettingsError where checks are asked for and there are no held-out episodes."""
        self._interval_episodes, self._stops_when_genuine = (
            settings.check_every_episodes,
            settings.stop_when_genuine,
        )
        if self._interval_episodes and num_heldout < 2:
            raise SettingsError(
                "check_every_episodes: needs held-out episodes, at least 2 of each level"
            )
        self.finished = ""  # why training ends; "" = it goes on

    def is_due(self, before: int, played: int) -> bool:
        """True = a multiple of N lies in (before, played], the episodes played before and after an iteration."""
        return (
            bool(self._interval_episodes)
            and before // self._interval_episodes < played // self._interval_episodes
        )

    def run_check(self, verdict: Callable[[], ThoughtVerdict], played: int) -> dict[str, float]:
        """Check, and note if training ends; returns thoughts/check_..., genuine being 0 where nobody answers yet."""
        try:
            found = verdict()
        except DataError:  # nobody answers yet, or only one of a level does
            return {"thoughts/check_genuine": 0.0}
        metrics = {
            name.replace("thoughts/", "thoughts/check_"): value
            for name, value in found.collect_metrics().items()
            if name == "thoughts/genuine" or name.startswith(("thoughts/gain_", "thoughts/drop_"))
        }
        if self._stops_when_genuine and found.genuine:
            self.finished = (
                f"thoughts are genuine on the validation episodes, after {played} episodes"
            )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs."""
        return {"finished": self.finished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.finished = str(state["finished"])
