"""Episodes of an actor-critic on chosen seeds.

Suffixes: N environments, A actions or numbers of an action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.networks.actor_critic import ActionSpace, ActorCritic
from rl_core.networks.making import EnvironmentMaker, make_vector
from rl_core.networks.vector_environment import VectorEnvironment

__all__ = ["PlayedEpisodes", "action_noise", "play_episodes"]

SIDE_BY_SIDE = 32  # environments of an evaluation at most
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """Returns and lengths of episodes, in the order of their seeds."""

    seeds: list[int]
    returns: list[float]  # undiscounted, of the environment's own rewards
    lengths: list[int]
    truncated: list[bool]

    def metrics(self) -> dict[str, float]:
        """Mean return with its normal 95% interval, extremes, length, share of truncated episodes."""
        returns = np.array(self.returns)
        spread = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
        half = Z95 * spread / math.sqrt(len(returns))
        mean = float(returns.mean())
        return {
            "eval/episode_return": mean,
            "eval/episode_return_low": mean - half,
            "eval/episode_return_high": mean + half,
            "eval/episode_return_min": float(returns.min()),
            "eval/episode_return_max": float(returns.max()),
            "eval/episode_length": float(np.mean(self.lengths)),
            "eval/truncated_rate": float(np.mean(self.truncated)),
            "eval/episodes": float(len(returns)),
        }

    def to_json(self) -> list[dict[str, float | bool]]:
        """One object an episode."""
        rows = zip(self.seeds, self.returns, self.lengths, self.truncated, strict=True)
        return [dict(zip(("seed", "return", "length", "truncated"), row, strict=True)) for row in rows]


def action_noise(rng: np.random.Generator, count: int, actions: ActionSpace) -> np.ndarray:
    """Noise by which `count` actions are drawn (`PolicyNetwork.act`), float32 [count, A]."""
    shape = (count, actions.size)
    drawn = rng.gumbel(size=shape) if actions.is_discrete else rng.standard_normal(shape)
    return drawn.astype(np.float32)


def play_episodes(
    model: ActorCritic, maker: EnvironmentMaker, seeds: Sequence[int], *, greedy: bool, noise_seed: int, name: str
) -> PlayedEpisodes:
    """Play one episode from each seed to its end.

    Args:
        greedy: the likeliest action (the mean of continuous ones); False: sampled actions.
        noise_seed: of sampled actions.
    Raises: SettingsError, EnvironmentFault.
    """
    waiting = list(range(len(seeds)))[::-1]
    count = min(SIDE_BY_SIDE, len(seeds))
    playing: list[int | None] = [None] * count  # index of the seed of each environment's episode; None = of no interest
    started: list[int] = []

    def next_seed() -> int:
        started.append(waiting.pop() if waiting else -1)
        return seeds[started[-1]] if started[-1] >= 0 else seeds[0]

    environment = VectorEnvironment(make_vector(maker, count), name, next_seed)
    rng = np.random.default_rng(noise_seed)
    returns, lengths, truncated = [0.0] * len(seeds), [0] * len(seeds), [False] * len(seeds)
    missing = len(seeds)
    try:
        environment.reset()
        playing, started[:] = list(started), []
        while missing:
            noise_NA = None if greedy else torch.from_numpy(action_noise(rng, count, environment.actions))
            actions = model.act(torch.from_numpy(environment.observations_ND), noise_NA).numpy()
            step = environment.step(actions)
            ended = np.flatnonzero(step.terminated_N | step.truncated_N)
            for place, value, length in zip(ended, *environment.take_ended(step), strict=True):
                index = playing[place]
                if index is not None and index >= 0:
                    returns[index], lengths[index], truncated[index] = value, length, bool(step.truncated_N[place])
                    missing -= 1
                playing[place] = started.pop(0)
    finally:
        environment.close()
    return PlayedEpisodes(list(seeds), returns, lengths, truncated)
