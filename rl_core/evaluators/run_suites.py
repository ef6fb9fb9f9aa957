"""Tasks of lm-eval and inspect-ai on one model, each evaluator in a child process.

lm-eval runs over the engine in a child of this Python (`rl_core/evaluators/lm_eval_child.py`). inspect-ai asks a server
over HTTP, so it may be in another environment. A child that exits, hangs or is killed costs the task that it ran; tasks
with a result are not run again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, SettingsError, Stopped
from rl_core.evaluators.lm_eval_child import ERROR_FILE
from rl_core.evaluators.results import (
    TaskMetric,
    TaskResult,
    build_metric,
    build_metric_name,
    read_number,
    read_task_result,
    write_task_result,
)
from rl_core.processes.children import start_child, stop_group
from rl_core.settings import ModelSettings, SuitesSettings
from rl_core.settings.suites import Evaluator, SuiteTask
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.user_code.load import build_child_import_path

LOOPBACK = "127.0.0.1,localhost,::1"
SERVED_NAME = "model"  # of the model on the server that inspect-ai asks
EVALUATOR_LOG = "evaluator.log"
_SERVICE = "posttrain"  # names the variables of inspect-ai's provider for other services
_PACKAGES: dict[Evaluator, tuple[str, str]] = {  # package, name on the index
    "lm_eval": ("lm_eval", "lm-eval"),
    "inspect": ("inspect_ai", "inspect-ai"),
}
_POLL_SECONDS = 0.2
_STOP_SECONDS = 5.0
_QUOTED_CHARACTERS = 500  # of a log in a message
_PROBE_SECONDS = 120.0  # for the version of a package in another environment
# inspect-ai's grades: correct, incorrect, partial, no answer
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_SPREAD_METRICS = ("stderr", "bootstrap_stderr")


@dataclass(frozen=True, slots=True)
class ServedAddress:
    """Address of a server of OpenAI's dialect, and its key."""

    base_url: str
    api_key: str


ServerStarter = Callable[[], AbstractContextManager[ServedAddress]]


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """Model, settings and process of one run of suites."""

    model: Path | str
    model_settings: ModelSettings
    settings: SuitesSettings
    seed: int
    threads: int
    stop: threading.Event
    start_server: ServerStarter  # of the model, for inspect-ai


def build_task_folder_name(task: SuiteTask) -> str:
    """Return the name of a task's folder."""
    return re.sub(r"[^\w.-]", "_", task.label.replace("/", "-", 1))


def run_suites(
    run: SuiteRun, folder: Path, report: Callable[[int, int, str], None] = lambda *_: None
) -> list[TaskResult]:
    """Run all tasks on a model and return their results in order.

    Args:
        folder: a folder for each task, with its result; of an earlier call, tasks with a result are not run again.
        report: receives the number of finished tasks, of all tasks, and the next one.
    Raises: SettingsError for a missing package or an unknown task; DataError for a task that fails; Stopped.
    """
    make_folder(folder)
    tasks = run.settings.list_tasks()

    def list_pending() -> list[SuiteTask]:
        return [t for t in tasks if read_task_result(folder / build_task_folder_name(t)) is None]

    def report_next(pending: Sequence[SuiteTask]) -> None:
        if pending:
            report(len(tasks) - len(list_pending()), len(tasks), pending[0].label)

    own = [task for task in list_pending() if task.evaluator == "lm_eval"]
    if own:
        report_next(own)
        _run_lm_eval(run, own, folder)
    asking = [task for task in list_pending() if task.evaluator == "inspect"]
    if asking:
        report_next(asking)
        with run.start_server() as address:
            for index, task in enumerate(asking):
                report_next(asking[index:])
                _run_inspect(run, task, folder, address)
    results = [read_task_result(folder / build_task_folder_name(task)) for task in tasks]
    return [result for result in results if result is not None]


# ----------------------------------------------------------------------------------------------------------- packages


def describe_evaluators(settings: SuitesSettings) -> dict[str, str]:
    """Return the evaluators that the tasks need, with their versions, for the stage's key.

    Raises: SettingsError that says how to install a missing one.
    """
    needed = dict.fromkeys(task.evaluator for task in settings.list_tasks())
    return {evaluator: find_evaluator_version(evaluator, settings) for evaluator in needed}


def find_evaluator_version(evaluator: Evaluator, settings: SuitesSettings) -> str:
    """Find the version of an evaluator's package where it would run. Raises: SettingsError if it is not installed."""
    package, index_name = _PACKAGES[evaluator]
    if evaluator == "inspect" and settings.inspect_python is not None:
        return _probe_environment(settings.inspect_python, index_name)
    if importlib.util.find_spec(package) is None:
        if evaluator == "lm_eval":
            raise SettingsError(
                "stages.suites.tasks: lm-eval is not installed; python -m posttrain.install --extras evaluators"
            )
        raise SettingsError(
            "stages.suites.tasks: inspect-ai is not installed; pip install inspect-ai openai, here or in an "
            "environment of its own whose Python stages.suites.inspect_python names"
        )
    try:
        return f"{index_name} {importlib.metadata.version(index_name)}"
    except importlib.metadata.PackageNotFoundError:  # a folder on the path
        return index_name


