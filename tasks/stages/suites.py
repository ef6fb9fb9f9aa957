"""Stage: tasks of other evaluators (lm-eval, inspect-ai), for every model of the run.

<folder>/MODEL/EVALUATOR-TASK/result.json, samples.jsonl
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import SettingsError
from rl_core.settings import ModelSettings, SuitesSettings
from rl_core.storage.atomic_files import copy_tree
from rl_core.storage.faults import inject_fault
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import SERVER_LOG, StageResult

if TYPE_CHECKING:
    from rl_core.evaluators.results import SuiteMetrics

logger = logging.getLogger(__name__)

METRIC_PREFIX = "eval"  # of the metrics in the tracking store: eval/MODEL/EVALUATOR/TASK/METRIC
_SINGLE = "suites."  # prefix of the input with the finished suites of one model
_MEGABYTE = 1e6
_TASK_FILES = ("result.json", "samples.jsonl")


def run_model_suites(
    pipeline_run: PipelineRun,
    models: Mapping[str, StageResult | Path | str],
    *,
    label: str | None = None,
) -> StageResult:
    """Run the stage.

    Several models are run one by one, each under its own key, and then joined: what one of them costs is not repeated
    for another training or champion.

    Args:
        models: by the name that tables and metrics show.
    Raises: SettingsError for missing packages, files or tasks; DataError for a task that fails.
    """
    from rl_core.evaluators.run_suites import describe_evaluators

    settings = pipeline_run.settings.stages.suites or SuitesSettings()
    for field, problem in settings.find_missing_paths():
        raise SettingsError(f"stages.suites.{field}: {problem}")
    inputs: dict[str, StageResult | Path | str] = {
        f"model.{name}": model for name, model in models.items()
    }
    if len(models) > 1:
        for name, model in models.items():
            inputs[f"{_SINGLE}{name}"] = run_model_suites(
                pipeline_run, {name: model}, label=f"suites {name}"
            )
    for evaluator, version in describe_evaluators(settings).items():
        inputs[f"evaluator.{evaluator}"] = version
    for file in dict.fromkeys(task.file for task in settings.list_tasks() if task.file):
        inputs[f"file.{file}"] = Path(file).expanduser()
    if settings.include_path is not None:
        inputs["include_path"] = Path(settings.include_path).expanduser()
    return run_stage(
        pipeline_run, "suites", _run_stage, settings=settings, inputs=inputs, label=label
    )


def load_suite_metrics(result: StageResult, model: str) -> SuiteMetrics:
    """Load the metrics of one model, for the promotion gate."""
    from rl_core.evaluators.results import SuiteMetrics, TaskMetric, read_sample_values

    metrics = {
        f"{task}/{name}": TaskMetric(**metric)
        for task, row in result.summary["models"].get(model, {}).items()
        for name, metric in row["metrics"].items()
    }

    def read_samples(metric: str) -> dict[str, float]:
        task, _, name = metric.rpartition("/")
        return read_sample_values(result.path / model / _name_folder(task), name)

    return SuiteMetrics(metrics, read_samples)


def _name_folder(task: str) -> str:
    from rl_core.evaluators.run_suites import build_task_folder_name
    from rl_core.settings.suites import SuiteTask

    evaluator, _, name = task.partition("/")
    return build_task_folder_name(SuiteTask(evaluator, name))  # type: ignore[arg-type]  # was a SuiteTask's


def _run_stage(context: StageContext) -> dict[str, Any]:
    names = [name.removeprefix("model.") for name in context.inputs if name.startswith("model.")]
    models: dict[str, Any] = {}
    for index, name in enumerate(names):
        context.tracker.progress(index, len(names), f"suites of {name}")
        single = context.inputs.get(f"{_SINGLE}{name}")
        if single is not None:
            summary = json.loads((Path(single) / "summary.json").read_text())
            copy_tree(Path(single) / name, context.folder / name)
            models[name] = summary["models"][name]
        else:
            models[name] = _run_one_model(context, name)
        metrics = _list_tracked_metrics(name, models[name])
        context.tracker.log_metrics(metrics, index)
        _log_files(context, name)
    context.tracker.progress(len(names), len(names))
    return {
        "models": models,
        "metrics": {
            key: value
            for name, rows in models.items()
            for key, value in _list_tracked_metrics(name, rows).items()
        },
        "note": _describe_results(models),
    }


def _log_files(context: StageContext, name: str) -> None:
    """Log the files of a model's tasks as artifacts, but for those above `tracking.records_megabytes`."""
    limit = context.pipeline.tracking.records_megabytes * _MEGABYTE
    for path in sorted((context.folder / name).rglob("*.json*")):
        if path.name == "result.json" or path.stat().st_size <= limit:
            context.tracker.log_artifact(path, f"suites/{name}/{path.parent.name}")
        else:
            logger.info("%s is larger than tracking.records_megabytes and stays here", path)


