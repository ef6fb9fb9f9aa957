"""Preference pairs for the stages that learn from them: from the data stage's file, or from scored rollouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.data.chat import ChatRenderer
from rl_core.data.pair_rows import PreferencePart, Use, pairs_of
from rl_core.data.pairs import Pair, labelled_sides, mismatched_pairs, pairs_from_groups
from rl_core.data.repeats import digest_of
from rl_core.data.splits import prompt_text, split_by_prompt
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailures
from rl_core.errors import DataError
from rl_core.models import causal_lm
from rl_core.rollouts.collect import EpisodeRequest, collect
from rl_core.settings import PreferenceSettings, RewardModelSettings
from rl_core.storage.faults import fault
from rl_core.storage.single_files import replacing
from rl_core.trainers.reward_model import longer_answer_baseline
from tasks.pipeline.result import PAIRS
from tasks.pipeline.stage import FAILED_EPISODES, StageContext
from tasks.stages.failed_episodes import keeper, kept_episodes
from tasks.stages.loading import load_frozen_policy, make_environment
from tasks.stages.part_tokens import part_files, part_tokens
from tasks.stages.row_files import rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["StagePairs", "stage_pairs"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]

PAIRS_PER_GROUP = 4  # more of one prompt would mostly repeat each other
HELDOUT_SHARE = 0.15  # of the questions
GROUPS_AT_MOST = 16  # a policy that nearly always fails, or succeeds, gives few pairs


@dataclass
class StagePairs:
    """Training and held-out pairs, split by question."""

    train: Sequence[Pair]
    heldout: Sequence[Pair]
    longer_baseline: float | None = None  # accuracy of "the longer answer wins" on the held-out pairs
    note: str = ""


def stage_pairs(context: StageContext) -> StagePairs:
    """The pairs of a stage: those of the preference file where the data stage read one, else of its model's rollouts.

    Raises: DataError where one of the two parts is empty.
    """
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    if data is not None and (data / "preferences_train.jsonl").is_file():
        pairs = _pairs_from_files(data, context)
    else:
        pairs = _pairs_from_rollouts(data, context)
    for name, part in (("train", pairs.train), ("heldout", pairs.heldout)):
        if not part:
            raise DataError(
                f"there is no {name} pair for the stage {context.name}: {pairs.note}. A pair needs a success and a "
                "failure at the same episode; train the policy before it longer, or raise "
                f"stages.{context.name}.num_pairs or group_size"
            )
    fault("pairs.made")
    return pairs


def _pairs_from_files(data: Path, context: StageContext) -> StagePairs:
    """The preference rows or labelled completions that the data stage checked and split by prompt."""
    policy_tokenizer = causal_lm.load_tokenizer(context.inputs["model"], context.pipeline.model)
    renderer = ChatRenderer(policy_tokenizer, context.pipeline.model)
    answers: list[tuple[int, int]] = []  # characters of the held-out ones
    prompts: list[set[bytes]] = []
    parts = []
    files = part_files(data, "preferences")
    for path, name, sides in zip(
        files, ("training", "held-out"), part_tokens(data, "preferences", renderer), strict=True
    ):
        prompts.append(set())
        lengths = answers if name == "held-out" else None
        rows = _noted(rows_of(path), prompts[-1], lengths)
        parts.append(PreferencePart.of(sides, rows, _use(context), name))
    train, heldout = pairs_of(parts[0], parts[1], _use(context), context.seed)
    return StagePairs(
        train=train,
        heldout=heldout,
        # The baseline of people: the answer with more characters.
        longer_baseline=longer_answer_baseline(answers) if answers else None,
        note=f"{len(parts[0].margins)} rows of {len(prompts[0])} prompts to learn from, "
        f"{len(prompts[1])} prompts held out",
    )


def _noted(rows: Iterable[Row], prompts: set[bytes], lengths: list[tuple[int, int]] | None) -> Iterator[Row]:
    """The rows, of which prompts and, where they are asked for, characters of both sides are noted on the way."""
    for row in rows:
        prompts.add(digest_of(prompt_text(row["prompt"])))
        if lengths is not None and "chosen" in row and not row.get("tie"):
            lengths.append((len(_said(row["chosen"])), len(_said(row["rejected"]))))
        yield row


def _said(side: str | list[dict[str, Any]]) -> str:
    """Text of a side, which may be messages."""
    return side if isinstance(side, str) else "\n".join(message["content"] for message in side)


def _pairs_from_rollouts(data: Path | None, context: StageContext) -> StagePairs:
    """Sample groups of the starting policy; a success is preferred to a failure at the same episode.

    Collects until `num_pairs` are there, at most GROUPS_AT_MOST times the groups that would do if each gave its share.
    """
    settings: RewardModelSettings | PreferenceSettings = context.settings
    environment = make_environment(context.pipeline, data)
    policy = load_frozen_policy(context.inputs["model"], context.pipeline)
    backend = policy.backend()
    rng = np.random.default_rng(context.seed)
    seeds = {level: environment.seeds_of("train", level) for level in environment.levels}
    levels = [level for level in environment.levels if len(seeds[level])]
    by_question: list[tuple[str, list[Pair]]] = []  # an episode may be drawn twice, and two may ask the same
    count = groups_played = successes = guesses = 0
    failed = kept_episodes(context)
    failed.clear()
    failures = EpisodeFailures(settings.sampling.max_failed_share, keep=keeper(context, failed, of="pairs"))
    most_groups = GROUPS_AT_MOST * -(-settings.num_pairs // PAIRS_PER_GROUP)
    while count < settings.num_pairs and groups_played < most_groups:
        requests = []
        for index in range(min(64, most_groups - groups_played)):
            level = levels[(groups_played + index) % len(levels)]
            requests.append(EpisodeRequest(level, seeds[level][int(rng.integers(len(seeds[level])))]))
        groups = collect(
            environment,
            backend,
            policy.renderer,
            requests,
            group_size=settings.group_size,
            sampling=settings.sampling,
            seed=context.seed + groups_played,
            failures=failures,
        )
        groups_played += len(groups)
        right = [rollout for group in groups for rollout in group.rollouts if rollout.success]
        successes += len(right)
        guesses += sum(rollout.trajectory.is_grounded is False for rollout in right)
        for request, group in zip(requests, groups, strict=True):
            pairs = pairs_from_groups([group], PAIRS_PER_GROUP, context.seed)
            if pairs:
                by_question.append((_question(environment, request), pairs))
                count += len(pairs)
        context.tracker.progress(min(count, settings.num_pairs), settings.num_pairs, "pairs from rollouts")
    train, heldout = by_question, by_question[:0]
    if len({question for question, _ in by_question}) > 1:
        train, heldout, _ = split_by_prompt(by_question, lambda entry: entry[0], HELDOUT_SHARE, context.seed)
    sides = [[pair for _, pairs in part for pair in pairs] for part in (train, heldout)]
    if _use(context) == "kto" and all(sides):
        labelled = [labelled_sides(part) for part in sides]
        sides = [mismatched_pairs(part, context.seed, labelled[0]) for part in labelled]
    for name, part in zip(PAIRS, sides, strict=True):
        _write_texts(context.folder / name, part, policy.tokenizer)
    rollouts = max(1, groups_played * settings.group_size - failures.total)
    lucky = f", {guesses / rollouts:.1%} by guesses, which make no pair" if guesses else ""
    lost = f", {failures.total} failed ({FAILED_EPISODES})" if failures.total else ""
    return StagePairs(
        train=sides[0],
        heldout=sides[1],
        note=f"pairs from {groups_played} episodes of {settings.group_size} rollouts each, of which "
        f"{successes / rollouts:.1%} succeeded{lucky}{lost}",
    )


def _write_texts(path: Path, pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write pairs as texts, with the special tokens that the model reads: for people, no file to train on again."""
    with replacing(path, synced=False, errors="backslashreplace") as file:
        for pair in pairs:
            chosen, rejected = (tokenizer.decode(side.completion_ids) for side in (pair.chosen, pair.rejected))
            row: Row = {"prompt_text": tokenizer.decode(pair.chosen.prompt_ids)}
            row |= (
                {"chosen_text": chosen, "rejected_text": rejected}
                if pair.desirable is None
                else {"completion_text": chosen, "label": pair.desirable}
            )
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _use(context: StageContext) -> Use:
    """The loss of a preference stage, or the reward model's."""
    settings: RewardModelSettings | PreferenceSettings = context.settings
    return settings.loss if isinstance(settings, PreferenceSettings) else settings.use


def _question(environment: Environment, request: EpisodeRequest) -> str:
    """Key of the split into training and held-out pairs: the episode's question, or its seed where those are few."""
    if environment.held_out(request.level).by == "content":
        return environment.question(request.seed, request.level)
    return f"{request.level} {request.seed}"
