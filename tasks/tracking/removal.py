"""Removal of runs, traces, model versions and logged models from a store.

Runs and logged models go to MLflow's bin, from which `mlflow gc` purges their rows. Artifacts on this machine are
deleted immediately. Artifacts of a server belong to the server, whose `mlflow gc` deletes them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError, DataError
from rl_core.storage.folders import TRASH_PREFIX, remove_folder
from tasks.tracking.models import find_local_artifacts
from tasks.tracking.store import TrackingStore

log = logging.getLogger(__name__)

PAGE_SIZE = 1000
MAX_TRACES_PER_CALL = 100  # MLflow refuses more


@dataclass(frozen=True)
class StoredRun:
    """Run as retention sees it."""

    run_id: str
    name: str
    experiment_id: str
    parent: str  # "" = pipeline run
    status: str
    tags: dict[str, str]
    artifacts: Path | None  # None = not on this machine


def list_stored_runs(store: TrackingStore, condition: str) -> list[StoredRun]:
    """List all runs of the store that match an MLflow filter."""
    runs: list[StoredRun] = []
    with store.translate_errors("list runs"):
        experiments = [
            experiment.experiment_id
            for experiment in store.client.search_experiments(max_results=1000)
        ]
        token = None
        while experiments:
            page = store.client.search_runs(
                experiments, condition, max_results=PAGE_SIZE, page_token=token
            )
            runs += [_build_stored_run(run) for run in page]
            token = page.token
            if not token:
                break
    return runs


def _build_stored_run(run: Any) -> StoredRun:
    tags = dict(run.data.tags)
    info = run.info
    return StoredRun(
        run_id=info.run_id,
        name=info.run_name or info.run_id,
        experiment_id=info.experiment_id,
        parent=tags.get("mlflow.parentRunId", ""),
        status=info.status,
        tags=tags,
        artifacts=find_local_artifacts(info.artifact_uri, info.run_id),
    )


@dataclass(frozen=True)
class StoredModel:
    """Logged model: the files of a registered version, or the remains of a failed attempt to create one."""

    model_id: str
    run_id: str  # run that created it
    folder: Path | None  # None = not on this machine


def list_stored_models(store: TrackingStore, experiments: Collection[str]) -> list[StoredModel]:
    """List all logged models of these experiments. In a local store only the run links a version to its model."""
    models: list[StoredModel] = []
    with store.translate_errors("list logged models"):
        token = None
        while experiments:
            page = store.client.search_logged_models(sorted(experiments), page_token=token)
            for model in page:
                folder = find_local_artifacts(model.artifact_location, model.model_id)
                models.append(StoredModel(model.model_id, model.source_run_id or "", folder))
            token = page.token
            if not token:
                break
    return models


def list_unfinished_removals(store: TrackingStore, experiments: Collection[str]) -> list[Path]:
    """List artifact folders of these experiments, on this machine, whose removal was interrupted by a kill."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    folders: list[Path] = []
    for experiment in sorted(experiments):
        with store.translate_errors("read an experiment"):
            uri = store.client.get_experiment(experiment).artifact_location
        if not uri or ("://" in uri and not uri.startswith("file://")):
            continue
        root = Path(local_file_uri_to_path(uri))
        for parent in (root, root / "models"):
            for path in sorted(parent.glob(f"{TRASH_PREFIX}*")):
                if path.is_dir() and not path.is_symlink():
                    folders.append(path)
    return folders


def list_run_traces(store: TrackingStore, runs: Iterable[StoredRun]) -> dict[str, list[str]]:
    """Return the ids of the traces that these runs logged, by experiment."""
    trace_ids: dict[str, list[str]] = {}
    for run in runs:
        with store.translate_errors("list traces"):
            token = None
            while True:
                page = store.client.search_traces(
                    locations=[run.experiment_id],
                    run_id=run.run_id,
                    include_spans=False,
                    max_results=500,
                    page_token=token,
                )
                trace_ids.setdefault(run.experiment_id, []).extend(
                    trace.info.trace_id for trace in page
                )
                token = page.token
                if not token:
                    break
    return {experiment: ids for experiment, ids in trace_ids.items() if ids}


def remove_from_store(
    store: TrackingStore,
    runs: Sequence[StoredRun],
    versions: Sequence[tuple[str, int]],
    models: Sequence[StoredModel],
    traces: dict[str, list[str]],
) -> list[str]:
    """Remove runs, versions, models and traces; return a message for each failure. Missing objects are no failure.

    Args:
        versions: (registered model, version).
        traces: as `list_run_traces`.
    """
    problems: list[str] = []

    def attempt(action: str, call: Any, *arguments: Any, **options: Any) -> None:
        try:
            with store.translate_errors(action):
                call(*arguments, **options)
        except DataError as error:
            log.debug("%s: %s", action, error)
        except BackendError as error:
            problems.append(str(error))

    client = store.client
    for experiment, ids in traces.items():
        for start in range(0, len(ids), MAX_TRACES_PER_CALL):
            chunk = ids[start : start + MAX_TRACES_PER_CALL]
            attempt("remove traces", client.delete_traces, experiment, trace_ids=chunk)
    for name, version in versions:
        action = f"remove version {version} of {name}"
        attempt(action, client.delete_model_version, name, str(version))
    # Files are deleted first: after a kill in between, the store still lists the object and it is removed again.
    for model in models:
        if model.folder is not None:
            remove_folder(model.folder)
        attempt("remove a logged model", client.delete_logged_model, model.model_id)
    for run in runs:
        if run.artifacts is not None:
            remove_folder(run.artifacts)
        attempt(f"remove run {run.name}", client.delete_run, run.run_id)
    return problems
