"""A stage's function without Prefect: the pipeline's retries and time limits, for processes that run many pipelines."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rl_core.errors import BackendError, StageTimeout, Stopped
from tasks.config import RunSettings
from tasks.pipeline.result import StageResult
from tasks.pipeline.run import PipelineRun

__all__ = ["is_passing", "plain_call", "retry_delays", "timed_out"]

logger = logging.getLogger(__name__)


def is_passing(error: BaseException) -> bool:
    """True = a retry may help: a backend or a connection failed."""
    return isinstance(error, BackendError | ConnectionError | TimeoutError)


def retry_delays(run: RunSettings) -> list[float]:
    """Seconds before each retry, doubling up to 10 minutes."""
    return [min(600.0, run.retry_delay_seconds * 2**i) for i in range(run.retries)]


def timed_out(run: RunSettings, name: str) -> StageTimeout:
    """The error of a stage that ran into its limit."""
    setting = f"run.timeouts.{name}" if name in run.timeouts else "run.timeout_seconds"
    return StageTimeout(
        f"stage '{name}' was stopped after {run.timeout(name):g} s, the limit that {setting} sets; raise it, "
        "and the stage goes on from its last checkpoint"
    )


def plain_call(name: str, stage: Callable[..., StageResult], pipeline_run: PipelineRun) -> Callable[..., StageResult]:
    """The stage's function for this run. A limit of time stops training as SIGTERM does, after the iteration.

    Calling it raises StageTimeout, Stopped, and else what the stage raised at its last try.
    """
    run = pipeline_run.settings.run

    def start(*arguments: Any) -> StageResult:
        delays = retry_delays(run)
        while True:
            try:
                with _limited(pipeline_run, name):
                    result = stage(pipeline_run, *arguments)
                break
            except Exception as error:
                if not delays or not is_passing(error):
                    raise
                logger.warning("%s: %s; it is tried again", name, error)
                if pipeline_run.stop.wait(delays.pop(0)):
                    raise Stopped("stopped before a retry", signal.SIGTERM) from error
        pipeline_run.add_result(name, result)
        return result

    return start


@contextlib.contextmanager
def _limited(pipeline_run: PipelineRun, name: str) -> Iterator[None]:
    limit = pipeline_run.settings.run.timeout(name)
    if limit is None:
        yield
        return
    late = threading.Event()

    def stop() -> None:
        if not pipeline_run.stop.is_set():
            late.set()
            pipeline_run.stop.set()

    timer = threading.Timer(limit, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Stopped as error:
        if not late.is_set():
            raise
        raise timed_out(pipeline_run.settings.run, name) from error
    finally:
        timer.cancel()
        if late.is_set():
            pipeline_run.stop.clear()
