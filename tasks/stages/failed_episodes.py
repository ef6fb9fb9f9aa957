"""Failed episodes of a stage, kept in its folder for `posttrain replay`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rl_core.environments.failed_episodes import FailedEpisode, Keep
from rl_core.rollouts.failed_episode_file import FailedEpisodeFile
from tasks.own_commands import own_command
from tasks.pipeline.stage import FAILED_EPISODES, StageContext

__all__ = ["kept_episodes", "keeper"]


def kept_episodes(context: StageContext) -> FailedEpisodeFile:
    """The stage's file."""
    return FailedEpisodeFile(context.folder / FAILED_EPISODES, context.name)


def keeper(context: StageContext, file: FailedEpisodeFile | None = None, *, of: str = "") -> Keep:
    """Function that keeps an episode, and says how to look at it; only the first of several processes keeps them.

    Args:
        file: where several keepers share one. of: the model that plays; "" = the policy in training.
    """
    kept = file or kept_episodes(context)

    def keep(episode: FailedEpisode) -> str:
        if not context.process_group.is_rank_zero:
            return ""
        model = f"{of}_greedy" if of and episode.trajectory.temperature == 0 else of
        name = kept.add(episode, model or str(episode.iteration))
        replay = own_command(f"replay {shlex.quote(str(name))}", Path(context.pipeline.output))
        return "" if name is None else f"play it again: {replay}"

    return keep
