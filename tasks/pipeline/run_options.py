"""Options of one run of a pipeline, apart from its settings: they decide how it runs, not what it computes.

Settings of the part of a pipeline that ends with one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tasks.config import PipelineSettings
from tasks.stage_registry import (
    find_stage,
    list_policy_stages,
    list_result_stages,
    list_stage_names,
)

# An unfinished stage whose conditions changed since its checkpoint: refuse to run, resume from the checkpoint under the
# new conditions, begin anew and keep the old checkpoint aside, or leave it alone, as it is another trial's of a sweep.
OnDrift = Literal["refuse", "resume", "anew", "beside"]

MetricsCallback = Callable[[str, Mapping[str, float], int], None]  # stage, metrics, step


@dataclass(frozen=True, kw_only=True)
class FlowRunAddress:
    """The Prefect flow run behind a pipeline run; "" outside of Prefect."""

    id: str = ""
    url: str = ""
    api: str = ""  # of the Prefect server, without its password; "" = the run's own embedded one


@dataclass(frozen=True, kw_only=True)
class TrialLocation:
    """Place of a run that is one trial of a sweep: it shares the pipeline's finished stages, and nothing else.

    The sweep holds the pipeline's lock; trials hold their own, and that of the stage that they are at.
    """

    home: Path  # folder of the trial's own lock, record and journals
    name: str  # of its run
    parent_run_id: str | None = None  # the sweep's run in the tracking store
    parent_folder: Path | None = None  # the journal of that run
    on_metrics: MetricsCallback | None = None  # is told what the trial's stages measure


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a pipeline run that are no part of its settings."""

    fresh: bool = False  # stages run again though they are finished: all of them, or the one that `only` names
    on_drift: OnDrift = "refuse"
    restart: bool = False  # an unfinished stage begins anew, its checkpoints notwithstanding
    only: str | None = None  # the one stage that the run is for; None = the whole pipeline
    evaluated_models: Mapping[str, str] = field(
        default_factory=dict
    )  # models to evaluate in place of the trained ones, by name
    started: str = ""  # start time of the run to go on with; "" = an interrupted run with equal settings, if any
    tags: Mapping[str, str] = field(
        default_factory=dict
    )  # of every run and model version that this run makes
    flow_run: FlowRunAddress = FlowRunAddress()
    trial: TrialLocation | None = None  # None = a run of its own


def select_settings_up_to(
    settings: PipelineSettings, name: str, model: str | None = None
) -> PipelineSettings:
    """Pipeline settings up to a stage, without those that it does not rest on.

    Args:
        name: a stage of the settings.
        model: folder, hub name or registered model that replaces the stages that train a policy before it.
    """
    order = list_stage_names()
    needed = set(order[: order.index(name) + 1])
    if find_stage(name).trained_kind == "policy":
        needed -= set(list_result_stages())
    if name != "reward_model" and not _uses_reward_model(settings, needed, model):
        needed.discard("reward_model")
    if model is not None:
        needed -= set(list_policy_stages()) - {name}
        settings = dataclasses.replace(
            settings, model=dataclasses.replace(settings.model, path=model)
        )
    stages = settings.stages.replace_stages({stage: None for stage in order if stage not in needed})
    return dataclasses.replace(settings, stages=stages)


def _uses_reward_model(settings: PipelineSettings, needed: set[str], model: str | None) -> bool:
    """True = one of these stages takes the reward model: the results of a whole run do, where there is one."""
    policy = settings.stages.policy
    if policy is not None and "learned" in policy.rewards:
        return True
    takers = [name for name in needed - {"policy"} if "reward_model" in find_stage(name).takes]
    return model is None and any(getattr(settings.stages, name) is not None for name in takers)
