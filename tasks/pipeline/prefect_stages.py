"""One Prefect task per stage: run name, retries of transient errors, timeout, artifact pages and a GPU slot.

A flow run has one artifact page with its result and one per stage with its progress. Pages are for people: a Prefect
API that does not answer neither fails nor delays the work. Its health is checked before calls that would otherwise
block for minutes.
While a stage computes on GPUs it holds a slot of the global concurrency limit `gpu`, shared with other runs.
The arrows in Prefect's graph come from the stages whose outputs a stage receives, without those that are reached
through another of them.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect import Task, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.settings import get_current_settings
from prefect.task_engine import TaskRunTimeoutError

from rl_core.storage.faults import inject_fault
from tasks.pipeline.dag import build_timeout_error, compute_retry_delays, is_transient_error
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage_result import REVIEW_FILE, StageResult
from tasks.stage_registry import find_stage
from tasks.tracking import shorten_result

logger = logging.getLogger(__name__)

FIRST_TIMEOUT_SECONDS = 20.0
REPEAT_TIMEOUT_SECONDS = 1.0  # once the API has failed to answer
PROGRESS_SECONDS = 3.0  # between updates of a stage's page; each is a call of the Prefect API
LOG_SECONDS = 30.0  # between lines of a stage's progress in its log, at least
LOG_SHARE = 0.05  # of the stage's time so far, at least: a night's log stays readable
LAST_UPDATE_TIMEOUT_SECONDS = (
    1.0  # for an update in flight when a stage is stopped and has few seconds left
)
MAX_DESCRIPTION = 250
MAX_FIGURE_BYTES = 300_000  # a page with a larger picture would be slow to list
GPU_LIMIT_VARIABLE = (
    "POSTTRAIN_GPU_LIMIT"  # name of the limit; set by `posttrain up`, whose server has it
)
GPU_LEASE_SECONDS = 60.0  # after which the slot of a killed run is free again

_api_unreachable = threading.Event()  # set while the newest artifact could not be written


def check_prefect_api(timeout_s: float) -> None:
    """Check the health of Prefect's API; any answer will do.

    An API without an address belongs to a server that Prefect starts itself, and is not checked.

    Raises: OSError if it accepts no connection, TimeoutError if it does not answer, within `timeout_s` seconds each.
    """
    settings = get_current_settings()
    url = urlsplit(settings.api.url or "")
    if not url.hostname:
        return
    port = url.port or (443 if url.scheme == "https" else 80)
    socket.create_connection((url.hostname, port), timeout_s).close()
    # Certificates are loaded only for https: loading takes longer than the rest of the call.
    verify = url.scheme == "https" and not settings.api.tls_insecure_skip_verify
    try:
        httpx.get(f"{settings.api.url}/health", timeout=timeout_s, verify=verify)
    except httpx.TimeoutException:
        raise TimeoutError(
            f"it accepts connections, but did not answer for {timeout_s:g} s"
        ) from None
    except httpx.HTTPError:
        return  # the actual call will report what is wrong


@contextlib.contextmanager
def publish_stage_progress(
    pipeline_run: PipelineRun, name: str
) -> Iterator[Callable[[StageResult], None]]:
    """Publish the page of a stage and keep its progress up to date from a thread, so that the API never delays a step.

    The log of the task run has the progress as well, less often, and the stage's result.
    Yields: a function that puts the stage's result on the page.
    """
    ended = threading.Event()
    title = name.replace("_", " ")
    artifact_id = publish_page(
        f"{pipeline_run.settings.name}-{name}", f"## {title}\n\nstarting", f"{title}: starting"
    )
    # The context holds Prefect's settings, among them the server's password.
    run_in_context = contextvars.copy_context().run
    thread = threading.Thread(
        target=run_in_context,
        args=(_report_progress, pipeline_run, title, artifact_id, ended),
        daemon=True,
    )
    thread.start()

    def finish(result: StageResult) -> None:
        ended.set()
        thread.join(timeout=10)
        note = str(result.summary.get("note", ""))
        if note:
            logger.info("%s: %s", title, note)
        publish_page(
            f"{pipeline_run.settings.name}-{name}",
            _render_stage_page(pipeline_run, result),
            note,
            artifact_id=artifact_id,
        )

    try:
        yield finish
    finally:
        ended.set()
        # `finish` has waited already; a stage that was stopped or failed does not wait long
        thread.join(timeout=LAST_UPDATE_TIMEOUT_SECONDS)


def _report_progress(
    pipeline_run: PipelineRun, title: str, artifact_id: str, ended: threading.Event
) -> None:
    shown = ""
    started = time.monotonic()
    next_log = started
    while not ended.wait(PROGRESS_SECONDS):
        text = f"{pipeline_run.fraction:.0%} · {pipeline_run.progress}"
        if text != shown and (now := time.monotonic()) >= next_log:
            logger.info("%s", text)
            next_log = now + max(LOG_SECONDS, LOG_SHARE * (now - started))
        if text != shown and artifact_id:
            publish_page("", f"## {title}\n\n{text}", text, artifact_id=artifact_id)
            shown = text


def _render_stage_page(pipeline_run: PipelineRun, result: StageResult) -> str:
    """Render a finished stage as Markdown: its result, its numbers, the link to its MLflow run."""
    origin = "taken from an earlier run" if result.cached else f"ran in {result.seconds:.1f} s"
    note = str(result.summary.get("note", ""))
    lines = [
        f"## {result.stage.replace('_', ' ')}",
        f"**{note}**" if note else "",
        f"{origin}; folder `{result.folder}`; key `{result.key}`",
    ]
    if result.summary.get("model_version"):
        lines.append(
            f"model `{result.summary['registered_model']}` version {result.summary['model_version']}"
        )
    lines.append(pipeline_run.tracking.format_run_reference(result.run_id))
    page = result.path / REVIEW_FILE
    if result.stage == "promote" and page.is_file():
        lines.append(page.read_text())
    lines.append(_render_metrics_table(result))
    return "\n\n".join(filter(None, lines))


def _render_metrics_table(result: StageResult) -> str:
    """Render a stage's metrics as a Markdown table; "" if it has none."""
    metrics = dict(result.summary.get("metrics") or {})
    for name, row in (result.summary.get("models") or {}).items():
        metrics |= {f"{name}: {k}": v for k, v in row.items() if isinstance(v, int | float)}
    if not metrics:
        return ""
    rows = [f"| {name} | {float(value):.6g} |" for name, value in sorted(metrics.items())]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def embed_figure(path: Path, label: str) -> str:
    """Embed a PNG in Markdown; "" if the file is missing or too large."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    if len(data) >= MAX_FIGURE_BYTES:
        return ""
    return f"![{label}](data:image/png;base64,{base64.b64encode(data).decode()})"


def publish_page(key: str, markdown: str, description: str, *, artifact_id: str = "") -> str:
    """Publish a page, or replace the one with `artifact_id`. Return its ID; "" if it could not be written.

    Args:
        key: name of a new page; characters other than lower-case letters and digits become dashes.
    """
    summary = shorten_result(description, MAX_DESCRIPTION)
    if artifact_id:
        replaced = _call_prefect_api(_replace_artifact, UUID(artifact_id), markdown, summary)
        return artifact_id if replaced else ""
    name = re.sub(r"[^a-z0-9-]+", "-", key.lower()).strip("-")
    new_id = _call_prefect_api(create_markdown_artifact, markdown, key=name, description=summary)
    return str(new_id) if isinstance(new_id, UUID) else ""


def _replace_artifact(artifact_id: UUID, markdown: str, description: str) -> bool:
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact_id, ArtifactUpdate(data=markdown, description=description))
    return True


def _call_prefect_api(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call Prefect's API and return the result; None if the API does not answer.

    A call to an API that is down takes many seconds, and minutes if it accepts connections without answering. So its
    health is checked first, with the long timeout only once. A server that Prefect started itself does not come back.
    """
    if _api_unreachable.is_set() and not get_current_settings().api.url:
        return None
    try:
        check_prefect_api(
            REPEAT_TIMEOUT_SECONDS if _api_unreachable.is_set() else FIRST_TIMEOUT_SECONDS
        )
        result = call(*arguments, **named)
    except Exception as error:
        if not _api_unreachable.is_set():
            reason = f"{type(error).__name__}: {error}"
            logger.warning(
                "Prefect's API does not accept artifacts (%s); the run continues without pages",
                reason,
            )
        _api_unreachable.set()
        return None
    _api_unreachable.clear()
    return result


