"""Loading and saving of policies, the pipeline's environment, and the recorder of failed episodes, for all stages."""

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
    """Open the stage's file of failed episodes, which `posttrain replay` reads."""
    return FailedEpisodeFile(context.folder / FAILED_EPISODES, context.name)


def build_failure_recorder(
    context: StageContext, file: FailedEpisodeFile | None = None, *, model_name: str = ""
) -> StoreFailedEpisode:
    """Build a function that stores a failed episode and returns how to replay it.

    Only the first of several processes stores.

    Args:
        file: shared by several recorders.
        model_name: the model that plays; "" = the policy in training.
    """
    failed_episodes = file or open_failed_episode_file(context)

    def store(episode: FailedEpisode) -> str:
        if not context.process_group.is_rank_zero:
            return ""
        is_greedy = model_name and episode.trajectory.temperature == 0
        model = f"{model_name}_greedy" if is_greedy else model_name
        name = failed_episodes.append_episode(episode, model or str(episode.iteration))
        if name is None:
            return ""
        replay = format_posttrain_command(
            f"replay {shlex.quote(str(name))}", Path(context.pipeline.output)
        )
        return f"play it again: {replay}"

    return store


def load_policy(source: Path | str, pipeline: PipelineSettings) -> Policy:
    """Load the policy of a model folder or hub name, with the pipeline's dtype, device and adapters."""
    from rl_core.api import policy  # imported here: loads torch, which a cached run does not need

    return policy.load_policy(source, pipeline.model)


def load_frozen_policy(source: Path | str, pipeline: PipelineSettings) -> Policy:
    """Load the policy of a model folder or hub name as it is stored: without adapters or quantisation.

    For stages that only play or read a policy. New adapters would change nothing but the speed, and
    `model.lora.quantize` would judge a different model than the one that is promoted.
    """
    from rl_core.api import policy  # here: it loads torch, not needed if cached

    return policy.load_policy(source, dataclasses.replace(pipeline.model, lora=None))


def save_policy(context: StageContext, policy: Policy, optimizer_step: OptimizerStep) -> None:
    """Write the policy that the stage trained into its folder."""
    context.save_model(
        optimizer_step,
        policy.model,
        policy.tokenizer,
        lambda pipeline: load_policy(context.inputs["model"], pipeline).model,
    )


def build_pipeline_environment(pipeline: PipelineSettings, data: Path | None) -> Environment:
    """Build the pipeline's environment.

    Args:
        data: the data stage's folder, if that stage is part of the pipeline.
    """
    return build_environment_factory(pipeline, data)()


def build_environment_factory(
    pipeline: PipelineSettings, data: Path | None
) -> Callable[[], Environment]:
    """Build a function that creates the pipeline's environment, also in another process.

    Arguments: as `build_pipeline_environment`.
    """
    return functools.partial(
        make_environment, pipeline.environment.name, dict(pipeline.environment.options), data=data
    )
