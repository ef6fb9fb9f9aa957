"""A sign of life of Prefect's API, before a call that would wait for minutes where it is silent.

Prefect artifacts of a flow run: one page that tells its result, and one a stage that tells how far it is.

Artifacts are for people: a Prefect API that does not answer neither fails nor delays what they are about.

A slot of the global concurrency limit `gpu`, held while a stage computes on GPUs beside other runs.

Stages whose outputs a stage is given, and of these the ones that no other of them was made from.

One Prefect task for every stage: run name, retries of transient errors, timeout, and its artifact.
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

FIRST_TIMEOUT_SECONDS, REPEAT_TIMEOUT_SECONDS = (
    20.0,
    1.0,
)  # seconds; the second is of an API that has been silent before


def check_prefect_api(timeout_s: float) -> None:
    """Ask for its health; any answer will do.

    An API without an address is that of a server which Prefect starts itself, and is not asked.

    Raises: OSError if it takes no connection, TimeoutError if it gives no answer, within `patience` seconds each.
    """
    settings = get_current_settings()
    url = urlsplit(settings.api.url or "")
    if not url.hostname:
        return
    socket.create_connection(
        (url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout_s
    ).close()
    # Certificates are read for an address that has them alone: reading takes longer than all the rest, at every call.
    verify = url.scheme == "https" and not settings.api.tls_insecure_skip_verify
    try:
        httpx.get(f"{settings.api.url}/health", timeout=timeout_s, verify=verify)
    except httpx.TimeoutException:
        raise TimeoutError(
            f"it takes connections, but gave no answer for {timeout_s:g} s"
        ) from None
    except httpx.HTTPError:
        return  # the call itself says what is wrong


logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 3.0  # between updates of a stage's page; each is a call of the Prefect API
LAST_UPDATE_TIMEOUT_SECONDS = (
    1.0  # for an update under way when a stage was stopped, which has few seconds
)
MAX_DESCRIPTION = 250
MAX_FIGURE_BYTES = 300_000  # a page with a larger picture would be slow to list


@contextlib.contextmanager
def publish_stage_progress(
    pipeline_run: PipelineRun, name: str
) -> Iterator[Callable[[StageResult], None]]:
    """The page of a stage: its progress, kept up to date from a thread so that the API never delays a step.

    Gives: a function that puts the stage's result on the page.
    """
    ended = threading.Event()
    title = name.replace("_", " ")
    identity = publish_page(
        f"{pipeline_run.settings.name}-{name}", f"## {title}\n\nbegins", f"{title}: begins"
    )
    report = (
        contextvars.copy_context().run
    )  # Prefect's settings, among them the password of the server
    thread = threading.Thread(
        target=report, args=(_report_progress, pipeline_run, title, identity, ended), daemon=True
    )
    thread.start()

    def finish(result: StageResult) -> None:
        ended.set()
        thread.join(timeout=10)
        note = str(result.summary.get("note", ""))
        publish_page(
            f"{pipeline_run.settings.name}-{name}",
            _render_stage_page(pipeline_run, result),
            note,
            artifact_id=identity,
        )

    try:
        yield finish
    finally:
        ended.set()
        thread.join(
            timeout=LAST_UPDATE_TIMEOUT_SECONDS
        )  # `finish` has waited; a stage that was stopped or failed waits no longer


def _report_progress(
    pipeline_run: PipelineRun, title: str, identity: str, ended: threading.Event
) -> None:
    shown = ""
    while not ended.wait(PROGRESS_SECONDS):
        told = f"{pipeline_run.fraction:.0%} · {pipeline_run.progress}"
        if told != shown and identity:
            publish_page("", f"## {title}\n\n{told}", told, artifact_id=identity)
            shown = told


def _render_stage_page(pipeline_run: PipelineRun, result: StageResult) -> str:
    """Markdown of a finished stage: its result, its numbers, the link to its MLflow run."""
    url = pipeline_run.tracking.build_run_url(result.run_id) if result.run_id else ""
    how = "taken from an earlier run" if result.cached else f"ran in {result.seconds:.1f} s"
    note = str(result.summary.get("note", ""))
    lines = [
        f"## {result.stage.replace('_', ' ')}",
        f"**{note}**" if note else "",
        f"{how}; folder `{result.folder}`; key `{result.key}`",
    ]
    if result.summary.get("model_version"):
        lines.append(
            f"model `{result.summary['registered_model']}` version {result.summary['model_version']}"
        )
    if url:
        lines.append(f"[MLflow run]({url})")
    page = result.path / REVIEW_FILE
    if result.stage == "promote" and page.is_file():
        lines.append(page.read_text())
    lines.append(_render_metrics_table(result))
    return "\n\n".join(filter(None, lines))


def _render_metrics_table(result: StageResult) -> str:
    """A stage's metrics as a Markdown table; "" where it has none."""
    metrics = dict(result.summary.get("metrics") or {})
    for name, row in (result.summary.get("models") or {}).items():
        metrics |= {f"{name}: {k}": v for k, v in row.items() if isinstance(v, int | float)}
    if not metrics:
        return ""
    rows = [f"| {name} | {float(value):.6g} |" for name, value in sorted(metrics.items())]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def embed_figure(path: Path, label: str) -> str:
    """A PNG as Markdown that holds it; "" where it is missing or large."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return (
        f"![{label}](data:image/png;base64,{base64.b64encode(data).decode()})"
        if len(data) < MAX_FIGURE_BYTES
        else ""
    )


def publish_page(key: str, markdown: str, description: str, *, artifact_id: str = "") -> str:
    """Write a page, or replace the one with the id `before`; returns its id, "" where it could not be written.

    Args:
        key: name of a new page; what is no lower-case letter or digit becomes a dash.
    """
    told = shorten_result(description, MAX_DESCRIPTION)
    if artifact_id:
        return (
            artifact_id
            if _call_prefect_api(_replace_artifact, UUID(artifact_id), markdown, told)
            else ""
        )
    name = re.sub(r"[^a-z0-9-]+", "-", key.lower()).strip("-")
    made = _call_prefect_api(create_markdown_artifact, markdown, key=name, description=told)
    return str(made) if isinstance(made, UUID) else ""


def _replace_artifact(identity: UUID, markdown: str, description: str) -> bool:
    with get_client(sync_client=True) as client:
        client.update_artifact(identity, ArtifactUpdate(data=markdown, description=description))
    return True


def _call_prefect_api(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The call's result, None where Prefect's API does not answer.

    A call to an API that is away takes many seconds, and minutes where it takes connections and is silent: so it is
    asked for a sign of life before, with patience once. A server that Prefect started itself does not come back.
    """
    if _api_unreachable.is_set() and not get_current_settings().api.url:
        return None
    try:
        check_prefect_api(
            REPEAT_TIMEOUT_SECONDS if _api_unreachable.is_set() else FIRST_TIMEOUT_SECONDS
        )
        made = call(*arguments, **named)
    except Exception as error:
        if not _api_unreachable.is_set():
            said = f"{type(error).__name__}: {error}"
            logger.warning(
                "Prefect's API takes no artifact (%s); the run goes on without its pages", said
            )
        _api_unreachable.set()
        return None
    _api_unreachable.clear()
    return made


