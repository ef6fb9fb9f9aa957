"""Tracking: one store, its runs, and its model registry."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError, DataError, FolderBusy
from rl_core.storage.faults import inject_fault
from tasks.command_hints import format_posttrain_command
from tasks.tracking.experiment_view import VIEW_TAG
from tasks.tracking.journal import DeliveryCursor
from tasks.tracking.registry import ModelRegistry, ModelVersion
from tasks.tracking.replay import (
    UndeliveredCounts,
    count_undelivered,
    deliver_journal,
    list_journals,
)
from tasks.tracking.run_ids import NamedRun, assign_short_ids, list_named_runs
from tasks.tracking.run_reading import TrackedRun, read_stored_runs
from tasks.tracking.run_tracker import ProgressCallback, RunTracker, record_alias_move
from tasks.tracking.sink import RUN_KEY_TAG
from tasks.tracking.store import TrackingCost, TrackingStore
from tasks.tracking.values import SECONDS_TAG, VersionByContent, replace_sentence, shorten_result

log = logging.getLogger(__name__)

_WHOLE_KINDS = ("pipeline", "stage", "trial", "evaluation", "sweep")  # "stage": a run of one stage


@dataclass(frozen=True)
class RunRow:
    """Row of the list of runs."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    start_time: float  # seconds since the epoch
    seconds: float | None  # spent on it in all its processes; None = running or crashed
    parent_run_id: str | None
    url: str
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # newest value of each
    params: dict[str, str] = field(default_factory=dict)  # flat settings
    key: str = ""  # made when the run began; the short id consists of its first digits
    short_id: str = ""  # demo-7f3a; "" = a part of a run

    @property
    def pipeline(self) -> str:
        """Name of its pipeline."""
        return self.tags.get("pipeline") or self.name.partition(" · ")[0]

    @property
    def is_whole_run(self) -> bool:
        """True for a pipeline's run, a sweep or a trial; False for a stage of one, and for records of other kinds."""
        return self.tags.get("kind") in _WHOLE_KINDS and "stage" not in self.tags


