"""The pipeline as a DAG, from data to promotion; stages and order: `tasks.config.settings.STAGES`.

Stages missing from the config are skipped; later stages start from the last one before them.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from flows.parameters import PipelineForm, pipeline_name, read_settings
from flows.runtime import stopping
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.dag_figure import draw_pipeline
from flows.runtime.pipeline_result import PipelineResult
from flows.runtime.prefect_home import PREFECT_PORT, prefect_defaults, start_embedded_server
from flows.runtime.progress import Display
from flows.runtime.repair import crash_flow_runs
from flows.runtime.summary import describe, headline, parent_metrics, result_rows
from rl_core.errors import SettingsError
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings, resolve
from tasks.pipeline.prefect_task import stage_task
from tasks.pipeline.result import StageResult
from tasks.pipeline.run import PipelineRun
from tasks.stages.analyze import analyze_trajectories
from tasks.stages.evaluate import evaluate_models
from tasks.stages.policy import optimise_policy
from tasks.stages.preference import optimise_preferences
from tasks.stages.prepare_data import prepare_data
from tasks.stages.promote import promote
from tasks.stages.reward_model import reward_model
from tasks.stages.sft import sft
from tasks.stages.thoughts import learn_thoughts
from tasks.tracking.store import without_password

__all__ = ["PipelineResult", "execute", "flow_run_url", "post_training", "run_pipeline", "say", "watched"]

logger = logging.getLogger(__name__)

# Prefect stores a flow's parameters; the progress display exists only in this process.
_display: contextvars.ContextVar[Display | None] = contextvars.ContextVar("display", default=None)
_started: contextvars.ContextVar[str] = contextvars.ContextVar("started", default="")  # of the run to go on with


def _run_name() -> str:
    """Flow run name: the pipeline, and the stage if only one was requested."""
    parameters = flow_run.parameters
    name, only = pipeline_name(parameters["settings"]), parameters.get("only")
    return f"{name} · {only.replace('_', ' ')}" if only else name


def flow_run_url() -> str:
    """URL of the flow run's page; for the embedded server, the one served by `posttrain ui`."""
    url = str(flow_run.ui_url or "")
    if url.startswith("http") and "PREFECT_API_URL" in os.environ:
        return url
    return f"http://127.0.0.1:{PREFECT_PORT}/runs/flow-run/{flow_run.id}"


@flow(
    name="post-training",
    flow_run_name=_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
)
def post_training(
    settings: PipelineForm | str,
    fresh: bool = False,
    only: str | None = None,
    models: dict[str, str] | None = None,
    overrides: list[str] | None = None,
) -> PipelineResult:
    """Run the pipeline described by `settings`.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        fresh: rerun finished stages.
        only: the stage that `fresh` applies to; None = all.
        models: name -> folder or hub name, evaluated and compared in place of the trained models.
        overrides: key.path=value each, as in `--set`; applied to `settings`.
    """
    typed = read_settings(settings, overrides)
    return run_with_approval(typed, lambda: execute(typed, fresh=fresh, only=only, models=models), say)


def say(text: str) -> None:
    """Print a message to the terminal display, else to the log."""
    display = _display.get()
    if display is not None:
        display.announce(text)
    else:
        logger.info(text)


