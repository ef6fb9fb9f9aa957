"""The pipeline as a DAG, from data to promotion: see tasks/stage_registry.py for the stages and their order.

Stages missing from the config are skipped; later stages start from the last one before them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.main_settings import MainForm
from flows.parameters import PipelineForm, passed_on, pipeline_name, read_settings, told_changes
from flows.runtime import outlived, stopping
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.dag_figure import draw_pipeline
from flows.runtime.embedded_server import embedded_address, other_address, start_embedded_server
from flows.runtime.pipeline_result import PipelineResult
from flows.runtime.prefect_home import PREFECT_PORT, prefect_defaults
from flows.runtime.progress import Display
from flows.runtime.quick_imports import freeze_imports, without_collection
from flows.runtime.repair import crash_flow_runs
from flows.runtime.stopped_state import name_stopped
from flows.runtime.summary import describe, headline, parent_metrics, result_rows
from flows.runtime.time_left import TimeLeft, earlier_seconds
from rl_core.errors import PosttrainError
from rl_core.storage.faults import fault
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings
from tasks.config.data_checks import refuse_bad_rows
from tasks.lifecycle.approval import DECISIONS
from tasks.own_commands import own_command
from tasks.pipeline.dag import run_dag
from tasks.pipeline.drift import check_unfinished, finished_now
from tasks.pipeline.prefect_artifacts import figure, publish_page
from tasks.pipeline.prefect_task import stage_task
from tasks.pipeline.result import STAGE_LOG
from tasks.pipeline.run import PipelineRun, ProgressCallback, import_libraries
from tasks.pipeline.run_options import FlowRunAddress, OnDrift, RunOptions
from tasks.tracking.served_pages import served_page
from tasks.tracking.store import without_password

__all__ = [
    "PipelineResult",
    "display_progress",
    "execute",
    "flow_run_url",
    "post_training",
    "run_pipeline",
    "say",
    "watched",
]

logger = logging.getLogger(__name__)

# Prefect stores a flow's parameters; the progress display exists only in this process.
_display: contextvars.ContextVar[Display | None] = contextvars.ContextVar("display", default=None)
_started: contextvars.ContextVar[str] = contextvars.ContextVar("started", default="")  # of the run to go on with
_restart: contextvars.ContextVar[bool] = contextvars.ContextVar("restart", default=False)  # its unfinished stage


def _run_name() -> str:
    """Flow run name: the pipeline, and the stage if only one was requested."""
    parameters = flow_run.parameters
    only, overrides = parameters.get("only"), told_changes(parameters)
    given = f"evaluate {', '.join(parameters['models'])}" if parameters.get("models") else ""
    name = pipeline_name(parameters["settings"])
    return " · ".join(filter(None, (name, (only or "").replace("_", " "), given, overrides)))


def flow_run_url() -> str:
    """URL of the flow run's page; for the embedded server, the one served by `posttrain ui`."""
    url = str(flow_run.ui_url or "")
    if url.startswith("http") and "PREFECT_API_URL" in os.environ:
        return url
    home = Path(os.environ.get("PREFECT_HOME", "prefect"))  # of the output folder, where `posttrain ui` looks, too
    served = served_page(home.parent, "prefect") or f"http://127.0.0.1:{PREFECT_PORT}"
    return f"{served}/runs/flow-run/{flow_run.id}"


@flow(
    name="post-training",
    flow_run_name=_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
    on_failure=[name_stopped],
    on_crashed=[name_stopped],
)
def post_training(
    settings: PipelineForm | str,
    main: MainForm | None = None,
    fresh: bool = False,
    only: str | None = None,
    models: dict[str, str] | None = None,
    overrides: list[str] | None = None,
    allow_drift: bool = False,
) -> PipelineResult:
    """Run the pipeline described by `settings`.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        main: the settings that are changed most; what is not as declared is applied to `settings`.
        fresh: rerun finished stages.
        only: the stage that `fresh` applies to; None = all.
        models: name -> folder or hub name, evaluated and compared in place of the trained models.
        overrides: key.path=value each, as in `--set`; applied to `settings`.
        allow_drift: resume an unfinished stage although its settings, data or code changed.
    """
    typed = read_settings(settings, overrides, main)
    on_drift: OnDrift = "resume" if allow_drift else "refuse"

    def run_once() -> PipelineResult:
        return execute(typed, fresh=fresh, only=only, models=models, on_drift=on_drift, restart=_restart.get())

    with outlived.noted() as outcome:
        outcome.result = run_with_approval(typed, run_once, say)
    return outcome.result


