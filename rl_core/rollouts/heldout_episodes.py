"""Held-out episodes: random seeds without repeated questions, for evaluating every model and for validation."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence

from rl_core.environments.environment import Environment
from rl_core.errors import DataError, SettingsError
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import EvaluationSettings

logger = logging.getLogger(__name__)

_MAX_DRAWS_PER_EPISODE = 20  # most seeds inspected per requested episode


def draw_heldout_seeds(
    environment: Environment,
    level: str,
    count: int,
    rng: random.Random,
    excluded: Collection[int] = (),
    *,
    repeat: bool = True,
) -> list[int]:
    """Draw up to `count` held-out seeds of a level, none of which asks a question of the training episodes.

    Seeds whose question is already drawn or asked by an excluded seed come last, with a warning, or are omitted if
    `repeat` is False. If questions cannot be held out (`Environment.held_out`), only the seeds differ.

    Args:
        excluded: seeds that are used elsewhere.
    """
    seeds = environment.seeds_of("heldout", level)
    held_out = environment.held_out(level)
    by_content = held_out.by == "content"
    known_questions: set[str] = set()
    if by_content:
        known_questions = {environment.question(seed, level) for seed in excluded}
    picked: list[int] = []
    repeated: list[int] = []
    # Sample indices, because looking up a seed of a generated level takes several episodes.
    num_draws = min(len(seeds), _MAX_DRAWS_PER_EPISODE * count + len(excluded))
    for index in rng.sample(range(len(seeds)), num_draws):
        if len(picked) == count:
            break
        seed = seeds[index]
        if seed in excluded or seed in held_out.shared:
            continue
        if by_content:
            question = environment.question(seed, level)
            if question in known_questions:
                repeated.append(seed)
                continue
            known_questions.add(question)
        picked.append(seed)
    reused = repeated[: count - len(picked)] if repeat else []
    if reused:
        logger.warning(
            "level %s: %d of %d held-out episodes repeat a question; no other episodes are available",
            level,
            len(reused),
            count,
        )
    return picked + reused


def draw_heldout_requests(
    environment: Environment,
    settings: EvaluationSettings,
    seed: int,
    excluded: Collection[EpisodeRequest] = (),
) -> list[EpisodeRequest]:
    """Draw held-out episodes: levels in equal shares, each with its own questions, interleaved.

    In a mixture the environments have equal shares, and their levels equal shares of those. The result depends only on
    environment, settings and seed, so every model gets the same episodes. A level with fewer held-out episodes than its
    share contributes all of them to draw 0, with a warning. A later draw (`settings.episodes_draw`) has the full share
    of every level, without the episodes and questions of earlier draws.

    Args:
        excluded: episodes used elsewhere; neither they nor their questions are drawn (`draw_heldout_seeds`).
    Raises: SettingsError for an unknown level; DataError for a level without held-out episodes, or with too few for
        the draw.
    """
    if len(set(settings.levels)) < len(settings.levels):
        raise SettingsError(f"levels: {list(settings.levels)} lists a level twice")
    levels = list(environment.expand_levels(dict.fromkeys(settings.levels, 1.0)))
    levels = levels or list(environment.levels)
    for level in levels:
        environment.check_level(level)
    shares = split_episodes(environment, levels, settings.episodes)
    if not all(shares):
        raise SettingsError(
            f"episodes: {settings.episodes} is fewer than the {len(levels)} levels to evaluate"
            + (", of which each environment needs its share" if len(environment.parts) > 1 else "")
        )
    per_level: list[list[EpisodeRequest]] = []
    used_seeds = {
        level: {request.seed for request in excluded if request.level == level} for level in levels
    }
    for level, share in zip(levels, shares, strict=True):
        picked = _draw_level_seeds(
            environment, level, share, seed, settings.episodes_draw, used_seeds[level]
        )
        per_level.append(
            [EpisodeRequest(level=level, seed=episode_seed) for episode_seed in picked]
        )
    longest = max(map(len, per_level))
    return [requests[i] for i in range(longest) for requests in per_level if i < len(requests)]


def split_episodes(environment: Environment, levels: Sequence[str], episodes: int) -> list[int]:
    """Return each level's number of episodes: equal shares of the environments, and of the levels within each."""
    owners = [environment.find_part(level).name for level in levels]
    names = list(dict.fromkeys(owners))
    by_environment = dict(zip(names, _split_evenly(episodes, len(names)), strict=True))
    by_level = {
        name: iter(_split_evenly(share, owners.count(name)))
        for name, share in by_environment.items()
    }
    return [next(by_level[owner]) for owner in owners]


def _split_evenly(total: int, count: int) -> list[int]:
    """Split a number into `count` parts that differ by at most 1, the larger ones first."""
    return [total // count + (index < total % count) for index in range(count)]


def _draw_level_seeds(
    environment: Environment, level: str, share: int, seed: int, draw: int, used: set[int]
) -> list[int]:
    """Draw the seeds of one level; see `draw_heldout_requests`."""
    seeds = environment.seeds_of("heldout", level)
    if not len(seeds):
        raise DataError(
            f"environment '{environment.name}' has no held-out episodes of level '{level}'"
        )
    # Seeding by text makes a level's draw independent of the other levels.
    picked = draw_heldout_seeds(
        environment, level, share, random.Random(f"heldout/{seed}/{level}"), () if draw else used
    )
    if not picked:
        logger.warning(
            "level %s has no other held-out episodes; reusing those that are used elsewhere", level
        )
        picked = draw_heldout_seeds(
            environment, level, share, random.Random(f"heldout/{seed}/{level}")
        )
    if len(picked) < share:
        logger.warning(
            "level %s has %d held-out episodes, fewer than %d; using all of them",
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
                f"level '{level}' has {len(seeds)} held-out episodes, too few for draw {number} of {share} unused "
                f"ones: {len(picked)} whose question is new are left"
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
    """Draw validation episodes for early stopping and model selection; exclude `reported` episodes and their
    questions.

    Args:
        setting, other: names of the settings for `episodes` and for the number of `reported` ones, for the error.
    Raises: SettingsError if too few remain.
    """
    requests: list[EpisodeRequest] = []
    expanded = (level for name in levels for level in environment.expand_levels({name: 1.0}))
    levels = list(dict.fromkeys(expanded))
    shares = split_episodes(environment, levels, episodes)
    for level, share in zip(levels, shares, strict=True):
        seeds = environment.seeds_of("heldout", level)
        reported_seeds = {request.seed for request in reported if request.level == level}
        picked = draw_heldout_seeds(
            environment, level, share, random.Random(f"validation/{seed}/{level}"), reported_seeds
        )
        if len(picked) < share:
            raise SettingsError(
                f"{setting}: level '{level}' has {len(seeds)} held-out episodes; {other} takes "
                f"{len(reported_seeds)} of them; {len(picked)} are left, {share} are needed. Lower {other} or {setting}"
            )
        requests += [EpisodeRequest(level=level, seed=s) for s in picked]
    return requests
