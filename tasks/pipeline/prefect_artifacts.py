"""Prefect artifacts of a flow run: one page that tells its result, and one a stage that tells how far it is.

Artifacts are for people: a Prefect API that does not answer neither fails nor delays what they are about.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.settings import get_current_settings

from tasks.pipeline.prefect_api import LATER_PATIENCE, PATIENCE, check_api
from tasks.pipeline.result import REVIEW, StageResult
from tasks.pipeline.run import PipelineRun
from tasks.tracking import result_text

__all__ = ["figure", "publish_page", "stage_artifact"]

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 3.0  # between updates of a stage's page; each is a call of the Prefect API
LAST_CALL_SECONDS = 1.0  # for an update under way when a stage was stopped, which has few seconds
MAX_DESCRIPTION = 250
MAX_FIGURE_BYTES = 300_000  # a page with a larger picture would be slow to list


@contextlib.contextmanager
def stage_artifact(pipeline_run: PipelineRun, name: str) -> Iterator[Callable[[StageResult], None]]:
    """The page of a stage: its progress, kept up to date from a thread so that the API never delays a step.

    Gives: a function that puts the stage's result on the page.
    """
    ended = threading.Event()
    title = name.replace("_", " ")
    identity = publish_page(f"{pipeline_run.settings.name}-{name}", f"## {title}\n\nbegins", f"{title}: begins")
    report = contextvars.copy_context().run  # Prefect's settings, among them the password of the server
    thread = threading.Thread(target=report, args=(_report_progress, pipeline_run, title, identity, ended), daemon=True)
    thread.start()

    def finish(result: StageResult) -> None:
        ended.set()
        thread.join(timeout=10)
        note = str(result.summary.get("note", ""))
        publish_page(f"{pipeline_run.settings.name}-{name}", _page(pipeline_run, result), note, before=identity)

    try:
        yield finish
    finally:
        ended.set()
        thread.join(
            timeout=LAST_CALL_SECONDS
        )  # `finish` has waited; a stage that was stopped or failed waits no longer


def _report_progress(pipeline_run: PipelineRun, title: str, identity: str, ended: threading.Event) -> None:
    shown = ""
    while not ended.wait(PROGRESS_SECONDS):
        told = f"{pipeline_run.fraction:.0%} · {pipeline_run.progress}"
        if told != shown and identity:
            publish_page("", f"## {title}\n\n{told}", told, before=identity)
            shown = told


def _page(pipeline_run: PipelineRun, result: StageResult) -> str:
    """Markdown of a finished stage: its result, its numbers, the link to its MLflow run."""
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
    return "\n\n".join(filter(None, lines))


def _numbers(result: StageResult) -> str:
    """A stage's metrics as a Markdown table; "" where it has none."""
    metrics = dict(result.summary.get("metrics") or {})
    for name, row in (result.summary.get("models") or {}).items():
        metrics |= {f"{name}: {k}": v for k, v in row.items() if isinstance(v, int | float)}
    if not metrics:
        return ""
    rows = [f"| {name} | {float(value):.6g} |" for name, value in sorted(metrics.items())]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def figure(path: Path, label: str) -> str:
    """A PNG as Markdown that holds it; "" where it is missing or large."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return (
        f"![{label}](data:image/png;base64,{base64.b64encode(data).decode()})" if len(data) < MAX_FIGURE_BYTES else ""
    )


def publish_page(key: str, markdown: str, description: str, *, before: str = "") -> str:
    """Write a page, or replace the one with the id `before`; returns its id, "" where it could not be written.

    Args:
        key: name of a new page; what is no lower-case letter or digit becomes a dash.
    """
    told = result_text(description, MAX_DESCRIPTION)
    if before:
        return before if _quietly(_replace, UUID(before), markdown, told) else ""
    name = re.sub(r"[^a-z0-9-]+", "-", key.lower()).strip("-")
    made = _quietly(create_markdown_artifact, markdown, key=name, description=told)
    return str(made) if isinstance(made, UUID) else ""


def _replace(identity: UUID, markdown: str, description: str) -> bool:
    with get_client(sync_client=True) as client:
        client.update_artifact(identity, ArtifactUpdate(data=markdown, description=description))
    return True


def _quietly(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The call's result, None where Prefect's API does not answer.

    A call to an API that is away takes many seconds, and minutes where it takes connections and is silent: so it is
    asked for a sign of life before, with patience once. A server that Prefect started itself does not come back.
    """
    if _away.is_set() and not get_current_settings().api.url:
        return None
    try:
        check_api(LATER_PATIENCE if _away.is_set() else PATIENCE)
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