def execute(
    typed: PipelineSettings,
    *,
    fresh: bool = False,
    only: str | None = None,
    models: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    lock: FolderLock | None = None,
) -> PipelineResult:
    """One pass over the stages within a flow run; called by every training flow through `run_with_approval`.

    Args:
        fresh, only, models: see `post_training`. tags, lock: see `PipelineRun`.
    """
    with PipelineRun(
        typed,
        fresh=fresh,
        only=only,
        flow_run_id=str(flow_run.id or ""),
        flow_run_url=flow_run_url(),
        prefect_api=without_password(get_current_settings().api.url or ""),
        given=models,
        started=_started.get(),
        tags=tags,
        lock=lock,
        on_progress=_display.get(),
        stop=stopping.asked,
    ) as pipeline_run:
        crash_flow_runs(run.flow_run_id for run in pipeline_run.gone)
        _run_stages(pipeline_run, models or {})
        rows = result_rows(pipeline_run)
        pipeline_run.parent.log_metrics(parent_metrics(pipeline_run), 0)
        pipeline_run.parent.set_description(describe(pipeline_run, rows))
        pipeline_run.parent.set_tag("result", headline(rows))
        picture = draw_pipeline(rows, pipeline_run.home / "pipeline.png", f"{typed.name}: {pipeline_run.seconds:.0f} s")
        pipeline_run.parent.log_artifact(picture, "figures")
    cost = pipeline_run.tracking.cost
    facts = {
        "output": str(pipeline_run.home),
        "runs_url": pipeline_run.tracking.runs_url(),
        "tracking_seconds": cost.foreground_seconds,
        "tracking_background_seconds": cost.background_seconds,
    }
    return PipelineResult(
        results=dict(pipeline_run.results),
        rows=rows,
        run_url=pipeline_run.tracking.run_url(pipeline_run.parent.run_id or ""),
        seconds=pipeline_run.seconds,
        facts=facts,
        waiting=pipeline_run.approval,
    )


def _run_stages(pipeline_run: PipelineRun, given: dict[str, str]) -> None:
    """The DAG; stages pass paths to each other."""
    stages = pipeline_run.settings.stages
    base = pipeline_run.resolve_base_model()
    data: StageResult | None = None
    if stages.prepare_data is not None or base is None:
        data = stage_task("prepare_data", prepare_data, pipeline_run)(base)
    model: StageResult | Path | str
    if base is not None:
        model = base
    else:
        assert data is not None
        model = data.model
    models: dict[str, StageResult | Path | str] = {}
    reward: StageResult | None = None
    if stages.sft is not None:
        if data is None:
            raise SettingsError("stages.sft needs stages.prepare_data, which generates or reads the demonstrations")
        models["sft"] = result = stage_task("sft", sft, pipeline_run)(model, data)
        model = result.model
    if stages.preference is not None:
        models["preference"] = result = stage_task("preference", optimise_preferences, pipeline_run)(model, data)
        model = result.model
    if stages.reward_model is not None:
        reward = stage_task("reward_model", reward_model, pipeline_run)(model, data)
    if stages.policy is not None:
        models["policy"] = result = stage_task("policy", optimise_policy, pipeline_run)(model, data, reward)
        model = result.model
    if stages.thoughts is not None:
        models["thoughts"] = result = stage_task("thoughts", learn_thoughts, pipeline_run)(model, data)
        model = result.model
    if stages.evaluate is None:
        return
    trained = {name: pipeline_run.results[name] for name in models}  # in the order of the pipeline
    played = (
        {name: pipeline_run.resolve_model(source)[0] for name, source in given.items()} or models or {"base": model}
    )
    evaluation = stage_task("evaluate", evaluate_models, pipeline_run)(played, data)
    if stages.analyze is not None:
        stage_task("analyze", analyze_trajectories, pipeline_run)(evaluation, played, data, reward)
    if stages.promote is not None and trained:
        challenger = list(trained.values())[-1]
        stage_task("promote", promote, pipeline_run)(evaluation, challenger.stage, challenger, data)


def run_pipeline(
    settings: PipelineSettings,
    *,
    fresh: bool = False,
    only: str | None = None,
    models: dict[str, str] | None = None,
    quiet: bool = False,
    started: str = "",
) -> PipelineResult:
    """Run the flow in this process, with live progress. Arguments: see `post_training`.

    Args:
        started: start time of the run of this pipeline to resume.
    Raises: errors of the stages; Stopped if interrupted, with the state saved.
    """
    with watched(quiet=quiet, started=started):
        result: PipelineResult = post_training(resolve(settings), fresh, only, models)
    return result


@contextlib.contextmanager
def watched(*, quiet: bool = False, started: str = "") -> Iterator[None]:
    """Context in which a flow called directly runs in this process, with live progress.

    started: start time of the run of its pipeline to resume.
    """
    with Display(quiet=quiet) as display:
        token, begun = _display.set(display), _started.set(started)
        try:
            with prefect_defaults():
                with display.waiting("Prefect's server starts"):
                    start_embedded_server()
                yield
        finally:
            _display.reset(token)
            _started.reset(begun)