_api_unreachable = threading.Event()  # the newest artifact was not taken


GPU_LIMIT_VARIABLE = (
    "POSTTRAIN_GPU_LIMIT"  # name of the limit; set by `posttrain up`, whose server has it
)
GPU_LEASE_SECONDS = 60.0  # after which the slot of a run that was killed is free again


@contextmanager
def hold_gpu_slot(stage: str) -> Iterator[None]:
    """Wait for a slot and hold it; nothing without GPUs, without `posttrain up`, or for a stage that needs none.

    Args:
        stage: its name.
    """
    limit = os.environ.get(GPU_LIMIT_VARIABLE, "")
    if not limit or not find_stage(stage).uses_gpu or not _has_gpus():
        yield
        return
    # Not strict: a limit that somebody deleted, or a server that is down for a while, must not end a stage.
    with concurrency(limit, lease_duration=GPU_LEASE_SECONDS, strict=False):
        yield


def _has_gpus() -> bool:
    import torch  # seconds, which a run without the limit need not spend here

    return torch.cuda.is_available()


def find_input_stages(arguments: Any, results: Mapping[str, StageResult]) -> tuple[str, ...]:
    """Names of the results that are among the arguments, or whose folder a path among them lies in."""
    found = list(_iter_leaves(arguments))
    paths = [leaf for leaf in found if isinstance(leaf, Path)]
    return tuple(
        name
        for name, result in results.items()
        if any(leaf is result for leaf in found)
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
    """Inputs that are not reached through another of them.

    Args:
        made_from: the inputs of each stage that has ended.
    """
    names = list(inputs)
    return [
        name
        for name in names
        if not any(name in _collect_ancestors(other, input_stages) for other in names)
    ]


def _collect_ancestors(name: str, input_stages: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(input_stages.get(name, ()))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += input_stages.get(one, ())
    return found


def is_retryable_error(error: BaseException) -> bool:
    """True = a retry may help: a backend or a connection failed; not settings, data, a stop or the stage's limit."""
    if isinstance(
        error, TaskRunTimeoutError
    ):  # a TimeoutError too, but the user set how long the stage may take
        return False
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
    """A Prefect task over one stage's function, with the pipeline's retries and timeout.

    The stage's own manifest decides what is run again (tasks/pipeline/stage.py); Prefect's result cache is off. Calling
    it raises StageTimeout past the stage's limit, and else what the stage raised at its last try.
    """
    run = pipeline_run.settings.run
    limit = run.find_timeout(name)
    label = name.replace("_", " ")

    def task_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> Task[..., StageResult]:
        # Without parameters: Prefect draws an arrow from the source of each, through the labels of those between.
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
        # Prefect follows whatever it finds within an object, as the digests of others; a result's key is its own.
        before = [
            pipeline_run.results[one].key
            for one in find_direct_inputs(inputs, pipeline_run.input_stages)
        ]
        try:
            with hold_gpu_slot(name):  # outside of the stage's time limit: waiting is not its fault
                result: StageResult = task_of(arguments, named)(wait_for=before)
        except TaskRunTimeoutError as error:
            raise build_timeout_error(run, name) from error
        pipeline_run.add_result(name, result, inputs)
        return result

    return start
