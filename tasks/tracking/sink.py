"""Journaled records as MLflow calls, all of them idempotent."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.errors import BackendError, DataError
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import remove_folder
from rl_core.storage.single_files import make_folder
from tasks.run_status import OF_AN_EARLIER_STOP
from tasks.tracking.artifact_folders import clear_broken_uploads, local_artifacts
from tasks.tracking.journal import SCRATCH, DeliveryCursor, events_path
from tasks.tracking.models import log_model
from tasks.tracking.registry import Registry, moved_at
from tasks.tracking.shipper import RunGone
from tasks.tracking.store import Store, missing, user_name
from tasks.tracking.traces import send_traces
from tasks.tracking.values import MAX_VALUE, SECONDS, metric_name, tag_name

__all__ = ["PARENT", "RUN_KEY", "MlflowSink"]

log = logging.getLogger(__name__)

PARENT = "{parent}"  # in a model's description, for the number of the version that it was trained from
RUN_KEY = "mlflow.posttrain.runKey"  # tag by which a run is found again when its id was never learnt; pages hide it
MAX_TAG = 5000
MAX_PARAMS = 100  # of one call


class MlflowSink:
    """Delivers records to one MLflow store."""

    def __init__(self, store: Store, folder: Path, settle: Callable[[str, int], None] | None = None) -> None:
        """Open the store.

        Args:
            folder: the run folder; paths in its records are relative to it.
            settle: has models of a name that were recorded before a time (ms) delivered first, or raises BackendError.
        """
        self._store, self._folder, self._settle = store, folder, settle or (lambda name, time_ms: None)
        self.store = store.label
        assert store.client
        self._began = time.time()
        self._cleared: set[str] = set()  # runs without files of an upload that a kill ended

    @property
    def identity(self) -> str:
        """As `Store.identity`."""
        return self._store.identity

    # -- runs ---------------------------------------------------------------------------------------------------

    def start(self, event: dict[str, Any], *, retried: bool) -> tuple[str, str]:
        """Create the run, or find the one that an earlier attempt created."""
        parent = self._parent(event)
        with self._store.answers("create a run"):
            experiment_id = self._store.experiment_id
            if event.get("run_id"):
                run = self._store.client.get_run(event["run_id"])
                self._store.client.update_run(run.info.run_id, status="RUNNING")
                return run.info.run_id, run.info.experiment_id
            if retried:
                found = self._store.client.search_runs(
                    [experiment_id], f"tags.`{RUN_KEY}` = '{event['key']}'", max_results=1
                )
                if found:
                    return found[0].info.run_id, experiment_id
            tags = {
                RUN_KEY: event["key"],
                "mlflow.user": user_name(),
                "mlflow.source.name": "posttrain",
                "mlflow.source.type": "LOCAL",
            }
            if parent:
                tags["mlflow.parentRunId"] = parent
            run = self._store.client.create_run(
                experiment_id, start_time=event["time"], tags=tags, run_name=event["name"]
            )
            return run.info.run_id, experiment_id

    def _parent(self, event: dict[str, Any]) -> str | None:
        if event.get("parent_folder"):  # first: a store that lost everything knows the parent by another id
            state = DeliveryCursor.load(Path(event["parent_folder"]))
            if state.run_id is None or state.store != self.store or state.identity not in ("", self.identity):
                raise BackendError("the parent run is not created yet")
            return state.run_id
        return str(event["parent_run_id"]) if event.get("parent_run_id") else None

    def knows(self, run_id: str) -> bool:
        """True = the run exists and is not in the bin."""
        return self._lifecycle(run_id) == "active"

    def exists(self, run_id: str) -> bool:
        """True = the run exists, be it in the bin."""
        return self._lifecycle(run_id) != ""

    def _lifecycle(self, run_id: str) -> str:
        try:
            return str(self._store.client.get_run(run_id).info.lifecycle_stage)
        except Exception as error:
            if missing(error):
                return ""
            raise BackendError(f"{self.store} could not look for a run: {error}") from error

    @contextmanager
    def _writing(self, run_id: str, doing: str) -> Iterator[None]:
        """As `Store.answers`; a refusal because the run is gone is RunGone."""
        try:
            with self._store.answers(doing):
                yield
        except DataError:
            if not self.knows(run_id):
                raise RunGone(run_id) from None
            raise

    # -- records ------------------------------------------------------------------------------------------------

    def metrics(self, run_id: str, rows: list[tuple[str, float, int, int]]) -> None:
        """Store metrics with one call."""
        from mlflow.entities import Metric

        batch = [Metric(metric_name(name), value, when, step) for name, value, when, step in rows]
        with self._writing(run_id, "store metrics"):
            self._store.client.log_batch(run_id, metrics=batch, synchronous=True)

    def event(self, run_id: str, event: dict[str, Any]) -> int | None:
        """Store a record that is no metric; returns the version that a model became."""
        op = event.get("op", "")
        handler = getattr(self, f"_op_{op}", None) if op.isidentifier() else None
        if handler is None:
            log.warning("tracking: a record of unknown kind %r was left out", op)
            return None
        with self._writing(run_id, f"store {op}"):
            version: int | None = handler(run_id, event)
        return version

    def _op_start(self, run_id: str, event: dict[str, Any]) -> None:
        """The run exists already: its creation comes before everything."""

    def _op_resume(self, run_id: str, event: dict[str, Any]) -> None:
        client = self._store.client
        tags = client.get_run(run_id).data.tags
        for name in OF_AN_EARLIER_STOP:
            if name in tags:
                client.delete_tag(run_id, name)
        client.update_run(run_id, status="RUNNING")

    def _op_end(self, run_id: str, event: dict[str, Any]) -> None:
        if event.get("seconds") is not None:
            self._store.client.set_tag(run_id, SECONDS, f"{event['seconds']:.1f}")
        self._store.client.set_terminated(run_id, status=event["status"], end_time=event["time"])

    def _op_tags(self, run_id: str, event: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(tag_name(key), value[:MAX_TAG]) for key, value in event["tags"].items()]
        for key, model in event.get("versions", {}).items():
            version = self._version_of(model, event["time"])
            if version is not None:
                tags.append(RunTag(tag_name(key), f"models:/{model['name']}/{version}"))
        self._log_batch(run_id, tags=tags)

    def _version_of(self, model: dict[str, str], time_ms: int) -> int | None:
        """The newest version that holds a model's content; None where there is none."""
        self._settle(model["name"], time_ms)
        found = self._store.client.search_model_versions(f"name = '{model['name']}'", max_results=1000)
        same = [int(one.version) for one in found if one.tags.get("model_sha256") == model["sha256"]]
        return max(same, default=None)

    def _op_model(self, run_id: str, event: dict[str, Any]) -> int:
        """A version of a registered model; the same bytes from the same run are the same version again."""
        self._settle(event["name"], event["time"])
        parent = self._version_of(event["parent"], event["time"]) if event.get("parent") else None
        kept = self._folder / event["path"]
        version = log_model(
            self._store, run_id, _content(kept, event["origin"]), event["kind"], event["name"],
            metrics=event["metrics"], tags=event["tags"] | ({"parent_version": str(parent)} if parent else {}),
            step=event["step"], input_example=event["input_example"],
            description=event["description"].replace(PARENT, str(parent) if parent else "?"),
            scratch=events_path(self._folder).parent, time_ms=event["time"],
        )  # fmt: skip
        remove_folder(kept.parent)
        return version

    def _op_params(self, run_id: str, event: dict[str, Any]) -> None:
        """Parameters never change in MLflow: a resumed run with another value keeps the first, and says so."""
        from mlflow.entities import Param, RunTag

        known = self._store.client.get_run(run_id).data.params
        new = [Param(key, value[:MAX_VALUE]) for key, value in event["params"].items() if key not in known]
        for start in range(0, len(new), MAX_PARAMS):
            self._log_batch(run_id, params=new[start : start + MAX_PARAMS])
        changed = {key: value for key, value in event["params"].items() if known.get(key, value) != value}
        if changed:
            self._log_batch(run_id, tags=[RunTag("changed_params", json.dumps(changed)[:MAX_TAG])])
            log.warning("resumed with other values, kept as tag 'changed_params': %s", ", ".join(changed))

    def _log_batch(self, run_id: str, *, params: Sequence[Any] = (), tags: Sequence[Any] = ()) -> None:
        self._store.client.log_batch(run_id, params=params, tags=tags, synchronous=True)

    def _op_alias(self, run_id: str, event: dict[str, Any]) -> None:
        """A move that was made when it was recorded: made again in a store that lost it, never against a later one."""
        registry, name, alias = Registry(self._store), event["model"]["name"], event["alias"]
        version = self._version_of(event["model"], event["time"])
        present = registry.by_alias(name, alias)
        if version is None or (present is not None and present.version == version):
            return
        if present is None or moved_at(present, alias) <= event["time"]:
            registry.set_alias(name, alias, version, time_ms=event["time"])
            registry.tag_version(name, version, event["tags"])

    def _op_artifact(self, run_id: str, event: dict[str, Any]) -> None:
        kept = self._folder / event["path"]
        if not kept.exists() and kept.parent.exists():
            raise DataError(f"{kept} does not exist any more")
        path = _content(kept, event.get("origin", ""))
        if not path.exists():
            return  # sent by a process that was killed before it noted that
        target = event.get("folder") or None
        self._clear_broken_uploads(run_id)
        if path.is_dir():
            inner = f"{target}/{path.name}" if target else path.name
            self._store.client.log_artifacts(run_id, str(path), artifact_path=inner)
        else:
            self._store.client.log_artifact(run_id, str(path), artifact_path=target)
        fault("artifact.sent")
        remove_folder(kept.parent)

    def _op_text(self, run_id: str, event: dict[str, Any]) -> None:
        """As MLflow's `log_text`, whose temporaries stay in the system's folder when a kill ends it."""
        self._clear_broken_uploads(run_id)
        name = PurePosixPath(event["name"])
        folder = str(name.parent) if name.parent.name else None
        scratch = make_folder(events_path(self._folder).parent)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=scratch) as temporary:
            path = Path(temporary, name.name)
            path.write_text(event["text"], encoding="utf-8")
            self._store.client.log_artifact(run_id, str(path), artifact_path=folder)

    def _clear_broken_uploads(self, run_id: str) -> None:
        """Before the first upload to a run, since a record whose upload was killed is delivered again."""
        if run_id not in self._cleared:
            self._cleared.add(run_id)
            folder = local_artifacts(self._store.client.get_run(run_id).info.artifact_uri, run_id)
            if folder is not None:
                clear_broken_uploads(folder, self._began)

    def _op_dataset(self, run_id: str, event: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=event["name"],
            digest=event["digest"][:36],  # all that MLflow keeps; the whole one is in the profile
            source_type="local",
            source=json.dumps({"uri": event["path"]}),
            profile=json.dumps({**event.get("profile", {}), "digest": event["digest"]}),
        )
        tags = [InputTag("mlflow.data.context", event["context"])]
        self._store.client.log_inputs(run_id, [DatasetInput(dataset, tags)])

    def _op_traces(self, run_id: str, event: dict[str, Any]) -> None:
        send_traces(self._store, run_id, event["rows"], time_ms=event["time"], model=event.get("model", ""))


def _content(kept: Path, origin: str) -> Path:
    """Place of an artifact or a model: the journal's copy, or, where that was delivered before, what it came from.

    A stage's folder loses the ending `.open` when it has finished.
    """
    if kept.exists() or not origin:
        return kept
    finished = [part.removesuffix(".open") for part in Path(origin).parts]
    return next((path for path in (Path(origin), Path(*finished)) if path.exists()), kept)