def _probe_environment(python: str, package: str) -> str:
    """Ask another Python for the version of a package."""
    program = (
        "import importlib.metadata, openai, sys; print(importlib.metadata.version(sys.argv[1]))"
    )
    command = [str(Path(python).expanduser()), "-c", program, package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(
            f"stages.suites.inspect_python: {python} does not run: {error}"
        ) from error
    if done.returncode != 0:
        raise SettingsError(
            f"stages.suites.inspect_python: {python} lacks {package} or openai; install both there: "
            f"{shlex.quote(python)} -m pip install {package} openai"
        )
    return f"{package} {done.stdout.strip()}"


# ------------------------------------------------------------------------------------------------------------ lm-eval


def _run_lm_eval(run: SuiteRun, tasks: Sequence[SuiteTask], folder: Path) -> None:
    settings = run.settings
    (folder / ERROR_FILE).unlink(missing_ok=True)
    include_path = settings.include_path
    request = {
        "model": str(run.model),
        "model_settings": asdict(run.model_settings),
        "tasks": [{"name": task.name, "folder": build_task_folder_name(task)} for task in tasks],
        "output": str(folder),
        "include_path": str(Path(include_path).expanduser()) if include_path else None,
        "limit": settings.limit,
        "num_fewshot": settings.num_fewshot,
        "chat_template": settings.chat_template,
        "max_completion_tokens": settings.max_completion_tokens,
        "unsafe_code": settings.unsafe_code,
        "slots": settings.slots,
        "pass_tokens": settings.pass_tokens,
        "seed": run.seed,
        "threads": run.threads,
    }
    write_json_atomic(folder / "request.json", request)
    command = [
        *(sys.executable, "-P", "-m", "rl_core.evaluators.lm_eval_child"),
        str(folder / "request.json"),
    ]
    environment = {"PYTHONPATH": build_child_import_path(), "TOKENIZERS_PARALLELISM": "false"}
    log = folder / EVALUATOR_LOG
    code = _run_child(command, environment, log, run.stop)
    if (folder / ERROR_FILE).is_file():
        row = json.loads((folder / ERROR_FILE).read_text(encoding="utf-8"))
        raise DataError(str(row["error"]))
    unfinished = [t for t in tasks if read_task_result(folder / build_task_folder_name(t)) is None]
    if unfinished:
        raise DataError(_explain_end("lm-eval", unfinished[0], code, log))


def _run_child(
    command: Sequence[str], variables: Mapping[str, str], log: Path, stop: threading.Event
) -> int:
    """Run a command to its end and return its exit code. Raises: Stopped if a stop is requested."""
    environment = {**os.environ, **variables}
    child = start_child(command, log=log, environment=environment, death_signal=signal.SIGKILL)
    try:
        while (code := child.poll()) is None:
            if stop.is_set():
                raise Stopped(
                    "stopped in a suite; the same command continues with the tasks that have no result",
                    signal.SIGTERM,
                )
            time.sleep(_POLL_SECONDS)
        return code
    finally:
        stop_group(child, _STOP_SECONDS)


def _explain_end(evaluator: str, task: SuiteTask, code: int, log: Path) -> str:
    """Say how an evaluator ended without a result."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    text = " ".join(_read_log_end(log).split())[-_QUOTED_CHARACTERS:]
    quoted = f"; the end of its output: {text}" if text else ""
    return f"{evaluator} {how} before {task.label} had a result{quoted} (log: {log})"


def _read_log_end(log: Path) -> str:
    """Read the end of a log: its last error if there is one, else its last lines."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line.strip(" |") for line in lines if line.strip(" |+-")]
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit)\b", line)]
    return errors[-1] if errors else "\n".join(lines[-3:])


# ------------------------------------------------------------------------------------------------------------ inspect


