"""Pipeline as a DAG, from data to promotion: see tasks/stage_registry.py for the stages and their order.

Stages missing from the config are skipped; later stages start from the last one before them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow
from prefect.runtime import flow_run

from flows.parameters import (
    MainForm,
    PipelineForm,
    build_settings_parameter,
    describe_run_changes,
    extract_pipeline_name,
    read_settings,
)
from flows.runtime import prefect_outage, stopping
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.embedded_server import (
    read_external_address,
    start_embedded_server,
    use_embedded_address,
)
from flows.runtime.flow_run_states import mark_flow_run_stopped, mark_flow_runs_crashed
from flows.runtime.import_setup import freeze_imported_objects, pause_garbage_collection
from flows.runtime.pipeline_figure import draw_pipeline_figure
from flows.runtime.prefect_home import apply_prefect_defaults, exempt_loopback_in_calls
from flows.runtime.progress import ProgressDisplay, RemainingTimeEstimator, read_earlier_seconds
from flows.runtime.run_request import RunRequest, find_request
from flows.runtime.run_summary import (
    PipelineResult,
    build_result_rows,
    collect_parent_metrics,
    describe_run,
    format_headline,
)
from rl_core.errors import PosttrainError
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from tasks.command_hints import format_posttrain_command
from tasks.config import PipelineSettings, check_changed_settings
from tasks.config.machine_checks import refuse_bad_rows
from tasks.lifecycle.approval import DECISION_BY_STATE
from tasks.mlflow_environment import find_served_page, strip_uri_password
from tasks.pipeline.changed_conditions import check_unfinished_stages, list_finished_stages
from tasks.pipeline.dag import run_dag
from tasks.pipeline.pipeline_run import PipelineRun, import_libraries
from tasks.pipeline.prefect_stages import embed_figure, publish_page, wrap_stage_task
from tasks.pipeline.run_options import FlowRunAddress, OnDrift, RunOptions
from tasks.pipeline.stage_key import StageKeys
from tasks.pipeline.stage_result import STAGE_LOG
from tasks.tracking.run_ids import shorten_run_name

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def _build_run_name() -> str:
    """Build the flow run name: the pipeline, a single requested stage, evaluated models, overrides."""
    parameters = flow_run.parameters
    stage = (parameters.get("only") or "").replace("_", " ")
    overrides = describe_run_changes(parameters)
    evaluation = f"evaluate {', '.join(parameters['models'])}" if parameters.get("models") else ""
    name = extract_pipeline_name(parameters["settings"])
    return " · ".join(filter(None, (name, stage, evaluation, overrides)))


def build_flow_run_url() -> str:
    """Return the URL of the flow run's page; for the embedded server the page of `posttrain ui`, "" if none runs."""
    url = str(flow_run.ui_url or "")
    if url.startswith("http") and "PREFECT_API_URL" in os.environ:
        return url
    # In the output folder, where `posttrain ui` looks as well.
    home = Path(os.environ.get("PREFECT_HOME", "prefect"))
    served = find_served_page(home.parent, "prefect")
    return f"{served}/runs/flow-run/{flow_run.id}" if served else ""