def say(text: str) -> None:
    """Print a message to the terminal display, else to the log."""
    display = _display.get()
    if display is not None:
        display.announce(text)
    else:
        logger.info(text)


def display_progress() -> ProgressCallback | None:
    """The terminal display of a flow that was called in this process; None = there is none."""
    return _display.get()


def execute(
    typed: PipelineSettings,
    *,
    fresh: bool = False,
    only: str | None = None,
    models: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    lock: FolderLock | None = None,
    on_drift: OnDrift = "refuse",
    restart: bool = False,
    started: str = "",
) -> PipelineResult:
    """One pass over the stages within a flow run; called by every training flow through `run_with_approval`.

    Args:
        fresh, only, models: see `post_training`. tags, on_drift, restart, started, lock: see `RunOptions` and
            `PipelineRun`.
    """
    refuse_bad_rows(typed)
    fault("flow.begun")
    with (
        PipelineRun(
            typed,
            RunOptions(
                fresh=fresh,
                only=only,
                on_drift="anew" if restart else on_drift,
                restart=restart,
                given=models or {},
                started=started or _started.get(),
                tags=tags or {},
                flow_run=FlowRunAddress(
                    id=str(flow_run.id or ""),
                    url=flow_run_url(),
                    api=without_password(other_address()),
                ),
            ),
            lock=lock,
            on_progress=_display.get(),
            stop=stopping.asked,
        ) as pipeline_run,
        stopping.last_words(pipeline_run.abandon),
    ):
        crash_flow_runs(run.flow_run_id for run in pipeline_run.dead_runs)
        if pipeline_run.threads_note:
            say(pipeline_run.threads_note)
        run_dag(pipeline_run, models or {}, stage_task)
        fault("flow.staged")
        rows = result_rows(pipeline_run)
        page = _report(pipeline_run, rows)
        artifact = publish_page(f"{typed.name}-result", page, headline(rows))
    fault("flow.closed")
    return PipelineResult(
        results=dict(pipeline_run.results),
        rows=rows,
        run_url=pipeline_run.tracking.run_url(pipeline_run.parent.run_id or ""),
        page=page,
        artifact=artifact,
        seconds=pipeline_run.seconds,
        facts=_facts(pipeline_run),
        ok=not pipeline_run.postponed,
        waiting=pipeline_run.approval,
    )


def _report(pipeline_run: PipelineRun, rows: list[dict[str, Any]]) -> str:
    """Metrics, description and picture of the run on its own page; returns the text of Prefect's page."""
    parent = pipeline_run.parent
    parent.log_metrics(parent_metrics(pipeline_run), 0)
    description = describe(pipeline_run, rows)
    parent.set_description(description)
    parent.set_tag("result", headline(rows))
    if decision := _decision(pipeline_run):
        parent.set_tag("gate.decision", decision)  # a column of MLflow's table of runs
    fault("flow.described")
    title = f"{pipeline_run.settings.name}: {pipeline_run.seconds:.0f} s"
    picture = draw_pipeline(rows, pipeline_run.home / "pipeline.png", title)
    fault("flow.drawn")
    parent.log_artifact(picture, "figures")
    run_url = pipeline_run.tracking.run_url(parent.run_id or "")
    link = f"[MLflow run]({run_url})\n\n" if run_url else ""
    return f"# {parent.name}\n\n{link}{description}\n\n{figure(picture, 'stages of the run')}"


