"""Partial pipelines: a single stage, evaluation of one model, comparison of several."""

from __future__ import annotations

import dataclasses

from prefect import flow
from prefect.runtime import flow_run

from flows.parameters import PipelineForm, describe_overrides, extract_pipeline_name, read_settings
from flows.post_training import execute_pipeline, run_pipeline
from flows.runtime.flow_run_states import mark_flow_run_stopped
from flows.runtime.prefect_home import exempt_loopback_in_calls
from flows.runtime.run_summary import PipelineResult
from rl_core.errors import SettingsError
from rl_core.settings import AnalysisSettings
from tasks.config import PipelineSettings, StageName, StagesSettings, resolve_evaluation_settings
from tasks.pipeline.run_options import OnDrift, select_settings_up_to
from tasks.stage_registry import describe_unknown_stage


def _build_run_name() -> str:
    parameters = flow_run.parameters
    if "stage" in parameters:
        action = parameters["stage"].replace("_", " ")
    else:
        action = f"compare {', '.join(parameters.get('models') or ())}"
    name = extract_pipeline_name(parameters["settings"])
    overrides = describe_overrides(parameters.get("overrides"))
    return " · ".join(filter(None, (name, action, overrides)))


@exempt_loopback_in_calls
@flow(
    name="single-stage",
    flow_run_name=_build_run_name,
    validate_parameters=False,
    persist_result=False,
    on_failure=[mark_flow_run_stopped],
    on_crashed=[mark_flow_run_stopped],
)
def single_stage(
    settings: PipelineForm | str,
    stage: StageName,
    model: str | None = None,
    fresh: bool = False,
    overrides: list[str] | None = None,
    allow_drift: bool = False,
) -> PipelineResult:
    """Run one stage; its inputs come from finished runs, or the earlier stages run first.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        stage: a stage of the settings.
        model: start from this folder, hub name or registered model instead of an earlier stage's model.
        fresh: rerun this stage even if finished.
        overrides: key.path=value each, as in `--set`; applied to `settings`.
        allow_drift: resume the stage although its settings, data or code changed since its checkpoint.
    """
    typed = read_settings(settings, overrides)
    if stage not in typed.stages.active:
        raise SettingsError(f"{typed.name}: {describe_unknown_stage(stage, typed.stages.active)}")
    on_drift: OnDrift = "resume" if allow_drift else "refuse"
    return execute_pipeline(
        select_settings_up_to(typed, stage, model), fresh=fresh, only=stage, on_drift=on_drift
    )


@exempt_loopback_in_calls
@flow(
    name="analyze",
    flow_run_name=_build_run_name,
    validate_parameters=False,
    persist_result=False,
    on_failure=[mark_flow_run_stopped],
    on_crashed=[mark_flow_run_stopped],
)
def compare_models(
    settings: PipelineForm | str, models: dict[str, str], overrides: list[str] | None = None
) -> PipelineResult:
    """Evaluate several models on the held-out episodes and compare the first with all others.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        models: name -> folder, hub name or registered model (models:/NAME@ALIAS, models:/NAME/VERSION).
        overrides: key.path=value each, as in `--set`; applied to `settings`.
    """
    if not models:
        raise SettingsError(
            "models: empty; give at least one, such as {champion: models:/demo@champion}"
        )
    typed = read_settings(settings, overrides, check_servers=False)
    return execute_pipeline(_select_comparison_stages(typed, models), models=models)


def run_stage(
    settings: PipelineSettings,
    name: str,
    *,
    model: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
    allow_drift: bool = False,
) -> PipelineResult:
    """Run one stage; its inputs come from finished runs, or the earlier stages run first.

    Args:
        name: a stage of the config.
        model: start from this folder, hub name or registered model instead of an earlier stage's model.
        fresh: rerun this stage even if finished; earlier stages are not rerun.
        allow_drift: resume the stage although its settings, data or code changed since its checkpoint.
    """
    shortened = select_settings_up_to(settings, name, model)
    return run_pipeline(shortened, fresh=fresh, only=name, quiet=quiet, allow_drift=allow_drift)


def evaluate_model(
    settings: PipelineSettings, model: str, *, name: str = "base", quiet: bool = False
) -> PipelineResult:
    """Evaluate one model on the config's held-out episodes.

    Args:
        model: folder, hub name or registered model.
        name: the model's name in results and files.
    """
    return evaluate_models(settings, {name: model}, quiet=quiet)


def evaluate_models(
    settings: PipelineSettings, models: dict[str, str], *, quiet: bool = False
) -> PipelineResult:
    """Evaluate several models on the config's held-out episodes, and its suites if it has any.

    Args:
        models: name -> folder, hub name or registered model.
    """
    stages = StagesSettings(
        prepare_data=settings.stages.prepare_data,
        evaluate=resolve_evaluation_settings(settings),
        suites=settings.stages.suites,
    )
    start = dataclasses.replace(settings.model, path=next(iter(models.values())))
    return run_pipeline(
        dataclasses.replace(settings, model=start, stages=stages), models=models, quiet=quiet
    )


def run_suites(
    settings: PipelineSettings, model: str, *, name: str = "base", quiet: bool = False
) -> PipelineResult:
    """Run the config's suites alone on one model.

    Args:
        model: folder, hub name or registered model.
        name: the model's name in results and files.
    """
    start = dataclasses.replace(settings.model, path=model)
    stages = StagesSettings(suites=settings.stages.suites)
    only_suites = dataclasses.replace(settings, model=start, stages=stages)
    return run_pipeline(only_suites, models={name: model}, quiet=quiet)


def analyze_models(
    settings: PipelineSettings, models: dict[str, str], *, quiet: bool = False
) -> PipelineResult:
    """Evaluate several models on the config's held-out episodes and compare the first with all others.

    Args:
        models: name -> folder, or hub name.
    """
    return run_pipeline(_select_comparison_stages(settings, models), models=models, quiet=quiet)


def _select_comparison_stages(
    settings: PipelineSettings, models: dict[str, str]
) -> PipelineSettings:
    """Return pipeline settings with only evaluation and analysis."""
    stages = StagesSettings(
        prepare_data=settings.stages.prepare_data,
        evaluate=resolve_evaluation_settings(settings),
        analyze=settings.stages.analyze or AnalysisSettings(),
    )
    start = dataclasses.replace(settings.model, path=next(iter(models.values())))
    return dataclasses.replace(settings, model=start, stages=stages)
