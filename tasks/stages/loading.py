"""Loading of a policy with its renderer and backend, and of the environment, for all stages; saving of a policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.environments import make
from rl_core.environments.environment import Environment
from tasks.config import PipelineSettings

if TYPE_CHECKING:
    from rl_core.api.policy import Policy
    from rl_core.training.optimizer_step import OptimizerStep
    from tasks.pipeline.stage import StageContext

__all__ = ["environment_factory", "load_frozen_policy", "load_policy", "make_environment", "save_policy"]


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


def make_environment(pipeline: PipelineSettings, data: Path | None) -> Environment:
    """The pipeline's environment; `data` is the data stage's folder, where that stage is part of the pipeline."""
    return environment_factory(pipeline, data)()


def environment_factory(pipeline: PipelineSettings, data: Path | None) -> Callable[[], Environment]:
    """Makes the pipeline's environment, also in another process; arguments: as `make_environment`."""
    return functools.partial(make, pipeline.environment.name, dict(pipeline.environment.options), data=data)