def _decision(pipeline_run: PipelineRun) -> str:
    """The gate's decision in a word or two; "" where the run has no gate.

    That of an approval which was settled before, as by the clock while the run was dead, is in the words of its answer.
    """
    if pipeline_run.postponed:
        return "postponed"
    promote = pipeline_run.results.get("promote")
    if promote is None:
        return ""
    return DECISIONS.get(str(promote.summary.get("approval", ""))) or str(promote.summary.get("decision", ""))


def _facts(pipeline_run: PipelineRun) -> dict[str, Any]:
    """Places of a finished run, its cost of tracking, and what is left to be done."""
    cost = pipeline_run.tracking.cost
    facts: dict[str, Any] = {
        "output": str(pipeline_run.home),
        "logs": str(pipeline_run.stages_folder / "*" / "*" / STAGE_LOG),
        "runs_url": pipeline_run.tracking.runs_url(),
        "pages": own_command("ui", pipeline_run.output),
        "tracking_seconds": cost.foreground_seconds,
        "tracking_background_seconds": cost.background_seconds,
    }
    if pipeline_run.undelivered.total:
        sync = own_command("sync", pipeline_run.output)
        facts["undelivered"] = f"{pipeline_run.undelivered}; `{sync}` or the next run delivers them"
    if pipeline_run.postponed:
        facts |= {"decision": "postponed", "note": pipeline_run.postponed}
    return facts


def run_pipeline(
    settings: PipelineSettings,
    *,
    fresh: bool = False,
    only: str | None = None,
    models: dict[str, str] | None = None,
    quiet: bool = False,
    started: str = "",
    allow_drift: bool = False,
    restart: bool = False,
    changed: Sequence[str] = (),
) -> PipelineResult:
    """Run the flow in this process, with live progress. Arguments: see `post_training`.

    Args:
        changed: overrides that are in the settings already, for the flow run's name.
        started: start time of the run of this pipeline to resume.
        restart: begin its unfinished stage anew.
    Raises: errors of the stages; ResumeRefused; Stopped if interrupted, with the state saved.
    """
    on_drift: OnDrift = "anew" if restart else "resume" if allow_drift else "refuse"
    stages_folder = Path(settings.output).resolve() / settings.name / "stages"  # refused before anything is started
    check_unfinished(stages_folder, settings, RunOptions(fresh=fresh, only=only, on_drift=on_drift))
    token = _restart.set(restart)
    try:
        time_left = TimeLeft(settings.stages.active, earlier_seconds(stages_folder, settings.stages.active))
        computes = fresh or not _is_finished(stages_folder, settings)
        with (
            watched(settings, quiet=quiet, started=started, time_left=time_left, computes=computes),
            passed_on(settings, changed) as stored,
        ):
            result: PipelineResult = outlived.run(
                lambda: post_training(stored, fresh=fresh, only=only, models=models, allow_drift=allow_drift)
            )
    finally:
        _restart.reset(token)
    return result


def _is_finished(stages_folder: Path, settings: PipelineSettings) -> bool:
    """True = every stage will be taken as it is; False where that cannot be told, which the run then says."""
    try:
        return finished_now(stages_folder, settings) == list(settings.stages.active)
    except (PosttrainError, OSError):
        return False


@contextlib.contextmanager
def watched(
    settings: PipelineSettings,
    *,
    quiet: bool = False,
    started: str = "",
    time_left: TimeLeft | None = None,
    computes: bool = False,
) -> Iterator[None]:
    """Context in which a flow called directly runs in this process, with live progress.

    started: start time of the run of its pipeline to resume. time_left: of its stages, for the display.
    computes: a stage will compute here, so its libraries are imported while Prefect's server starts, as MLflow is.
    """
    with Display(quiet=quiet, time_left=time_left) as display:
        token, begun = _display.set(display), _started.set(started)
        try:
            with prefect_defaults():
                with display.waiting("starting"), without_collection():
                    start_embedded_server(functools.partial(import_libraries, settings, computes=computes))
                    freeze_imports()
                with embedded_address():
                    yield
        finally:
            _display.reset(token)
            _started.reset(begun)