@contextmanager
def hold_gpu_slot(stage: str) -> Iterator[None]:
    """Wait for a GPU slot and hold it within the block.

    Does nothing without GPUs, without `posttrain up`, or for a stage that uses no GPU.

    Args:
        stage: its name.
    """
    limit = os.environ.get(GPU_LIMIT_VARIABLE, "")
    if not limit or not find_stage(stage).uses_gpu or not _has_gpus():
        yield
        return
    # Not strict: a deleted limit, or a server that is down for a while, must not end a stage.
    with concurrency(limit, lease_duration=GPU_LEASE_SECONDS, strict=False):
        yield


def _has_gpus() -> bool:
    import torch  # imported here: it takes seconds that a run without the limit need not spend

    return torch.cuda.is_available()


def find_input_stages(arguments: Any, results: Mapping[str, StageResult]) -> tuple[str, ...]:
    """Find the stages whose result is among the arguments, or whose folder contains a path among them."""
    leaves = list(_iter_leaves(arguments))
    paths = [leaf for leaf in leaves if isinstance(leaf, Path)]
    return tuple(
        name
        for name, result in results.items()
        if any(leaf is result for leaf in leaves)
        or any(path.is_relative_to(result.path) for path in paths)
    )


def _iter_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_leaves(item)
    else:
        yield value


