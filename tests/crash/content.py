"""Comparable content of an output folder, without the differences between undisturbed runs; and leftovers of a run.

MAY_DIFFER lists these differences: times and speeds, random ids, and notes about interruptions.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "MAY_DIFFER",
    "content",
    "count_parents",
    "leftovers",
    "left_in_shared_memory",
    "problems_of_store",
    "shared_memory",
]

MAY_DIFFER = {
    "times": "seconds, time stamps, tokens per second; in reports, pictures and tables that show them",
    "ids": "of MLflow runs and models, of Prefect's flow runs, of the journal; process numbers",
    "notes of the interruption": "the tags resumed, interrupted, changed_params and cached.STAGE; decisions.jsonl",
    "answer in run.json": "a run that is started again after the clock's answer finds it given, and does not ask",
    "lock files": "the process that held the lock last and was killed; whether it is held is looked at",
    "recent_rollouts.jsonl": "rollouts of the newest iterations; after a resume, of those since the checkpoint",
    "metrics_history.jsonl": "lines of the moments at which the history of metrics was exported",
    "stage.log": "what a stage printed, with times",
}

TIMED_METRICS = re.compile(r"(perf|system|pipeline|seconds)/.*|.*tokens_per_second|.*seconds")
TIMED_KEYS = {
    "seconds",
    "tokens_per_second",
    "run_id",
    "started",
    "pid",
    "time",
    "stage_run_id",
    "flow_run_id",
}
TIMED_TAGS = re.compile(
    r"mlflow\.posttrain\.runKey|prefect\..*|resumed|interrupted|changed_params|cached\..*|mlflow\.note\.content"
    r"|mlflow\.user|seconds|alias\.moved\..*|approval\.(run_id|stage_run_id|flow_run_id|asked|deadline|when|run)"
)
DATABASE = Path("mlflow", "mlflow.db")
NOTES = ("metrics_history.jsonl", "recent_rollouts.jsonl", "decisions.jsonl", "stage.log")
TIMED_ENDINGS = (".png", ".html", "review.md")  # show times
LEFT = re.compile(
    r"\.tmp-.*|\.trash-.*|.*\.open|.*\.corrupt-.*|.*\.tmp-\d+|.*half-made.*|tmp\w{8}|model-\w{8}|workers"
)
STARTED = re.compile(r"\d{4}-\d\d-\d\d[ -]\d\d[:-]\d\d[:-]\d\d")
RUN_ID = re.compile(r"\b[0-9a-f]{32}\b|\bm-[0-9a-f]{32}\b|\b[0-9a-f]{8}-[0-9a-f-]{27}\b")


def content(output: Path) -> dict[str, Any]:
    """Read the comparable content of an output folder: files by name, and the tables of the tracking store."""
    return {**_read_files(output), **_read_store(output)}


def _read_files(output: Path) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for path in sorted(output.rglob("*")):
        name = STARTED.sub("STARTED", path.relative_to(output).as_posix())
        if (
            not path.is_file()
            or name.split("/")[0] in ("prefect", "mlflow")
            or "/.tracking/" in name
        ):
            continue
        # a lock file names its last holder
        if path.name in NOTES or path.name.endswith((*TIMED_ENDINGS, ".lock")):
            files[name] = "there"
            continue
        files[name] = _read_comparable(path)
    return files


def _read_comparable(path: Path) -> Any:
    if path.name == "metrics.jsonl":
        return _read_metric_rows(path)
    if path.suffix == ".json":
        return _remove_times(json.loads(path.read_text()), path.name)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_metric_rows(path: Path) -> list[Any]:
    """Read (step, name, value), each once, in the file's order of steps."""
    rows = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        rows += [
            (record["step"], name, value)
            for name, value in record["metrics"].items()
            if not TIMED_METRICS.fullmatch(name)
        ]
    return sorted(rows, key=lambda row: row[:2])


