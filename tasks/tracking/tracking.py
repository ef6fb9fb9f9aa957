"""Tracking: one store, its runs, and the registry beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError, DataError, FolderBusy
from rl_core.storage.faults import inject_fault
from tasks.tracking.journal import DeliveryCursor
from tasks.tracking.registry import ModelRegistry, ModelVersion
from tasks.tracking.replay import (
    UndeliveredCounts,
    count_undelivered,
    deliver_journal,
    list_journals,
)
from tasks.tracking.run_tracker import ProgressCallback, RunTracker, record_alias_move
from tasks.tracking.store import TrackingCost, TrackingStore
from tasks.tracking.values import SECONDS_TAG, VersionByContent, replace_sentence, shorten_result

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRow:
    """One line of the list of runs."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    start_time: float  # seconds since the epoch
    # spent on it in all its processes; None = still running, or killed without a word
    seconds: float | None
    parent_run_id: str | None
    url: str
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each
    params: dict[str, str] = field(default_factory=dict)  # settings, flat


class Tracking:
    """Runs and registry of one store. Construction opens nothing: MLflow is imported at the first use."""

    def __init__(self, uri: str | None, output: Path, experiment: str = "posttrain") -> None:
        """`uri` None: MLFLOW_TRACKING_URI, else sqlite and artifacts in `output`/mlflow."""
        self.output = Path(output).resolve()
        self.store = TrackingStore(uri, self.output, experiment)
        self.registry = ModelRegistry(self.store)

    @property
    def uri(self) -> str:
        """The store's address, without its password."""
        return self.store.label

    @property
    def experiment_id(self) -> str:
        """The experiment's id; it is created where it is missing. Raises: BackendError."""
        return self.store.experiment_id

    def build_run_url(self, run_id: str, *, tab: str = "") -> str:
        """The page of a run: on the server, or where `posttrain ui` will serve a local store; "" while it is away.

        tab: of that page, such as model-metrics, traces or artifacts/report.html.
        """
        return self._build_url(lambda: self.store.build_run_url(run_id, tab=tab)) if run_id else ""

    def build_charts_url(self, stage: str) -> str:
        """Charts of the runs of a stage that trains, success first; "" while the store is away."""
        return self._build_url(lambda: self.store.build_charts_url(stage))

    def build_runs_url(self) -> str:
        """The table of this experiment's runs; "" while the store is away."""
        return self._build_url(self.store.build_runs_url)

    def _build_url(self, make: Callable[[], str]) -> str:
        try:
            return make()
        except BackendError as error:
            log.debug("no page yet: %s", error)
            return ""

    def find_run_page(self, run_id: str) -> str:
        """As `run_url`, for a run of any experiment; "" where the store does not know it."""
        try:
            with self.store.translate_errors("look up a run"):
                return self.store.build_run_url(
                    run_id, self.store.client.get_run(run_id).info.experiment_id
                )
        except DataError:
            return ""

    @property
    def cost(self) -> TrackingCost:
        """Seconds that tracking has taken so far."""
        return self.store.cost

    def resolve_model(self, reference: str, cache_folder: Path) -> Path | str:
        """As `Registry.resolve_model`."""
        return self.registry.resolve_model(reference, cache_folder)

    def list_versions(self, name: str) -> list[ModelVersion]:
        """All versions of a registered model, the oldest first."""
        return self.registry.list_versions(name)

    def find_champion(self, name: str) -> ModelVersion | None:
        """The version that passed the promotion gate last."""
        return self.registry.find_champion(name)

    def set_champion(self, name: str, version: int) -> None:
        """Move the alias `champion`."""
        self.registry.set_champion(name, version)

    def replace_champion(self, name: str, version: int, before: int | None) -> bool:
        """Move the alias `champion` if it still stands on `before`; returns True if it was moved."""
        return self.registry.replace_champion(name, version, before)

    def set_challenger(self, name: str, version: int) -> None:
        """Move the alias `challenger`."""
        self.registry.set_challenger(name, version)

    def tag_version(self, name: str, version: int, tags: Mapping[str, Any]) -> None:
        """Attach short texts to a version."""
        self.registry.tag_version(name, version, dict(tags))

    def read_model_tags(self, name: str) -> dict[str, str]:
        """Tags of the registered model itself."""
        return self.registry.read_model_tags(name)

    def tag_model(self, name: str, key: str, value: str) -> None:
        """Set a tag of the registered model itself."""
        self.registry.tag_model(name, key, value)

    def download_version(self, name: str, version: int, cache_folder: Path) -> Path:
        """The Hugging Face folder of a version, on this machine."""
        return self.registry.download_version(
            self.registry.fetch_version(name, version), cache_folder
        )

    def find_journal(self, version: ModelVersion) -> Path | None:
        """Folder of the journal of the run that made a version; None where it is not here."""
        if version.run_id is None:
            return None
        return next(
            (
                f
                for f in list_journals(self.output)
                if DeliveryCursor.load(f).run_id == version.run_id
            ),
            None,
        )

    def record_alias_move(
        self, version: ModelVersion, alias: str, tags: Mapping[str, Any]
    ) -> Path | None:
        """Record that an alias is about to move, in the journal of the run that made the version.

        A store that loses its database gets the move again; one that was recorded and not made is made on delivery.
        Returns: the journal's folder, to be delivered (`replay`) when the move is made; None where it is not here.
        """
        folder = self.find_journal(version)
        if folder is None or "model_sha256" not in version.tags:
            return None
        try:
            record_alias_move(
                folder, alias, VersionByContent(version.name, version.tags["model_sha256"]), tags
            )
        except FolderBusy:
            log.warning(
                "%s is being written: the move of '%s' is in the store alone", folder, alias
            )
            return None
        inject_fault("hand.recorded")
        return folder

    def start_run(
        self,
        name: str,
        folder: Path,
        *,
        parent_run_id: str | None = None,
        parent_folder: Path | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
        params: Any = None,
        description: str = "",
        on_progress: Iterable[ProgressCallback] = (),
        system_metrics_seconds: float | None = None,
        wait_s: float = 20.0,
        interval_s: float = 2.0,
    ) -> RunTracker:
        """Start the run of a folder, or go on with it: a folder that was tracked before stays the same run.

        Never fails because the store is down: the run is created as soon as the store answers, and its parent may be
        given by `parent_folder` when the parent's id is not known yet.

        Args:
            run_id: take over this existing MLflow run instead of creating one.
            params: settings (nested mapping or dataclass), kept as flat parameters.
            description: markdown for the run's page.
            on_progress: called with (done, total, message) at every `progress`.
            system_metrics_seconds: seconds between readings of CPU, memory and GPU; None or 0 = no readings.
            wait_s: wait at most this long for the run's id; a store that refuses the connection ends the wait.
            interval_s: seconds between deliveries.
        Raises: FolderBusy when another process tracks into the folder.
        """
        with self.store.cost.count_waiting():
            return self._start_run(
                name,
                folder,
                tags,
                params,
                description,
                wait_s,
                parent_run_id=parent_run_id,
                parent_folder=parent_folder,
                run_id=run_id,
                on_progress=on_progress,
                system_metrics_seconds=system_metrics_seconds,
                interval_s=interval_s,
            )

    def _start_run(
        self,
        name: str,
        folder: Path,
        tags: Mapping[str, Any] | None,
        params: Any,
        description: str,
        wait_s: float,
        **options: Any,
    ) -> RunTracker:
        self.store.import_mlflow()  # here and not on the thread: two threads importing at once can deadlock
        run = RunTracker(self.store, name, Path(folder), **options)
        if tags:
            run.set_tags(tags)
        if params:
            run.log_params(params)
        if description:
            run.set_description(description)
        run.wait_started(min(wait_s, 2.0) if self.store.is_unreachable else wait_s)
        return run

    def replace_run_sentence(
        self, run_id: str, old: str, new: str, tags: Mapping[str, str]
    ) -> None:
        """Put `new` where a run's result and description say `old`, and set tags. Raises: DataError, BackendError."""
        with self.store.translate_errors("note a decision"):
            found = self.store.client.get_run(run_id).data.tags
            result, note = found.get("result", ""), found.get("mlflow.note.content", "")
            changed = dict(tags)
            changed["result"] = shorten_result(replace_sentence(result, old, new, new))
            if note:
                changed["mlflow.note.content"] = replace_sentence(
                    note, old, new, f"{new}\n\n{note}"
                )
            for key, value in changed.items():
                self.store.client.set_tag(run_id, key, value[:5000])

    def deliver_journal(self, folder: Path) -> int:
        """Deliver what waits in the folder of a finished or killed run; returns how many records still wait.

        Raises: FolderBusy while the run is alive.
        """
        self.store.import_mlflow()
        return deliver_journal(self.store, Path(folder))

    def deliver_all_journals(self, root: Path | None = None) -> int:
        """`replay` for every run folder under `root` (default: the output folder), outer ones first.

        A store that does not answer is asked once; returns how many records still wait.
        """
        return self.deliver_journals(list_journals(root or self.output))

    def deliver_journals(self, folders: Iterable[Path]) -> int:
        """`deliver_all_journals` for these run folders, outer ones first."""
        left = 0
        self.store.is_unreachable = False
        for folder in folders:
            if self.store.is_unreachable:
                left += count_undelivered(folder).total
                continue
            try:
                left += self.deliver_journal(folder)
            except FolderBusy:
                continue  # alive; it delivers itself
        return left

    def count_undelivered(self, root: Path | None = None) -> UndeliveredCounts:
        """Records under `root` (default: the output folder) that the store has not taken yet."""
        return sum(
            (count_undelivered(folder) for folder in list_journals(root or self.output)),
            UndeliveredCounts(),
        )

    def list_runs(self, limit: int = 200) -> list[RunRow]:
        """The newest runs of all experiments, newest first. Raises: BackendError when the store does not answer."""
        with self.store.translate_errors("list runs"):
            experiments = [
                found.experiment_id
                for found in self.store.client.search_experiments(max_results=1000)
            ]
            runs = self.store.client.search_runs(
                experiments, order_by=["attributes.start_time DESC"], max_results=limit
            )
        return [self._build_row(run) for run in runs]

    def _build_row(self, run: Any) -> RunRow:
        info, tags = run.info, run.data.tags
        return RunRow(
            run_id=info.run_id,
            name=info.run_name or info.run_id,
            status=info.status,
            start_time=info.start_time / 1000,
            seconds=_compute_seconds(info, tags),
            parent_run_id=tags.get("mlflow.parentRunId"),
            url=self.store.build_run_url(info.run_id, info.experiment_id),
            tags={key: value for key, value in tags.items() if not key.startswith("mlflow.")},
            metrics=dict(run.data.metrics),
            params=dict(run.data.params),
        )


def _compute_seconds(info: Any, tags: Mapping[str, str]) -> float | None:
    """Time spent on a run: as noted at its end, else all from its beginning to its end."""
    # one that goes on keeps the end of its last process
    if info.status == "RUNNING" or not info.end_time:
        return None
    try:
        return float(tags[SECONDS_TAG])
    except (KeyError, ValueError):
        return float(info.end_time - info.start_time) / 1000