def _run_inspect(run: SuiteRun, task: SuiteTask, folder: Path, address: ServedAddress) -> None:
    settings = run.settings
    target = folder / build_task_folder_name(task)
    logs = target / "logs"
    shutil.rmtree(logs, ignore_errors=True)  # of an interrupted attempt
    make_folder(logs)
    python = str(Path(settings.inspect_python or sys.executable).expanduser())
    file = Path(task.file).expanduser().resolve()
    command = [
        *(python, "-m", "inspect_ai", "eval", f"{file}@{task.name}"),
        *("--model", f"openai-api/{_SERVICE}/{SERVED_NAME}"),
        *("--log-dir", str(logs), "--log-format", "json", "--display", "none"),
        *("--max-connections", str(settings.slots), "--max-retries", "5"),
    ]
    if settings.limit is not None:
        command += ["--limit", str(settings.limit)]
    exempt = ",".join(
        filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK))
    )
    environment = {
        f"{_SERVICE.upper()}_API_KEY": address.api_key,
        f"{_SERVICE.upper()}_BASE_URL": address.base_url,
        "NO_PROXY": exempt,
        "no_proxy": exempt,
        "INSPECT_LOG_LEVEL": "warning",
    }
    if settings.inspect_python is not None:
        environment["PYTHONPATH"] = ""  # this environment's packages are not for that one
    started, log = time.perf_counter(), target / EVALUATOR_LOG
    code = _run_child(command, environment, log, run.stop)
    stored = _read_inspect_log(logs)
    if stored is None:
        raise DataError(_explain_end("inspect-ai", task, code, log))
    result = convert_inspect_log(task, stored)
    result = replace(result, seconds=round(time.perf_counter() - started, 2))
    write_task_result(target, result, iter_inspect_samples(stored))
    shutil.rmtree(logs, ignore_errors=True)


def _read_inspect_log(folder: Path) -> dict[str, Any] | None:
    """Read the log that an evaluation wrote; None = there is none, or half of one."""
    for path in sorted(folder.glob("*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("status") in ("success", "error", "cancelled"):
            return row
    return None


def convert_inspect_log(task: SuiteTask, log: Mapping[str, Any]) -> TaskResult:
    """Convert inspect-ai's log of one evaluation.

    Raises: DataError if the evaluation failed or scored nothing.
    """
    if log["status"] != "success":
        message = " ".join(str((log.get("error") or {}).get("message", "no reason given")).split())
        raise DataError(
            f"inspect-ai's task {task.name} of {task.file} failed ({log['status']}): "
            f"{message[:_QUOTED_CHARACTERS]}"
        )
    samples = log.get("samples") or []
    metrics: dict[str, TaskMetric] = {}
    for score in (log.get("results") or {}).get("scores") or []:
        values = [_read_grade(sample, score) for sample in samples]
        named = {name: metric["value"] for name, metric in score["metrics"].items()}
        spread = next((named[name] for name in _SPREAD_METRICS if name in named), None)
        reducer = score.get("reducer")
        for name, value in named.items():
            if name in _SPREAD_METRICS:
                continue
            is_mean = name in ("accuracy", "mean")
            parts = (str(score["name"]), reducer if reducer not in (None, "mean") else "", name)
            metrics[build_metric_name(*parts)] = build_metric(
                value, spread if is_mean else None, values if is_mean else ()
            )
    if not samples or not metrics:
        raise DataError(f"inspect-ai's task {task.name} of {task.file} scored no sample")
    details = log["eval"]
    package = (details.get("packages") or {}).get("inspect_ai", "")
    version = str(details.get("task_version", ""))
    return TaskResult(task.label, f"inspect-ai {package}", version, len(samples), 0.0, metrics)


def iter_inspect_samples(log: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a log with their numbers, without times and events, which differ from run to run."""
    scores = (log.get("results") or {}).get("scores") or []
    for sample in log.get("samples") or []:
        numbers: dict[str, float] = {}
        for score in scores:
            grade = _read_grade(sample, score)
            for name in _iter_mean_names(score) if grade is not None else ():
                numbers[name] = grade  # type: ignore[assignment]  # checked above
        output = (sample.get("output") or {}).get("completion")
        kept = {name: sample.get(name) for name in ("id", "epoch", "input", "target")}
        graded = {
            name: {key: value.get(key) for key in ("value", "answer", "explanation")}
            for name, value in (sample.get("scores") or {}).items()
        }
        yield {
            "id": f"{sample['id']}:{sample.get('epoch', 1)}",
            "metrics": numbers,
            "sample": {**kept, "completion": output, "scores": graded},
        }


def _iter_mean_names(score: Mapping[str, Any]) -> Iterable[str]:
    reducer = score.get("reducer")
    middle = reducer if reducer not in (None, "mean") else ""
    for name in ("accuracy", "mean"):
        if name in score["metrics"]:
            yield build_metric_name(str(score["name"]), middle, name)


def _read_grade(sample: Mapping[str, Any], score: Mapping[str, Any]) -> float | None:
    """Read a sample's grade as a number; None = it has none."""
    row = (sample.get("scores") or {}).get(score.get("scorer") or score["name"])
    value = (row or {}).get("value")
    if isinstance(value, Mapping):
        value = value.get(score["name"])
    return _GRADES[value] if isinstance(value, str) and value in _GRADES else read_number(value)
