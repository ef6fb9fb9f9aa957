"""The DAG of one pipeline run: each stage receives the outputs of earlier stages (tasks/stage_registry.py).

`wrap_stage_call` runs a stage's function without Prefect, with the pipeline's retries and time limits, for processes
that run many pipelines.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError, SettingsError, StageTimeout, Stopped
from tasks import stage_registry
from tasks.config import RunSettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import Product

logger = logging.getLogger(__name__)


def is_transient_error(error: BaseException) -> bool:
    """Return whether a retry may help: a backend or a connection failed."""
    return isinstance(error, BackendError | ConnectionError | TimeoutError)


def compute_retry_delays(run: RunSettings) -> list[float]:
    """Return the seconds before each retry, doubling up to 10 minutes."""
    return [min(600.0, run.retry_delay_seconds * 2**i) for i in range(run.retries)]


def build_timeout_error(run: RunSettings, name: str) -> StageTimeout:
    """Build the error of a stage that exceeded its time limit."""
    setting = f"run.timeouts.{name}" if name in run.timeouts else "run.timeout_seconds"
    return StageTimeout(
        f"stage '{name}' was stopped after {run.find_timeout(name):g} s, the limit set by {setting}; raise it "
        "to resume the stage from its last checkpoint"
    )


def wrap_stage_call(
    name: str, stage: Callable[..., StageResult], pipeline_run: PipelineRun
) -> Callable[..., StageResult]:
    """Wrap a stage's function with the run's retries and time limit.

    The limit stops training after an iteration, as SIGTERM does.
    Calling the result raises StageTimeout, Stopped, or what the stage raised at its last attempt.
    """
    run = pipeline_run.settings.run

    def start(*arguments: Any) -> StageResult:
        delays = compute_retry_delays(run)
        while True:
            try:
                with _limit_stage_time(pipeline_run, name):
                    result = stage(pipeline_run, *arguments)
                break
            except Exception as error:
                if not delays or not is_transient_error(error):
                    raise
                logger.warning("%s: %s; retrying", name, error)
                if pipeline_run.stop.wait(delays.pop(0)):
                    raise Stopped("stopped before a retry", signal.SIGTERM) from error
        pipeline_run.add_result(name, result)
        return result

    return start


@contextlib.contextmanager
def _limit_stage_time(pipeline_run: PipelineRun, name: str) -> Iterator[None]:
    limit = pipeline_run.settings.run.find_timeout(name)
    if limit is None:
        yield
        return
    timed_out = threading.Event()

    def stop() -> None:
        if not pipeline_run.stop.is_set():
            timed_out.set()
            pipeline_run.stop.set()

    timer = threading.Timer(limit, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Stopped as error:
        if not timed_out.is_set():
            raise
        raise build_timeout_error(pipeline_run.settings.run, name) from error
    finally:
        timer.cancel()
        if timed_out.is_set():
            pipeline_run.stop.clear()


# (name, the stage's function, run) -> a callable that takes the stage's inputs
StageCaller = Callable[[str, Callable[..., StageResult], PipelineRun], Callable[..., StageResult]]


@dataclass
class _StageOutputs:
    """Outputs of the stages so far; each property is a name that `PipelineStage.takes` may use."""

    pipeline_run: PipelineRun
    base: Path | str | None  # the model to start from; None = a preset, which prepare_data creates
    evaluated_models: Mapping[str, str]  # models to evaluate instead of those that the run trains
    results: dict[Product, StageResult] = field(default_factory=dict)  # the newest of each kind
    trained: dict[str, StageResult] = field(default_factory=dict)  # policies by stage, in order

    @property
    def data(self) -> StageResult | None:
        return self.results.get("data")

    @property
    def reward_model(self) -> StageResult | None:
        return self.results.get("reward_model")

    @property
    def evaluation(self) -> StageResult | None:
        return self.results.get("evaluation")

    @property
    def suites(self) -> StageResult | None:
        return self.results.get("suites")

    @property
    def proof(self) -> StageResult | None:
        return self.results.get("proof")

    @property
    def decision(self) -> StageResult | None:
        return self.results.get("decision")

    @property
    def model(self) -> Path | str:
        """The newest policy, else the base model."""
        if "policy" in self.results:
            return self.results["policy"].model
        if self.base is not None:
            return self.base
        return self.results["data"].model

    @property
    def models(self) -> Mapping[str, StageResult | Path | str]:
        """The policies to evaluate, by name, the start model first.

        In a trial only the newest, since trials share the others.
        """
        named = {
            name: self.pipeline_run.models.resolve_model(source)[0]
            for name, source in self.evaluated_models.items()
        }
        trained: list[tuple[str, StageResult | Path | str]] = list(self.trained.items())
        if self.pipeline_run.options.trial is not None:
            trained = trained[-1:]
        elif self.base is not None:
            trained.insert(0, (stage_registry.START_MODEL, self.base))
        return named or dict(trained) or {stage_registry.START_MODEL: self.model}

    @property
    def challenger(self) -> StageResult | None:
        """The policy that was trained last."""
        return self.results.get("policy")


def run_dag(
    pipeline_run: PipelineRun,
    evaluated_models: Mapping[str, str],
    call: StageCaller,
    *,
    skip: Collection[str] = (),
) -> None:
    """Run the stages that the settings name, in order.

    Args:
        evaluated_models: models to evaluate instead of those that the run trains, by name.
        call: makes a stage's function callable, as a Prefect task or directly.
        skip: stages to leave out although the settings name them.
    Raises: SettingsError if a stage lacks an input; whatever the stages raise. A promotion that cannot reach the
        tracking store postpones its decision instead.
    """
    outputs = _StageOutputs(pipeline_run, pipeline_run.models.resolve_base(), evaluated_models)
    active = {
        stage.name
        for stage in stage_registry.list_stages()
        if getattr(pipeline_run.settings.stages, stage.name) is not None and stage.name not in skip
    }
    # a network takes no inputs, so it needs no preset either
    takes_any = any(stage_registry.find_stage(name).takes for name in active)
    for stage in stage_registry.list_stages():
        makes_preset = stage.gives == "data" and outputs.base is None and takes_any
        is_active = stage.name in active
        if not is_active and not makes_preset:
            continue
        taken = {name: getattr(outputs, name) for name in stage.takes}
        if missing := [name for name in stage.needs if taken[name] is None]:
            raise SettingsError(
                f"stages.{stage.name} needs {' and '.join(missing)}, but no earlier stage produces it"
            )
        task = call(stage.name, stage_registry.import_stage_task(stage), pipeline_run)
        try:
            result = task(*taken.values())
        except BackendError as error:
            if stage.name != "promote":
                raise
            pipeline_run.postpone_decision(
                f"not decided: only the tracking store knows the champion, and it does not answer ({error}). "
                "Nothing is lost; run the same command again once it answers"
            )
            return
        if stage.gives is not None:
            outputs.results[stage.gives] = result
        if stage.gives == "policy":
            outputs.trained[stage.name] = result
