"""Options of one pipeline run, separate from its settings: they decide how it runs, not what it computes."""

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

# What to do with an unfinished stage whose conditions changed since its checkpoint: refuse to run; resume from the
# checkpoint under the new conditions; start over and archive the old checkpoint ("anew"); or ignore it because it
# belongs to another trial of a sweep ("beside").
OnDrift = Literal["refuse", "resume", "anew", "beside"]

MetricsCallback = Callable[[str, Mapping[str, float], int], None]  # stage, metrics, step


@dataclass(frozen=True, kw_only=True)
class FlowRunAddress:
    """The Prefect flow run behind a pipeline run; fields are "" outside Prefect."""

    id: str = ""
    url: str = ""
    api: str = ""  # of the Prefect server, without its password; "" = an embedded server


@dataclass(frozen=True, kw_only=True)
class TrialLocation:
    """Folders of a run that is one trial of a sweep: it shares only the pipeline's finished stages.

    The sweep holds the pipeline's lock. A trial holds its own lock and that of the stage it runs.
    """

    home: Path  # folder of the trial's own lock, record and journals
    name: str  # of its run
    parent_run_id: str | None = None  # the sweep's run in the tracking store
    parent_folder: Path | None = None  # the journal of that run
    on_metrics: MetricsCallback | None = None  # receives the metrics of the trial's stages


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a pipeline run that are not part of its settings."""

    fresh: bool = False  # rerun finished stages: all of them, or the one that `only` names
    on_drift: OnDrift = "refuse"
    restart: bool = False  # start unfinished stages over and ignore their checkpoints
    only: str | None = None  # the single stage to run; None = the whole pipeline
    # models to evaluate instead of the trained ones, by name
    evaluated_models: Mapping[str, str] = field(default_factory=dict)
    started: str = (
        ""  # start time of the run to continue; "" = an interrupted run with equal settings, if any
    )
    # of every run and model version that this run creates
    tags: Mapping[str, str] = field(default_factory=dict)
    flow_run: FlowRunAddress = FlowRunAddress()
    trial: TrialLocation | None = None  # None = not part of a sweep


def select_settings_up_to(
    settings: PipelineSettings, name: str, model: str | None = None
) -> PipelineSettings:
    """Return the pipeline's settings up to a stage, without stages that it does not depend on.

    Args:
        name: a stage of the settings.
        model: folder, hub name or registered model that replaces the policy-training stages before it.
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
    """Return whether one of these stages uses the reward model: the results of a whole run do, if there is one."""
    if settings.uses_reward_model:
        return True
    consumers = [name for name in needed - {"policy"} if "reward_model" in find_stage(name).takes]
    return model is None and any(getattr(settings.stages, name) is not None for name in consumers)
