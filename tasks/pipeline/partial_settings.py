"""Settings of the part of a pipeline that ends with one stage."""

from __future__ import annotations

import dataclasses

from tasks.config import PipelineSettings
from tasks.stage_registry import entry, names, policy_stages, result_stages

__all__ = ["settings_up_to"]


def settings_up_to(settings: PipelineSettings, name: str, model: str | None = None) -> PipelineSettings:
    """Pipeline settings up to a stage, without those that it does not rest on.

    Args:
        name: a stage of the settings.
        model: folder, hub name or registered model that replaces the stages that train a policy before it.
    """
    order = names()
    needed = set(order[: order.index(name) + 1])
    if entry(name).trains == "policy":
        needed -= set(result_stages())
    if name != "reward_model" and not _asks_reward_model(settings, needed, model):
        needed.discard("reward_model")
    if model is not None:
        needed -= set(policy_stages()) - {name}
        settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, path=model))
    stages = settings.stages.with_stages({stage: None for stage in order if stage not in needed})
    return dataclasses.replace(settings, stages=stages)


def _asks_reward_model(settings: PipelineSettings, needed: set[str], model: str | None) -> bool:
    """True = one of these stages takes the reward model: the results of a whole run do, where there is one."""
    policy = settings.stages.policy
    if policy is not None and "learned" in policy.rewards:
        return True
    takers = [name for name in needed - {"policy"} if "reward_model" in entry(name).takes]
    return model is None and any(getattr(settings.stages, name) is not None for name in takers)
