"""Evaluations with chosen outcomes."""

from rl_core.evaluation import Evaluation, summarize_trajectories
from rl_core.types import Trajectory


def build_evaluation(successes, *, samples=1, rewards=None, first=0) -> Evaluation:
    """Make an evaluation of episodes first, first + 1, ... with these numbers of successes among `samples` samples.

    None = success is unknown.
    """
    return summarize_trajectories(
        Trajectory(
            environment="e",
            level="l",
            kind="k",
            seed=first + offset,
            prompt="p",
            target="t",
            success=None if won is None else sample < won,
            reward=float(won is not None and sample < won) if rewards is None else rewards[offset],
        )
        for offset, won in enumerate(successes)
        for sample in range(samples)
    )