def find_direct_inputs(
    inputs: Iterable[str], input_stages: Mapping[str, Iterable[str]]
) -> list[str]:
    """Return the inputs that are not reached through another of them.

    Args:
        input_stages: the inputs of each finished stage.
    """
    names = list(inputs)
    return [
        name
        for name in names
        if not any(name in _collect_ancestors(other, input_stages) for other in names)
    ]


def _collect_ancestors(name: str, input_stages: Mapping[str, Iterable[str]]) -> set[str]:
    ancestors: set[str] = set()
    pending = list(input_stages.get(name, ()))
    while pending:
        stage = pending.pop()
        if stage not in ancestors:
            ancestors.add(stage)
            pending += input_stages.get(stage, ())
    return ancestors


def is_retryable_error(error: BaseException) -> bool:
    """Return whether a retry may help: a backend or connection failed, not settings, data, a stop or the time limit."""
    if isinstance(error, TaskRunTimeoutError):
        return False  # also a TimeoutError, but the user set this limit for the stage
    return is_transient_error(error)


def _should_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    try:
        state.result()
    except BaseException as error:
        return is_retryable_error(error)
    return False


def wrap_stage_task(
    name: str, stage: Callable[..., StageResult], pipeline_run: PipelineRun
) -> Callable[..., StageResult]:
    """Wrap one stage's function in a Prefect task with the pipeline's retries and timeout.

    The stage's manifest decides what runs again (tasks/pipeline/stage.py); Prefect's result cache is off. Calling the
    result raises StageTimeout past the stage's limit, otherwise what the stage raised at its last attempt.
    """
    run = pipeline_run.settings.run
    limit = run.find_timeout(name)
    label = name.replace("_", " ")

    def build_task(arguments: tuple[Any, ...], named: dict[str, Any]) -> Task[..., StageResult]:
        # Without parameters: Prefect would draw an arrow for each one, through the labels of those between.
        @task(
            name=name,
            task_run_name=label,
            description=(stage.__doc__ or "").split("\n")[0],
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=run.retries,
            retry_delay_seconds=compute_retry_delays(run),
            retry_condition_fn=_should_retry,
            timeout_seconds=limit,
        )
        def call() -> StageResult:
            with publish_stage_progress(pipeline_run, name) as finish:
                result = stage(pipeline_run, *arguments, **named)
                inject_fault("task.ended")
                finish(result)
            inject_fault("task.published")
            return result

        return call

    def start(*arguments: Any, **named: Any) -> StageResult:
        inputs = find_input_stages([arguments, named], pipeline_run.results)
        # Prefect tracks everything inside an object, such as digests of other stages; a key identifies one result.
        predecessor_keys = [
            pipeline_run.results[stage_name].key
            for stage_name in find_direct_inputs(inputs, pipeline_run.input_stages)
        ]
        try:
            with hold_gpu_slot(name):  # waiting for a slot does not count towards the time limit
                stage_task = build_task(arguments, named)
                result: StageResult = stage_task(wait_for=predecessor_keys)
        except TaskRunTimeoutError as error:
            raise build_timeout_error(run, name) from error
        pipeline_run.add_result(name, result, inputs)
        return result

    return start
