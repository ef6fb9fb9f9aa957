"""Canary episodes: held-out episodes that decide about snapshots, and that nothing is ever learned from."""

from __future__ import annotations

from rl_core.environments.environment import Environment
from rl_core.environments.heldout import ContentSeeds, is_heldout
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_requests import heldout_requests
from rl_core.settings import EvaluationSettings

__all__ = ["canary_requests", "is_canary"]

_ROUNDS = 1_000_003  # a prime above the rounds of a service: no two rounds of two seeds draw alike


def canary_requests(
    environment: Environment, levels: tuple[str, ...], count: int, seed: int, round_number: int
) -> list[EpisodeRequest]:
    """Held-out episodes of one round, levels in equal shares.

    Each round is a draw of its own, so an episode may come again in a later one, as in any sample.
    Raises: DataError for a level without held-out episodes; SettingsError for an unknown level.
    """
    chosen = levels or tuple(environment.levels)
    settings = EvaluationSettings(episodes=max(count, len(chosen), 2), levels=chosen)
    return heldout_requests(environment, settings, seed * _ROUNDS + round_number)


def is_canary(environment: Environment, level: str, seed: int) -> bool:
    """True = the question of this episode is held out, whatever its seed. Raises: SettingsError, EnvironmentFault."""
    environment.check_level(level)
    held = environment.seeds_of("heldout", level)
    if isinstance(held, ContentSeeds):
        return is_heldout(environment.question(seed, level), environment.heldout_share)
    return seed in held