def _run_one_model(context: StageContext, name: str) -> dict[str, Any]:
    """Run the suites of one model, or what an interrupted run has not; return the results by task."""
    from rl_core.api.policy import resolve_model_folder
    from rl_core.evaluators.run_suites import SuiteRun, run_suites

    model = resolve_model_folder(context.inputs[f"model.{name}"])
    # As the evaluation plays it: without new adapters and quantisation.
    model_settings = dataclasses.replace(context.pipeline.model, lora=None, path=str(model))

    def report(done: int, total: int, label: str) -> None:
        context.tracker.progress(done, total, f"{label} with {name}")

    run = SuiteRun(
        model=model,
        model_settings=model_settings,
        settings=context.settings,
        seed=context.pipeline.seed,
        threads=context.threads,
        stop=context.stop,
        start_server=lambda: _serve_model(context, model, model_settings),
    )
    work = context.checkpoints / name
    results = run_suites(run, work, report)
    rows: dict[str, Any] = {}
    for result in results:
        folder = _name_folder(result.task)
        target = context.folder / name / folder
        shutil.rmtree(target, ignore_errors=True)
        copy_tree(work / folder, target)
        inject_fault("suite.copied")
        _remove_varying_parts(target)
        rows[result.task] = result.to_json()
        logger.info("%s: %s", name, _describe_task(result.task, rows[result.task]))
    return rows


def _remove_varying_parts(folder: Path) -> None:
    """Remove the log and the seconds: what is left is equal for equal answers."""
    from rl_core.evaluators.results import RESULT_FILE
    from rl_core.storage.atomic_files import write_json_atomic

    for path in folder.iterdir():
        if path.name not in _TASK_FILES:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    row = json.loads((folder / RESULT_FILE).read_text())
    write_json_atomic(folder / RESULT_FILE, {**row, "seconds": 0.0})


@contextlib.contextmanager
def _serve_model(
    context: StageContext, model: Path | str, model_settings: ModelSettings
) -> Iterator[Any]:
    """Serve a model on a port of loopback, as `posttrain serve` does, until the block ends."""
    from rl_core.evaluators.run_suites import SERVED_NAME, ServedAddress
    from rl_core.rollout_workers.managed_server import HOST, ManagedServer, choose_free_port
    from rl_core.user_code.load import build_child_import_path

    settings: SuitesSettings = context.settings
    port, folder = choose_free_port(), context.checkpoints / "server"
    overrides: dict[str, Any] = {
        "serving.host": HOST,
        "serving.slots": settings.slots,
        "serving.threads": context.threads,
        **_list_changed_model_settings(model_settings),
    }
    command = [sys.executable, "-P", "-m", "posttrain", "serve", str(model)]
    command += ["--port", str(port), "--name", SERVED_NAME, "--output", str(folder)]
    for key, value in overrides.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    server = ManagedServer(
        command,
        port,
        context.folder / SERVER_LOG,
        timeout_s=settings.start_timeout_seconds,
        stop_event=context.stop,
        timeout_setting="stages.suites.start_timeout_seconds",
        variables={"PYTHONPATH": build_child_import_path()},
    )
    server.start()
    try:
        token = (folder / "serving" / "token").read_text().strip()
        yield ServedAddress(f"http://{HOST}:{port}/v1", token)
    finally:
        server.close()


def _list_changed_model_settings(model: ModelSettings) -> dict[str, Any]:
    """List the model settings that a served model needs and that are not the defaults, as keys of `--set`."""
    default, unused = ModelSettings(), ("path", "preset", "vocab_size", "context", "lora")
    return {
        f"model.{field.name}": value
        for field in dataclasses.fields(model)
        if field.name not in unused
        and (value := getattr(model, field.name)) != getattr(default, field.name)
    }


def _list_tracked_metrics(model: str, rows: Mapping[str, Any]) -> dict[str, float]:
    """List the metrics of a model for the tracking store; those that are no numbers are left out."""
    metrics: dict[str, float] = {}
    for task, row in rows.items():
        prefix = f"{METRIC_PREFIX}/{model}/{task}"
        metrics[f"{prefix}/samples"] = float(row["samples"])
        for name, metric in row["metrics"].items():
            for suffix, key in (("", "value"), ("_low", "low"), ("_high", "high")):
                if metric[key] is not None:
                    metrics[f"{prefix}/{name}{suffix}"] = float(metric[key])
    return metrics


def _describe_results(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the first metric of each task."""
    names = list(models)
    parts = []
    for task in models[names[0]] if names else ():
        rows = {name: models[name][task] for name in names if task in models[name]}
        texts = [f"{name} {_format_first_metric(row)}" for name, row in rows.items()]
        parts.append(f"{task} {next(iter(rows[names[0]]['metrics']))}: {', '.join(texts)}")
    missing = [
        f"{name} {task}/{metric}"
        for name, rows in models.items()
        for task, row in rows.items()
        for metric, value in row["metrics"].items()
        if value["value"] is None
    ]
    note = "; ".join(parts)
    return f"{note}; not a number: {', '.join(missing)}" if missing else note


def _format_first_metric(row: Mapping[str, Any]) -> str:
    return format_metric(next(iter(row["metrics"].values())))


def format_metric(metric: Mapping[str, Any]) -> str:
    """Format a metric's value with its interval."""
    from rl_core.evaluators.results import TaskMetric

    return TaskMetric(**metric).format_value()


def _describe_task(task: str, row: Mapping[str, Any]) -> str:
    return f"{task} {_format_first_metric(row)} on {row['samples']} samples ({row['evaluator']})"
