"""Plans of a configuration's stages: which are planned, and by what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flows.planning.further_stages import FurtherStagePlanner
from flows.planning.plan_target import Lengths, Target
from flows.planning.stage_planner import PlannedModel, StagePlan
from rl_core.errors import SettingsError
from rl_core.settings import (
    AnalysisSettings,
    DistillationSettings,
    EvaluationSettings,
    ExportSettings,
    NetworkSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
    ThoughtsSettings,
)
from tasks import stage_registry
from tasks.config import PipelineSettings
from tasks.config.files import context_of

__all__ = ["PipelinePlan", "StagePlan", "plan_pipeline", "plan_stage"]

_Plan = Callable[[FurtherStagePlanner, Any], StagePlan]
_PLANNED: Mapping[type, _Plan] = {
    SFTSettings: FurtherStagePlanner.supervised,
    PreferenceSettings: FurtherStagePlanner.supervised,
    RewardModelSettings: FurtherStagePlanner.supervised,
    PolicySettings: FurtherStagePlanner.policy,
    DistillationSettings: lambda stage, block: stage.policy(block.policy()),
    ThoughtsSettings: FurtherStagePlanner.thoughts,
    NetworkSettings: FurtherStagePlanner.network,
    EvaluationSettings: FurtherStagePlanner.evaluation,
    AnalysisSettings: FurtherStagePlanner.analysis,
    ExportSettings: FurtherStagePlanner.export,
}


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Plans of the stages in their order, and the names of those that are not planned."""

    stages: tuple[StagePlan, ...]
    left_out: tuple[str, ...]


def plan_pipeline(settings: PipelineSettings, target: Target, lengths: Lengths) -> PipelinePlan:
    """Plans of all active stages but those that compute nothing worth it (data, promotion), and stages of users' own.

    Raises: ModelError where the model's config cannot be read.
    """
    models: dict[bool, PlannedModel] = {}
    plans, left_out = [], []
    for name in stage_registry.names():
        block = getattr(settings.stages, name)
        if block is None:
            continue
        if type(block) not in _PLANNED:
            left_out.append(name)
            continue
        try:
            plans.append(plan_stage(name, settings, target, lengths, models))
        except SettingsError as error:
            if not isinstance(block, NetworkSettings):
                raise
            left_out.append(f"{name} ({error})")  # its environment's package may be on another machine
    return PipelinePlan(tuple(plans), tuple(left_out))


def plan_stage(
    name: str,
    settings: PipelineSettings,
    target: Target,
    lengths: Lengths,
    models: dict[bool, PlannedModel] | None = None,
) -> StagePlan:
    """Plan of one stage. `models`: made by earlier calls for the same settings, by whether they have adapters."""
    block = getattr(settings.stages, name)
    # the reward model's stage trains all weights, and a written model has its adapters merged
    with_adapters = not isinstance(block, RewardModelSettings | AnalysisSettings | ExportSettings)
    models = {} if models is None else models
    if with_adapters not in models:
        chosen = settings.model if with_adapters else dataclasses.replace(settings.model, lora=None)
        models[with_adapters] = PlannedModel(chosen, context_of(settings.model) or 2**20)
    return _PLANNED[type(block)](FurtherStagePlanner(name, settings, target, lengths, models[with_adapters]), block)