class Tracking:
    """Runs and registry of one store. Construction opens nothing: MLflow is imported at the first use."""

    def __init__(self, uri: str | None, output: Path, experiment: str = "posttrain") -> None:
        """Choose the store. `uri` None: MLFLOW_TRACKING_URI, else sqlite and artifacts in `output`/mlflow."""
        self.output = Path(output).resolve()
        self.store = TrackingStore(uri, self.output, experiment)
        self.registry = ModelRegistry(self.store)

    @property
    def uri(self) -> str:
        """The store's address, without its password."""
        return self.store.label

    @property
    def experiment_id(self) -> str:
        """Id of the experiment, which is created if missing. Raises: BackendError."""
        return self.store.experiment_id

    def build_run_link(self, run_id: str, *, tab: str = "") -> str:
        """Return the link to a run's page for descriptions in MLflow, relative; "" if the store is unreachable.

        Args:
            tab: tab of that page, such as model-metrics, traces or artifacts/report.html.
        """
        return (
            self._build_link(lambda: self.store.build_run_link(run_id, tab=tab)) if run_id else ""
        )

    def build_charts_link(self, stage: str) -> str:
        """Return the link to the charts of the runs of a training stage, success first; "" as for `build_run_link`."""
        return self._build_link(lambda: self.store.build_charts_link(stage))

    def build_run_url(self, run_id: str) -> str:
        """Return the address of a run's page; "" if the store is unreachable, or nobody serves its pages."""
        link = self.build_run_link(run_id)
        return self.store.resolve_link(link) if link else ""

    def build_runs_url(self) -> str:
        """Return the address of the table of this experiment's runs; "" as for `build_run_url`."""
        link = self._build_link(self.store.build_runs_link)
        return self.store.resolve_link(link) if link else ""

    def find_newest_runs_url(self) -> str:
        """Return the address of the table of runs of the pipeline that ran last; "" if none did, or no page answers.

        Each pipeline has an experiment of its own unless its configuration names another.
        """
        try:
            with self.store.translate_errors("list experiments"):
                names = {
                    experiment.experiment_id: experiment.name
                    for experiment in self.store.client.search_experiments(max_results=1000)
                    if VIEW_TAG in experiment.tags
                }
                newest = ["attributes.start_time DESC"]
                runs = self.store.client.search_runs([*names], order_by=newest, max_results=1)
        except BackendError as error:
            log.debug("no page yet: %s", error)
            return ""
        if not names or not runs:
            return ""
        store = self.store.select_experiment(names[runs[0].info.experiment_id])
        return store.resolve_link(store.build_runs_link())

    @property
    def serves_pages(self) -> bool:
        """True if the tracking server, or `posttrain ui` for a local store, shows the runs."""
        return bool(self.store.resolve_link(""))

    def format_run_reference(self, run_id: str, words: str = "MLflow run", *, tab: str = "") -> str:
        """Format a link to a run's page for other pages (Markdown).

        Returns: the link, or the command that shows the run while nobody serves a local store's pages; "" if the
            store is unreachable.
        """
        link = self.build_run_link(run_id, tab=tab)
        if not link:
            return ""
        if address := self.store.resolve_link(link):
            return f"[{words}]({address})"
        return f"{words}: `{format_posttrain_command('ui', self.output)}` shows it"

    def _build_link(self, build: Callable[[], str]) -> str:
        try:
            return build()
        except BackendError as error:
            log.debug("no page yet: %s", error)
            return ""

    def find_run_page(self, run_id: str) -> str:
        """Return the page of a run of any experiment; "" if the store does not have it, or nobody serves its pages."""
        try:
            with self.store.translate_errors("look up a run"):
                run = self.store.client.get_run(run_id)
                return self.store.resolve_link(
                    self.store.build_run_link(run_id, run.info.experiment_id)
                )
        except DataError:
            return ""

    @property
    def cost(self) -> TrackingCost:
        """Seconds that tracking has taken so far."""
        return self.store.cost

    def resolve_model(self, reference: str, cache_folder: Path) -> Path | str:
        """Resolve a model like `ModelRegistry.resolve_model`."""
        return self.registry.resolve_model(reference, cache_folder)

    def list_versions(self, name: str) -> list[ModelVersion]:
        """List all versions of a registered model, oldest first."""
        return self.registry.list_versions(name)

    def find_champion(self, name: str) -> ModelVersion | None:
        """Return the version that passed the promotion gate last."""
        return self.registry.find_champion(name)

    def set_champion(self, name: str, version: int) -> None:
        """Move the alias `champion`."""
        self.registry.set_champion(name, version)

    def replace_champion(self, name: str, version: int, before: int | None) -> bool:
        """Move the alias `champion` if it is still on `before`; return whether it is on `version` now."""
        return self.registry.replace_champion(name, version, before)

    def set_challenger(self, name: str, version: int) -> None:
        """Move the alias `challenger`."""
        self.registry.set_challenger(name, version)

    def tag_version(self, name: str, version: int, tags: Mapping[str, Any]) -> None:
        """Set tags of a version."""
        self.registry.tag_version(name, version, dict(tags))

    def read_model_tags(self, name: str) -> dict[str, str]:
        """Return the tags of the registered model itself."""
        return self.registry.read_model_tags(name)

    def tag_model(self, name: str, key: str, value: str) -> None:
        """Set a tag of the registered model itself."""
        self.registry.tag_model(name, key, value)

    def download_version(self, name: str, version: int, cache_folder: Path) -> Path:
        """Return the Hugging Face folder of a version, downloaded if it is not on this machine."""
        return self.registry.download_version(
            self.registry.fetch_version(name, version), cache_folder
        )

    def find_journal(self, version: ModelVersion) -> Path | None:
        """Return the journal folder of the run that created a version; None if it is not on this machine."""
        if version.run_id is None:
            return None
        for folder in list_journals(self.output):
            if DeliveryCursor.load(folder).run_id == version.run_id:
                return folder
        return None

    def record_alias_move(
        self, version: ModelVersion, alias: str, tags: Mapping[str, Any]
    ) -> Path | None:
        """Record that an alias is about to move, in the journal of the run that created the version.

        A store that loses its database gets the move again. A move that was recorded but not made is made on delivery.
        Returns: the journal's folder, to be delivered (`deliver_journal`) after the move; None if it is not on this
            machine.
        """
        folder = self.find_journal(version)
        if folder is None or "model_sha256" not in version.tags:
            return None
        content = VersionByContent(version.name, version.tags["model_sha256"])
        try:
            record_alias_move(folder, alias, content, tags)
        except FolderBusy:
            log.warning("%s is being written: the move of '%s' is only in the store", folder, alias)
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
        delivers_system_metrics: bool = True,
        wait_s: float = 20.0,
        interval_s: float = 2.0,
    ) -> RunTracker:
        """Start the run of a folder, or resume it: a folder that was tracked before stays the same run.

        Never fails because the store is unreachable: the run is created once the store answers. Name its parent by
        `parent_folder` if the parent's id is not known yet.

        Args:
            run_id: take over this existing MLflow run instead of creating one.
            params: settings (nested mapping or dataclass), stored as flat parameters.
            description: markdown for the run's page.
            on_progress: called with (done, total, message) at every `progress`.
            system_metrics_seconds: seconds between readings of CPU, memory and GPU; None or 0 = no readings.
            delivers_system_metrics: False: they are for the live page alone; MLflow would list them before results.
            wait_s: longest wait for the run's id; a store that refuses the connection ends the wait.
            interval_s: seconds between deliveries.
        Raises: FolderBusy if another process tracks into the folder.
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
                delivers_system_metrics=delivers_system_metrics,
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
        self.store.import_mlflow()  # not in the shipper's thread: concurrent imports can deadlock
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
        """Replace the sentence `old` by `new` in a run's result and description, and set tags.

        Raises: DataError, BackendError.
        """
        with self.store.translate_errors("note a decision"):
            run_tags = self.store.client.get_run(run_id).data.tags
            result, note = run_tags.get("result", ""), run_tags.get("mlflow.note.content", "")
            changed = dict(tags)
            changed["result"] = shorten_result(replace_sentence(result, old, new, new))
            if note:
                changed["mlflow.note.content"] = replace_sentence(
                    note, old, new, f"{new}\n\n{note}"
                )
            for key, value in changed.items():
                self.store.client.set_tag(run_id, key, value[:5000])

    def deliver_journal(self, folder: Path) -> int:
        """Deliver the rest of a finished or crashed run's folder; return the number of records that still wait.

        Raises: FolderBusy while the run is live.
        """
        self.store.import_mlflow()
        return deliver_journal(self.store, Path(folder))

    def deliver_all_journals(self, root: Path | None = None) -> int:
        """Deliver every run folder under `root` (default: the output folder), outer ones first.

        An unreachable store is asked only once. Return the number of records that still wait.
        """
        return self.deliver_journals(list_journals(root or self.output))

    def deliver_journals(self, folders: Iterable[Path]) -> int:
        """Deliver these run folders, like `deliver_all_journals`."""
        num_waiting = 0
        self.store.is_unreachable = False
        for folder in folders:
            if self.store.is_unreachable:
                num_waiting += count_undelivered(folder).total
                continue
            try:
                num_waiting += self.deliver_journal(folder)
            except FolderBusy:
                continue  # a live run, which delivers its journal
        return num_waiting

    def count_undelivered(self, root: Path | None = None) -> UndeliveredCounts:
        """Count the records under `root` (default: the output folder) that the store has not accepted yet."""
        return sum(
            (count_undelivered(folder) for folder in list_journals(root or self.output)),
            UndeliveredCounts(),
        )

    def list_runs(self, limit: int = 200) -> list[RunRow]:
        """List the newest runs of all experiments, newest first. Raises: BackendError if the store does not answer.

        A sqlite file and a plain server are read without MLflow, whose import takes seconds.
        """
        with self.store.translate_errors("list runs"):
            runs = read_stored_runs(self.store.uri, limit)
            if runs is None:
                runs = self._search_runs(limit)
        address = self.store.resolve_link("")
        return self._add_short_ids([self._build_row(run, address) for run in runs])

    def _add_short_ids(self, rows: Sequence[RunRow]) -> list[RunRow]:
        """Add the short ids to whole runs: those of the output folder, and of others that the store has."""
        named = list_named_runs(self.output)
        known = {run.key for run in named}
        others = [
            NamedRun("", row.pipeline, row.name, row.key)
            for row in reversed(rows)
            if row.is_whole_run and row.key not in known
        ]
        ids = {run.key: run.short_id for run in (*named, *assign_short_ids(others, named))}
        return [
            dataclasses.replace(row, short_id=ids[row.key]) if row.is_whole_run else row
            for row in rows
        ]

    def _search_runs(self, limit: int) -> list[TrackedRun]:
        """Search the newest runs with MLflow's client."""
        experiments = [
            experiment.experiment_id
            for experiment in self.store.client.search_experiments(max_results=1000)
        ]
        runs = self.store.client.search_runs(
            experiments, order_by=["attributes.start_time DESC"], max_results=limit
        )
        return [
            TrackedRun(
                run_id=run.info.run_id,
                name=run.info.run_name or "",
                status=run.info.status,
                start_ms=run.info.start_time,
                end_ms=run.info.end_time,
                experiment_id=run.info.experiment_id,
                tags=dict(run.data.tags),
                metrics=dict(run.data.metrics),
                params=dict(run.data.params),
            )
            for run in runs
        ]

    def _build_row(self, run: TrackedRun, address: str) -> RunRow:
        link = self.store.build_run_link(run.run_id, run.experiment_id)
        return RunRow(
            run_id=run.run_id,
            name=run.name or run.run_id,
            status=run.status,
            start_time=run.start_ms / 1000,
            seconds=_compute_seconds(run),
            parent_run_id=run.tags.get("mlflow.parentRunId"),
            url=f"{address}{link}" if address else "",
            tags={key: value for key, value in run.tags.items() if not key.startswith("mlflow.")},
            metrics=run.metrics,
            params=run.params,
            key=run.tags.get(RUN_KEY_TAG, run.run_id),
        )


def _compute_seconds(run: TrackedRun) -> float | None:
    """Return the time spent on a run as recorded at its end, otherwise the time from start to end."""
    # A resumed run still has the end time of its last process.
    if run.status == "RUNNING" or not run.end_ms:
        return None
    try:
        return float(run.tags[SECONDS_TAG])
    except (KeyError, ValueError):
        return float(run.end_ms - run.start_ms) / 1000
