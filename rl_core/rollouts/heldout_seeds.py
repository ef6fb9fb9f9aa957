"""Seeds of held-out episodes: drawn at random, each question once while there are others."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection

from rl_core.environments.environment import Environment

__all__ = ["draw_heldout"]

logger = logging.getLogger(__name__)

_DRAWS = 20  # seeds looked at per episode that is wanted, at most


def draw_heldout(
    environment: Environment,
    level: str,
    count: int,
    rng: random.Random,
    taken: Collection[int] = (),
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
    asked = {environment.question(seed, level) for seed in taken} if by_content else set()
    picked: list[int] = []
    repeated: list[int] = []
    # Of indices: to look up a seed of a generated level takes several episodes.
    for index in rng.sample(range(len(seeds)), min(len(seeds), _DRAWS * count + len(taken))):
        if len(picked) == count:
            break
        seed = seeds[index]
        if seed in taken or seed in found.shared:
            continue
        if by_content and (question := environment.question(seed, level)) in asked:
            repeated.append(seed)
            continue
        if by_content:
            asked.add(question)
        picked.append(seed)
    again = repeated[: count - len(picked)] if repeat else []
    if again:
        logger.warning(
            "level %s: %d of %d held-out episodes repeat a question; no others were found", level, len(again), count
        )
    return picked + again
