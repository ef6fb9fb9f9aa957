"""One Prefect task for every stage: run name, retries of transient errors, timeout, progress and result artifacts."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.settings import get_current_settings
from prefect.task_engine import TaskRunTimeoutError

from rl_core.storage.faults import fault
from tasks.pipeline.gpu_slot import gpu_slot
from tasks.pipeline.plain_call import is_passing, retry_delays, timed_out
from tasks.pipeline.result import REVIEW, StageResult
from tasks.pipeline.run import PipelineRun

__all__ = ["is_transient", "publish_result", "stage_task"]

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 3.0  # between updates of the progress artifact; each is a call of the Prefect API


def is_transient(error: BaseException) -> bool:
    """True = a retry may help: a backend or a connection failed; not settings, data, a stop or the stage's limit."""
    if isinstance(error, TaskRunTimeoutError):  # a TimeoutError too, but the user set how long the stage may take
        return False
    return is_passing(error)


def _retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    try:
        state.result()
    except BaseException as error:
        return is_transient(error)
    return False


def stage_task(name: str, stage: Callable[..., StageResult], pipeline_run: PipelineRun) -> Callable[..., StageResult]:
    """A Prefect task over one stage's function, with the pipeline's retries and timeout.

    The stage's own manifest decides what is run again (tasks/pipeline/stage.py); Prefect's result cache is off. Calling
    it raises StageTimeout past the stage's limit, and else what the stage raised at its last try.
    """
    run = pipeline_run.settings.run
    limit = run.timeout(name)
    label = name.replace("_", " ")

    @task(
        name=name,
        task_run_name=label,
        description=(stage.__doc__ or "").split("\n")[0],
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=run.retries,
        retry_delay_seconds=retry_delays(run),
        retry_condition_fn=_retry,
        timeout_seconds=limit,
    )
    def call(*arguments: Any, **named: Any) -> StageResult:
        with _progress_artifact(pipeline_run, name):
            result = stage(pipeline_run, *arguments, **named)
        fault("task.ended")
        _publish(pipeline_run, result)
        fault("task.published")
        return result

    def start(*arguments: Any, **named: Any) -> StageResult:
        try:
            with gpu_slot(name):  # outside of the stage's time limit: waiting is not its fault
                result: StageResult = call(*arguments, **named)
        except TaskRunTimeoutError as error:
            raise timed_out(run, name) from error
        pipeline_run.add_result(name, result)
        return result

    return start


@contextlib.contextmanager
def _progress_artifact(pipeline_run: PipelineRun, name: str) -> Iterator[None]:
    """Keep a progress artifact up to date from a thread, so that the Prefect API never delays a step."""
    ended = threading.Event()
    made = _quietly(create_progress_artifact, progress=0.0, key=_key(pipeline_run, name, "progress"))
    artifact = made if isinstance(made, UUID) else None
    report = contextvars.copy_context().run  # Prefect's settings, among them the password of the server
    thread = threading.Thread(target=report, args=(_report_progress, pipeline_run, artifact, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=10)
        if artifact is not None:
            _quietly(update_progress_artifact, artifact_id=artifact, progress=100.0)


def _report_progress(pipeline_run: PipelineRun, artifact: UUID | None, ended: threading.Event) -> None:
    shown = 0.0
    while not ended.wait(PROGRESS_SECONDS):
        percent = round(100 * pipeline_run.fraction, 1)
        if percent != shown and artifact is not None:
            _quietly(update_progress_artifact, artifact_id=artifact, progress=percent)
            shown = percent


def _publish(pipeline_run: PipelineRun, result: StageResult) -> None:
    """One Markdown artifact of a finished stage: its result, its numbers, the link to its MLflow run."""
    url = pipeline_run.tracking.run_url(result.run_id) if result.run_id else ""
    how = "taken from an earlier run" if result.cached else f"ran in {result.seconds:.1f} s"
    note = str(result.summary.get("note", ""))
    lines = [
        f"## {result.stage.replace('_', ' ')}",
        f"**{note}**" if note else "",
        f"{how}; folder `{result.folder}`; key `{result.key}`",
    ]
    if result.summary.get("model_version"):
        lines.append(f"model `{result.summary['registered_model']}` version {result.summary['model_version']}")
    if url:
        lines.append(f"[MLflow run]({url})")
    page = result.path / REVIEW
    if result.stage == "promote" and page.is_file():
        lines.append(page.read_text())
    lines.append(_numbers(result))
    key = _key(pipeline_run, result.stage, "")
    _quietly(create_markdown_artifact, "\n\n".join(filter(None, lines)), key=key, description=note)


def _numbers(result: StageResult) -> str:
    """A stage's metrics as a Markdown table; "" where it has none."""
    metrics = dict(result.summary.get("metrics") or {})
    for name, row in (result.summary.get("models") or {}).items():
        metrics |= {f"{name}: {k}": v for k, v in row.items() if isinstance(v, int | float)}
    if not metrics:
        return ""
    rows = [f"| {name} | {float(value):.6g} |" for name, value in sorted(metrics.items())]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def publish_result(pipeline_run: PipelineRun, markdown: str, headline: str) -> None:
    """The artifact of the whole flow run: the table of its stages with links."""
    _quietly(create_markdown_artifact, markdown, key=_key(pipeline_run, "result", ""), description=headline)


def _key(pipeline_run: PipelineRun, name: str, suffix: str) -> str:
    """An artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9-]+", "-", f"{pipeline_run.settings.name}-{name}-{suffix}".lower()).strip("-")


def _quietly(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Artifacts are for people: a Prefect API that does not answer must not fail or delay a stage that has finished.

    Each call to one that is away takes many seconds; after the first, calls are left out until it answers again.
    """
    if _away.is_set() and not _api_answers():
        return None
    try:
        made = call(*arguments, **named)
    except Exception as error:
        if not _away.is_set():
            said = f"{type(error).__name__}: {error}"
            logger.warning("Prefect's API takes no artifact (%s); the run goes on without its pages", said)
        _away.set()
        return None
    _away.clear()
    return made


_away = threading.Event()  # the newest artifact was not taken


def _api_answers() -> bool:
    """True = Prefect's API takes connections; an embedded server that is gone does not come back."""
    url = urlsplit(get_current_settings().api.url or "")
    if not url.hostname:
        return False
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), 1.0).close()
    except OSError:
        return False
    return True
