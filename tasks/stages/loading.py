"""Failed episodes of a stage, kept in its folder for `posttrain replay`.

Loading of a policy with its renderer and backend, and of the environment, for all stages; saving of a policy.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.environments import make_environment
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import FailedEpisode, StoreFailedEpisode
from rl_core.rollouts.rollout_files import FailedEpisodeFile
from tasks.command_hints import format_posttrain_command
from tasks.config import PipelineSettings
from tasks.pipeline.stage import StageContext
from tasks.pipeline.stage_result import FAILED_EPISODES

if TYPE_CHECKING:
    from rl_core.api.policy import Policy
    from rl_core.training.optimizer_step import OptimizerStep


def open_failed_episode_file(context: StageContext) -> FailedEpisodeFile:
    """The stage's file."""
    return FailedEpisodeFile(context.folder / FAILED_EPISODES, context.name)


def build_failure_recorder(
    context: StageContext, file: FailedEpisodeFile | None = None, *, model_name: str = ""
) -> StoreFailedEpisode:
    """Function that keeps an episode, and says how to look at it; only the first of several processes keeps them.

    Args:
        file: where several keepers share one. of: the model that plays; "" = the policy in training.
    """
    kept = file or open_failed_episode_file(context)

    def keep(episode: FailedEpisode) -> str:
        if not context.process_group.is_rank_zero:
            return ""
        model = (
            f"{model_name}_greedy"
            if model_name and episode.trajectory.temperature == 0
            else model_name
        )
        name = kept.append_episode(episode, model or str(episode.iteration))
        replay = format_posttrain_command(
            f"replay {shlex.quote(str(name))}", Path(context.pipeline.output)
        )
        return "" if name is None else f"play it again: {replay}"

    return keep


def load_policy(source: Path | str, pipeline: PipelineSettings) -> Policy:
    """The policy of a model folder or hub name, with the pipeline's dtype, device and adapters."""
    from rl_core.api import policy  # here: it loads torch, not needed if cached

    return policy.load_policy(source, pipeline.model)


def load_frozen_policy(source: Path | str, pipeline: PipelineSettings) -> Policy:
    """The policy of a model folder or hub name as it is written: no adapters, no rounding to few bits.

    For stages that play or read a policy: adapters would be new ones that change nothing but the speed, and
    `model.lora.quantize` would judge another model than the one that is promoted.
    """
    from rl_core.api import policy  # here: it loads torch, not needed if cached

    return policy.load_policy(source, dataclasses.replace(pipeline.model, lora=None))


def save_policy(context: StageContext, policy: Policy, optimizer_step: OptimizerStep) -> None:
    """Write the policy that the stage has trained into its folder."""
    context.save_model(
        optimizer_step,
        policy.model,
        policy.tokenizer,
        lambda pipeline: load_policy(context.inputs["model"], pipeline).model,
    )


def build_pipeline_environment(pipeline: PipelineSettings, data: Path | None) -> Environment:
    """The pipeline's environment; `data` is the data stage's folder, where that stage is part of the pipeline."""
    return build_environment_factory(pipeline, data)()


def build_environment_factory(
    pipeline: PipelineSettings, data: Path | None
) -> Callable[[], Environment]:
    """Makes the pipeline's environment, also in another process; arguments: as `build_pipeline_environment`."""
    return functools.partial(
        make_environment, pipeline.environment.name, dict(pipeline.environment.options), data=data
    )