@exempt_loopback_in_calls
@flow(
    name="post-training",
    flow_run_name=_build_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
    on_failure=[mark_flow_run_stopped],
    on_crashed=[mark_flow_run_stopped],
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
        main: the settings that are changed most; values that differ from the declared ones are applied to `settings`.
        fresh: rerun finished stages.
        only: the stage that `fresh` applies to; None = all.
        models: name -> folder or hub name, evaluated and compared instead of the trained models.
        overrides: key.path=value each, as in `--set`; applied to `settings`.
        allow_drift: resume an unfinished stage although its settings, data or code changed.
    """
    typed = read_settings(settings, overrides, main)
    on_drift: OnDrift = "resume" if allow_drift else "refuse"
    run_once = functools.partial(
        execute_pipeline,
        typed,
        fresh=fresh,
        only=only,
        models=models,
        on_drift=on_drift,
        restart=find_request().restart,
    )
    with prefect_outage.capture_outcome() as outcome:
        outcome.result = run_with_approval(typed, run_once, report_message)
    return outcome.result


def report_message(text: str) -> None:
    """Print a message to the terminal display, else to the log."""
    display = find_request().display
    if display is not None:
        display.print_announcement(text)
    else:
        logger.info(text)


def execute_pipeline(
    settings: PipelineSettings,
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
    """Run the stages once within a flow run. Every training flow calls it through `run_with_approval`.

    Args:
        fresh, only, models: see `post_training`.
        tags, on_drift, restart, started, lock: see `RunOptions` and `PipelineRun`.
    """
    refuse_bad_rows(settings)
    inject_fault("flow.begun")
    request = find_request()
    with (
        PipelineRun(
            settings,
            RunOptions(
                fresh=fresh,
                only=only,
                on_drift="anew" if restart else on_drift,
                restart=restart,
                evaluated_models=models or {},
                started=started or request.started,
                tags=tags or {},
                flow_run=FlowRunAddress(
                    id=str(flow_run.id or ""),
                    url=build_flow_run_url(),
                    api=strip_uri_password(read_external_address()),
                ),
            ),
            keys=request.keys,
            lock=lock,
            on_progress=request.display,
            stop=stopping.stop_requested,
        ) as pipeline_run,
        stopping.on_forced_exit(pipeline_run.abandon_run),
    ):
        mark_flow_runs_crashed(run.flow_run_id for run in pipeline_run.crashed_runs)
        if request.display is None or not request.display.is_quiet:
            short_id = shorten_run_name(pipeline_run.output, pipeline_run.parent.name)
            report_message(f"run      {short_id}")
        if pipeline_run.threads_note:
            report_message(pipeline_run.threads_note)
        run_dag(pipeline_run, models or {}, wrap_stage_task)
        inject_fault("flow.staged")
        rows = build_result_rows(pipeline_run)
        page = _report_results(pipeline_run, rows)
        artifact = publish_page(f"{settings.name}-result", page, format_headline(rows))
    inject_fault("flow.closed")
    return PipelineResult(
        results=dict(pipeline_run.results),
        rows=rows,
        run_url=pipeline_run.tracking.build_run_url(pipeline_run.parent.run_id or ""),
        page=page,
        artifact=artifact,
        seconds=pipeline_run.seconds,
        facts=_collect_facts(pipeline_run),
        ok=not pipeline_run.postponed_reason,
        waiting=pipeline_run.approval,
    )


def _report_results(pipeline_run: PipelineRun, rows: list[dict[str, Any]]) -> str:
    """Write metrics, description and figure to the run's page; return the text of Prefect's page."""
    parent = pipeline_run.parent
    parent.log_metrics(collect_parent_metrics(pipeline_run), 0)
    description = describe_run(pipeline_run, rows)
    parent.set_description(description)
    parent.set_tag("result", format_headline(rows))
    decision = _describe_decision(pipeline_run)
    if decision:
        parent.set_tag("gate.decision", decision)  # a column of MLflow's table of runs
    inject_fault("flow.described")
    title = f"{pipeline_run.settings.name}: {pipeline_run.seconds:.0f} s"
    picture = draw_pipeline_figure(rows, pipeline_run.home / "pipeline.png", title)
    inject_fault("flow.drawn")
    parent.log_artifact(picture, "figures")
    parts = (
        f"# {parent.name}",
        pipeline_run.tracking.format_run_reference(parent.run_id or ""),
        pipeline_run.tracking.store.resolve_links(description),
        embed_figure(picture, "stages of the run"),
    )
    return "\n\n".join(filter(None, parts))


def _describe_decision(pipeline_run: PipelineRun) -> str:
    """Describe the gate's decision in a word or two; "" if the run has no gate.

    If the approval was decided before, as by its deadline while the run was dead, the description is that of the
    answer.
    """
    if pipeline_run.postponed_reason:
        return "postponed"
    promote = pipeline_run.results.get("promote")
    if promote is None:
        return ""
    approval = DECISION_BY_STATE.get(str(promote.summary.get("approval", "")))
    return approval or str(promote.summary.get("decision", ""))


def _collect_facts(pipeline_run: PipelineRun) -> dict[str, Any]:
    """Collect the locations of a finished run, its tracking cost, and what is left to do."""
    cost = pipeline_run.tracking.cost
    facts: dict[str, Any] = {
        "id": shorten_run_name(pipeline_run.output, pipeline_run.parent.name),
        "output": str(pipeline_run.home),
        "logs": str(pipeline_run.stages_folder / "*" / "*" / STAGE_LOG),
        "runs_url": pipeline_run.tracking.build_runs_url(),
        "pages": format_posttrain_command("ui", pipeline_run.output),
        "pages_answer": pipeline_run.tracking.serves_pages,
        "tracking_seconds": cost.foreground_seconds,
        "tracking_background_seconds": cost.background_seconds,
    }
    if pipeline_run.undelivered.total:
        sync = format_posttrain_command("store sync", pipeline_run.output)
        facts["undelivered"] = f"{pipeline_run.undelivered}; `{sync}` or the next run delivers them"
    if pipeline_run.postponed_reason:
        facts |= {"decision": "postponed", "note": pipeline_run.postponed_reason}
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
    keys: StageKeys | None = None,
) -> PipelineResult:
    """Run the flow in this process, with live progress. Arguments: see `post_training`.

    Args:
        changed: overrides that the settings already contain, for the flow run's name.
        started: start time of the run of this pipeline to resume.
        restart: restart its unfinished stage.
        keys: of the stages, as far as the caller has collected them from the same settings, which it has checked.
    Raises: errors of the stages; ResumeRefused; Stopped if interrupted, with the state saved.
    """
    if keys is None or keys.pipeline is not settings:
        settings = check_changed_settings(settings)
        keys = StageKeys(settings)
    on_drift: OnDrift = "anew" if restart else "resume" if allow_drift else "refuse"
    stages_folder = Path(settings.output).resolve() / settings.name / "stages"
    # Refuse drifted stages before anything is started.
    options = RunOptions(fresh=fresh, only=only, on_drift=on_drift)
    check_unfinished_stages(stages_folder, keys, options)
    stages = settings.stages.active
    time_left = RemainingTimeEstimator(stages, read_earlier_seconds(stages_folder, stages))
    try:
        is_cached = list_finished_stages(stages_folder, keys) == list(stages)
    except (PosttrainError, OSError):
        is_cached = False  # unknown; the run reports the error
    return run_local_flow(
        lambda stored: post_training(
            stored, fresh=fresh, only=only, models=models, allow_drift=allow_drift
        ),
        RunRequest(
            settings=settings, keys=keys, overrides=changed, started=started, restart=restart
        ),
        quiet=quiet,
        time_left=time_left,
        preload_libraries=fresh or not is_cached,
    )


def run_local_flow(
    flow_call: Callable[[dict[str, Any]], ResultT],
    request: RunRequest,
    *,
    quiet: bool = False,
    time_left: RemainingTimeEstimator | None = None,
    preload_libraries: bool = False,
) -> ResultT:
    """Call a flow in this process, with live progress, and return its result.

    Args:
        flow_call: calls the flow with the parameter that stands for the request's settings.
        request: with checked settings; the display is added.
        time_left: estimator with the pipeline's stages, for the display.
        preload_libraries: import the libraries of computing stages while Prefect's server starts, like MLflow.
    """
    settings = request.settings
    assert settings is not None
    with ProgressDisplay(quiet=quiet, time_left=time_left) as display, apply_prefect_defaults():
        with display.show_wait("starting"), pause_garbage_collection():
            start_embedded_server(
                functools.partial(import_libraries, settings, computes=preload_libraries)
            )
            freeze_imported_objects()
        with use_embedded_address():
            return prefect_outage.run_flow(
                lambda: flow_call(build_settings_parameter(settings)),
                dataclasses.replace(request, display=display),
            )
