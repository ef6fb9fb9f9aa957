"""Seeds of held-out episodes: drawn at random, each question once while there are others.

Requests of held-out episodes: those that every model is compared on, and those of validation while training.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence

from rl_core.environments.environment import Environment
from rl_core.errors import DataError, SettingsError
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import EvaluationSettings

logger = logging.getLogger(__name__)

_MAX_DRAWS_PER_EPISODE = 20  # seeds looked at per episode that is wanted, at most


def draw_heldout_seeds(
    environment: Environment,
    level: str,
    count: int,
    rng: random.Random,
    excluded: Collection[int] = (),
    *,
    repeat: bool = True,
) -> list[int]:
    """Up to `count` held-out seeds of a level, none of which asks a question of the training episodes.

    Seeds with a question that is drawn already, or that a seed in `taken` asks, come last, with a warning, or with
    `repeat` False not at all. Where questions cannot be held out (`Environment.held_out`), only the seeds differ.
    Args:
        taken: seeds that are used elsewhere.
    """
    seeds = environment.seeds_of("heldout", level)
    found = environment.held_out(level)
    by_content = found.by == "content"
    asked = (
        {environment.compute_question_digest(seed, level) for seed in excluded}
        if by_content
        else set()
    )
    picked: list[int] = []
    repeated: list[int] = []
    # Of indices: to look up a seed of a generated level takes several episodes.
    for index in rng.sample(
        range(len(seeds)), min(len(seeds), _MAX_DRAWS_PER_EPISODE * count + len(excluded))
    ):
        if len(picked) == count:
            break
        seed = seeds[index]
        if seed in excluded or seed in found.shared:
            continue
        if by_content and (question := environment.compute_question_digest(seed, level)) in asked:
            repeated.append(seed)
            continue
        if by_content:
            asked.add(question)
        picked.append(seed)
    again = repeated[: count - len(picked)] if repeat else []
    if again:
        logger.warning(
            "level %s: %d of %d held-out episodes repeat a question; no others were found",
            level,
            len(again),
            count,
        )
    return picked + again


def draw_heldout_requests(
    environment: Environment,
    settings: EvaluationSettings,
    seed: int,
    excluded: Collection[EpisodeRequest] = (),
) -> list[EpisodeRequest]:
    """Held-out episodes: levels in equal shares, each with its own questions, interleaved.

    Determined by environment, settings and seed, so that every model gets the same ones. `taken`: episodes used
    elsewhere; neither they nor their questions are drawn (`rollouts.heldout_seeds`). A level with fewer held-out
    episodes than its share contributes all of them to draw 0, with a warning. A later draw (`settings.episodes_draw`)
    has the full share of every level, without the episodes and questions of the draws before it.
    Raises: SettingsError for an unknown level; DataError for a level without held-out episodes, or without enough of
    them for the draw.
    """
    levels = settings.levels or environment.levels
    for level in levels:
        environment.check_level(level)
    if len(set(levels)) < len(levels):
        raise SettingsError(f"levels: {list(levels)} lists a level twice")
    if settings.episodes < len(levels):
        raise SettingsError(
            f"episodes: {settings.episodes} is fewer than the {len(levels)} levels to evaluate"
        )
    per_level: list[list[EpisodeRequest]] = []
    used = {
        level: {request.seed for request in excluded if request.level == level} for level in levels
    }
    for index, level in enumerate(levels):
        share = settings.episodes // len(levels) + (index < settings.episodes % len(levels))
        picked = _draw_level_seeds(
            environment, level, share, seed, settings.episodes_draw, used[level]
        )
        per_level.append(
            [EpisodeRequest(level=level, seed=episode_seed) for episode_seed in picked]
        )
    longest = max(map(len, per_level))
    return [requests[i] for i in range(longest) for requests in per_level if i < len(requests)]


def _draw_level_seeds(
    environment: Environment, level: str, share: int, seed: int, draw: int, used: set[int]
) -> list[int]:
    """Seeds of one level in a draw of the held-out episodes; see `draw_heldout_requests`."""
    seeds = environment.seeds_of("heldout", level)
    if not len(seeds):
        raise DataError(
            f"environment '{environment.name}' has no held-out episodes of level '{level}'"
        )
    # Seeding by text makes the draw of a level independent of the other levels.
    picked = draw_heldout_seeds(
        environment, level, share, random.Random(f"heldout/{seed}/{level}"), () if draw else used
    )
    if not picked:
        logger.warning(
            "level %s has no other held-out episodes; those used elsewhere are used again", level
        )
        picked = draw_heldout_seeds(
            environment, level, share, random.Random(f"heldout/{seed}/{level}")
        )
    if len(picked) < share:
        logger.warning(
            "level %s has %d held-out episodes, fewer than %d; all are used",
            level,
            len(picked),
            share,
        )
    seen = used | set(picked)
    for number in range(1, draw + 1):
        rng = random.Random(f"heldout/{seed}/{level}/{number}")
        picked = draw_heldout_seeds(environment, level, share, rng, seen, repeat=False)
        if len(picked) < share:
            raise DataError(
                f"level '{level}' has {len(seeds)} held-out episodes, too few for draw {number} of {share} that were "
                f"not used before: {len(picked)} whose question is new are left"
            )
        seen.update(picked)
    return picked


def draw_validation_requests(
    environment: Environment,
    episodes: int,
    levels: Sequence[str],
    seed: int,
    reported: Collection[EpisodeRequest],
    setting: str = "eval_episodes",
    other: str = "evaluate.episodes",
) -> list[EpisodeRequest]:
    """Validation episodes for early stopping and model selection; neither they nor their questions are `reported`.

    Args:
        setting, other: names of the settings for `episodes` and for the number of `reported` ones, for the error.
    Raises: SettingsError if too few remain.
    """
    requests: list[EpisodeRequest] = []
    for index, level in enumerate(levels):
        share = episodes // len(levels) + (index < episodes % len(levels))
        seeds = environment.seeds_of("heldout", level)
        taken = {request.seed for request in reported if request.level == level}
        picked = draw_heldout_seeds(
            environment, level, share, random.Random(f"validation/{seed}/{level}"), taken
        )
        if len(picked) < share:
            raise SettingsError(
                f"{setting}: level '{level}' has {len(seeds)} held-out episodes; {other} takes {len(taken)} of them; "
                f"{len(picked)} are left, {share} are needed. Lower {other} or {setting}"
            )
        requests += [EpisodeRequest(level=level, seed=s) for s in picked]
    return requests
