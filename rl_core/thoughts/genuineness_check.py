"""Check that thoughts are genuine: controls with shuffled, filler and truncated thoughts, and checks during training.

A thought that helps by its content stops helping in the controls; one that helps by its length, its format or extra
compute does not (the converse of the test of Pfau et al. 2024, arXiv:2404.15758).

During training the check runs every N episodes, on the validation episodes, and may end training. The stage's final
test comes at the end, on other episodes. As the checks use the same episodes again and again, their verdicts are a
curve to read and a reason to stop, but no proof.
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
from rl_core.thoughts.verdict import POLICY_THOUGHTS, ThoughtVerdict, judge_thoughts
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CONTROL_CONDITIONS = ("shuffled", "filler", "truncated")
FILLER_TEXT = "."  # its token replaces every token of a thought in the filler control

GainsByCondition = dict[str, list[list[float]]]  # condition -> episode -> answered turn


def choose_shuffle_partners(episodes: Sequence[ThoughtEpisode], seed: int) -> list[int]:
    """Choose another episode of the same level for each episode: a cycle through each level, in seeded order.

    Returns: its index.
    Raises: DataError if a level has a single episode with an answer.
    """
    by_level: dict[str, list[int]] = defaultdict(list)
    for index, episode in enumerate(episodes):
        if any(step.answered for step in episode.steps):
            by_level[episode.level].append(index)
    partners = list(range(len(episodes)))
    for level, members in sorted(by_level.items()):
        if len(members) < 2:
            raise DataError(
                f"level '{level}': of the checked episodes only {len(members)} has an answer, and shuffling "
                "thoughts needs at least two; raise check_episodes, or train longer first"
            )
        order = np.random.default_rng([seed, len(members)]).permutation(members).tolist()
        for position, index in enumerate(order):
            partners[index] = order[position - 1]
    return partners


def build_control_thoughts(
    thought_ids: Sequence[int], other_ids: Sequence[int], separator: int, filler_id: int
) -> dict[str, list[int]]:
    """Build the thought of each control.

    shuffled: the other question's thought. filler: as many tokens, all the same one. truncated: the first half (rounded
    down). Filler and truncation keep the blank tokens at the end, which separate thought and answer.

    Args:
        separator: number of blank tokens at the end of `thought_ids`.
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
    """Measure gains over no thought, of the policy's thoughts and in each control, per turn and on the same histories.

    Args:
        seed: of the shuffling.
    Returns: by condition, POLICY_THOUGHTS and CONTROL_CONDITIONS: for each episode with an answer its answered turns'
        gains.
    Raises: DataError if no turn was answered or no thought can be shuffled.
    """
    plan = build_answer_rows(episodes)
    if not plan.steps:
        raise DataError(
            "no turn of these episodes has an answer, so there is no thought to examine"
        )
    partners = choose_shuffle_partners(episodes, seed)
    rows = list(plan.rows)
    spans = {POLICY_THOUGHTS: plan.with_thought, "none": plan.without}
    spans |= {name: [] for name in CONTROL_CONDITIONS}
    for (index, turn), policy_span in zip(plan.steps, plan.with_thought, strict=True):
        episode, partner = episodes[index], episodes[partners[index]]
        step = episode.steps[turn]
        partner_steps = [candidate for candidate in partner.steps if candidate.answered]
        partner_step = partner_steps[turn % len(partner_steps)]
        thought = episode.ids[step.start : step.end]
        controls = build_control_thoughts(
            thought,
            partner.ids[partner_step.start : partner_step.end],
            reader.count_separator_tokens(thought),
            filler_id,
        )
        for name, ids in controls.items():
            if ids == thought:
                spans[name].append(policy_span)
                continue
            history = episode.ids[: step.start] + ids
            row = history + step.target_ids
            rows.append(row)
            spans[name].append(TokenSpan(len(rows) - 1, len(history) + step.scored_from, len(row)))
    all_spans = [span for condition_spans in spans.values() for span in condition_spans]
    logprobs_N = compute_span_logprobs(model, rows, all_spans, pad_id=pad_id, max_tokens=max_tokens)
    logprobs = dict(zip(spans, logprobs_N.chunk(len(spans)), strict=True))
    gains: GainsByCondition = {}
    for name in (POLICY_THOUGHTS, *CONTROL_CONDITIONS):
        gains_N = compute_thought_gain(logprobs[name], logprobs["none"], kind=kind, clip=clip)
        by_episode: dict[int, list[float]] = defaultdict(list)
        for (index, _), gain in zip(plan.steps, gains_N.tolist(), strict=True):
            by_episode[index].append(gain)
        gains[name] = list(by_episode.values())
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
    """Run the controls on these episodes, and judge the thoughts. Raises: DataError if no thought can be examined."""
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
    """Schedule of the checks during training, and the stop that one of them may request."""

    def __init__(self, settings: ThoughtsSettings, num_heldout: int) -> None:
        """Store the settings. Raises: SettingsError if checks are requested without held-out episodes."""
        self._interval_episodes = settings.check_every_episodes
        self._stops_when_genuine = settings.stop_when_genuine
        if self._interval_episodes and num_heldout < 2:
            raise SettingsError(
                "check_every_episodes: needs held-out episodes, at least 2 of each level"
            )
        self.finished = ""  # reason to stop training; "" = continue

    def is_due(self, before: int, played: int) -> bool:
        """Return whether a multiple of N lies in (before, played], the episodes before and after an iteration."""
        interval = self._interval_episodes
        return bool(interval) and before // interval < played // interval

    def run_check(self, verdict: Callable[[], ThoughtVerdict], played: int) -> dict[str, float]:
        """Run a check and decide whether training stops.

        Returns: thoughts/check_...; genuine is 0 if no episode can be examined yet.
        """
        try:
            result = verdict()
        except DataError:  # no episode has an answer yet, or only one of a level
            return {"thoughts/check_genuine": 0.0}
        prefixes = ("thoughts/gain_", "thoughts/drop_")
        metrics = {
            name.replace("thoughts/", "thoughts/check_"): value
            for name, value in result.collect_metrics().items()
            if name == "thoughts/genuine" or name.startswith(prefixes)
        }
        if self._stops_when_genuine and result.genuine:
            self.finished = (
                f"thoughts are genuine on the validation episodes, after {played} episodes"
            )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"finished": self.finished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.finished = str(state["finished"])