def _remove_times(value: Any, file: str) -> Any:
    """Remove keys that hold times, and digests of files that contain times, from JSON."""
    if isinstance(value, dict):
        return {
            key: _remove_times(item, file)
            for key, item in sorted(value.items())
            if key not in TIMED_KEYS
            and not TIMED_METRICS.fullmatch(key)
            and not (file == "run.json" and key == "answer")
            and not (
                file == "manifest.json"
                and (key in _TIMED_FILES or key in ("manifest_digest", "content_digest"))
            )
        }
    if isinstance(value, list):
        return [_remove_times(item, file) for item in value]
    return STARTED.sub("STARTED", RUN_ID.sub("ID", value)) if isinstance(value, str) else value


_TIMED_FILES = {
    "summary.json",
    "metrics.jsonl",
    "metrics_history.json",
    "metrics_history.jsonl",
    "recent_rollouts.jsonl",
    "report.html",
    "evaluation.json",
    "analysis.json",
    "analysis.csv",
    "review.md",
    "stage.log",
    "review/report.html",
}


def leftovers(output: Path, temporary: Path) -> list[str]:
    """List temporaries, open folders, held locks, undelivered records and shared memory."""
    results = []
    for path in sorted(output.rglob("*")):
        name = path.relative_to(output).as_posix()
        if name.startswith(("mlflow/", "prefect/")):
            continue
        if LEFT.fullmatch(path.name) and not path.name.endswith(".lock"):
            results.append(name)
        elif path.name.endswith(".lock") and _is_held(path):
            results.append(f"{name} is held")
        elif "/.tracking/files/" in name and path.is_file():
            results.append(f"{name} was not removed after its delivery")
    results += [f"{path} in the folder of temporaries" for path in sorted(temporary.iterdir())]
    return results


def _is_held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def shared_memory() -> set[str]:
    """List names in /dev/shm that torch or Python create; other programs use it too."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(("torch_", "psm_", "sem.", "pym-"))
    }


def left_in_shared_memory(before: set[str], seconds: float = 10.0) -> list[str]:
    """List names that have appeared in /dev/shm since and that no process has mapped, such as another crash test.

    Names that disappear within so many seconds are no leftovers: cleaning processes outlive the killed process.
    """
    deadline = time.monotonic() + seconds
    while left := shared_memory() - before - _mapped_names():
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return sorted(left)


def _mapped_names() -> set[str]:
    """List files of /dev/shm that processes of this user have mapped."""
    names: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            names.update(re.findall(r"/dev/shm/(\S+)", path.read_text()))
    return names


def _query_rows(database: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    yield from database.execute(query)


def _read_store(output: Path) -> dict[str, Any]:
    """Read the tables of the store, with runs and models by name instead of id."""
    path = output / DATABASE
    if not path.exists():
        return {}
    with sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True) as database:
        names = _name_runs(database)
        models = {
            model: f"model of {names.get(run, run)}"
            for model, run in _query_rows(
                database, "SELECT model_id, source_run_id FROM logged_models"
            )
        }
        tables = {
            f"store: {name}": value for name, value in _read_tables(database, names, models).items()
        }
    return tables | _read_artifacts(output / "mlflow" / "artifacts", {**names, **models})


def _name_runs(database: sqlite3.Connection) -> dict[str, str]:
    """Map run ids to names; the second run of a name is 'name 2'."""
    counts: collections.Counter[str] = collections.Counter()
    names = {}
    for run, name in _query_rows(
        database, "SELECT run_uuid, name FROM runs ORDER BY start_time, name"
    ):
        name = STARTED.sub("STARTED", name)
        counts[name] += 1
        names[run] = name if counts[name] == 1 else f"{name} {counts[name]}"
    return names


def _read_tables(
    database: sqlite3.Connection, names: Mapping[str, str], models: Mapping[str, str]
) -> dict[str, Any]:
    def text(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        value = STARTED.sub("STARTED", value)
        return RUN_ID.sub(lambda match: names.get(match[0], models.get(match[0], "ID")), value)

    def table(query: str, keep: Any = lambda row: True) -> list[tuple[Any, ...]]:
        rows = [tuple(map(text, row)) for row in _query_rows(database, query) if keep(row)]
        return sorted(rows, key=repr)

    def untimed(row: tuple[Any, ...]) -> bool:
        return not TIMED_METRICS.fullmatch(row[1]) and not TIMED_TAGS.fullmatch(row[1])

    return {
        "runs": table("SELECT run_uuid, name, status, lifecycle_stage FROM runs"),
        "metrics": table("SELECT run_uuid, key, step, value FROM metrics", untimed),
        "parameters": table("SELECT run_uuid, key, value FROM params", untimed),
        "tags": table("SELECT run_uuid, key, value FROM tags", untimed),
        "datasets": table("SELECT name, digest, dataset_source FROM datasets"),
        "inputs": table("SELECT destination_type, destination_id FROM inputs"),
        "traces": table(
            "SELECT timestamp_ms - timestamp_ms, trace_name, status, request_preview, response_preview "
            "FROM trace_info"
        ),
        "trace tags": table(
            "SELECT 0, key, value FROM trace_tags",
            lambda row: row[1] not in ("mlflow.artifactLocation", "mlflow.trace.spansLocation"),
        ),
        "spans": table("SELECT name, type, status, parent_span_id IS NULL FROM spans"),
        "assessments": table("SELECT name, value, valid FROM assessments"),
        "logged models": table(
            "SELECT name, source_run_id, model_type, status, lifecycle_stage FROM logged_models"
        ),
        "logged model metrics": table(
            "SELECT run_id, metric_name, metric_value, metric_step FROM logged_model_metrics",
            untimed,
        ),
        "registered models": table("SELECT name, description FROM registered_models"),
        "model tags": table("SELECT name, key, value FROM registered_model_tags"),
        "versions": table(
            "SELECT name, version, run_id, status, current_stage FROM model_versions"
        ),
        "version tags": table(
            "SELECT name || version, key, value FROM model_version_tags", untimed
        ),
        "aliases": table("SELECT name, alias, version FROM registered_model_aliases"),
    }


def _read_artifacts(folder: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Read files of runs and models in the store, by the name of their run."""
    artifacts: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        parts = [
            STARTED.sub("STARTED", names.get(part, part)) for part in path.relative_to(folder).parts
        ]
        name = "artifact: " + "/".join(parts)
        while name in artifacts:  # of a second model of the same run
            name += "'"
        is_timed = path.name in ("MLmodel", *NOTES) or path.name.endswith(TIMED_ENDINGS)
        artifacts[name] = "there" if is_timed else _read_comparable(path)
    return artifacts


