"""One Prefect task for every stage: run name, retries of transient errors, timeout, and its artifact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.task_engine import TaskRunTimeoutError

from rl_core.storage.faults import fault
from tasks.pipeline.gpu_slot import gpu_slot
from tasks.pipeline.plain_call import is_passing, retry_delays, timed_out
from tasks.pipeline.prefect_artifacts import stage_artifact
from tasks.pipeline.result import StageResult
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage_inputs import closest, inputs_among

__all__ = ["is_transient", "stage_task"]


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

    def task_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> Task[..., StageResult]:
        # Without parameters: Prefect draws an arrow from the source of each, through the labels of those between.
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
        def call() -> StageResult:
            with stage_artifact(pipeline_run, name) as finish:
                result = stage(pipeline_run, *arguments, **named)
                fault("task.ended")
                finish(result)
            fault("task.published")
            return result

        return call

    def start(*arguments: Any, **named: Any) -> StageResult:
        inputs = inputs_among([arguments, named], pipeline_run.results)
        # Prefect follows whatever it finds within an object, as the digests of others; a result's key is its own.
        before = [pipeline_run.results[one].key for one in closest(inputs, pipeline_run.made_from)]
        try:
            with gpu_slot(name):  # outside of the stage's time limit: waiting is not its fault
                result: StageResult = task_of(arguments, named)(wait_for=before)
        except TaskRunTimeoutError as error:
            raise timed_out(run, name) from error
        pipeline_run.add_result(name, result, inputs)
        return result

    return start