def count_parents(output: Path) -> int:
    """Count the runs that are not nested in another run."""
    nested = "SELECT run_uuid FROM tags WHERE key = 'mlflow.parentRunId'"
    query = (
        f"SELECT COUNT(*) FROM runs WHERE lifecycle_stage = 'active' AND run_uuid NOT IN ({nested})"
    )
    with sqlite3.connect(f"{(output / DATABASE).as_uri()}?mode=ro", uri=True) as database:
        return int(next(_query_rows(database, query))[0])


def problems_of_store(output: Path, parents: int) -> list[str]:
    """List duplicate points, versions and parent runs, independent of the comparison."""
    problems = []
    with sqlite3.connect(f"{(output / DATABASE).as_uri()}?mode=ro", uri=True) as database:
        duplicate_points = (
            "SELECT run_uuid, key, step, COUNT(*) FROM metrics "
            "GROUP BY run_uuid, key, step HAVING COUNT(*) > 1"
        )
        problems += [f"doubled point: {row}" for row in _query_rows(database, duplicate_points)]
        duplicate_versions = (
            "SELECT name, value, COUNT(*) FROM model_version_tags WHERE key = 'model_sha256' "
            "GROUP BY name, value HAVING COUNT(*) > 1"
        )
        problems += [f"a version twice: {row}" for row in _query_rows(database, duplicate_versions)]
        if (count := count_parents(output)) != parents:
            problems.append(f"{count} parent runs instead of {parents}")
        open_runs = [
            row[0]
            for row in _query_rows(database, "SELECT name FROM runs WHERE status != 'FINISHED'")
        ]
        problems += [f"run '{name}' is not finished" for name in open_runs]
    return problems
