"""Delivery of the journals of runs that have ended: outer runs first, model versions in order.

The store numbers versions in the order in which it receives models. Before a record that creates a version, or names
one by its content, every older model of that name is delivered, from whichever journal holds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError, FolderBusy
from rl_core.storage.faults import inject_fault
from tasks.tracking.journal import (
    DeliveryCursor,
    LineLog,
    MetricsJournal,
    build_events_path,
    build_metrics_path,
    clear_journal,
    read_lines,
)
from tasks.tracking.shipper import Shipper
from tasks.tracking.sink import MlflowSink
from tasks.tracking.store import TrackingStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UndeliveredCounts:
    """Numbers of records that no tracking store has accepted yet."""

    metrics: int = 0  # lines
    others: int = 0
    models: int = 0  # subset of `others` that become model versions

    @property
    def total(self) -> int:
        """Number of all records."""
        return self.metrics + self.others

    def __add__(self, other: UndeliveredCounts) -> UndeliveredCounts:
        return UndeliveredCounts(
            self.metrics + other.metrics, self.others + other.others, self.models + other.models
        )

    def __str__(self) -> str:
        counts = (
            (self.metrics, "line", " of metrics"),
            (self.models, "model version", ""),
            (self.others - self.models, "other record", ""),
        )
        metrics, models, others = (
            f"{number} {noun}{'' if number == 1 else 's'}{suffix}"
            for number, noun, suffix in counts
        )
        return f"{metrics}, {models} and {others}"


def list_journals(root: Path) -> Iterator[Path]:
    """Yield the folders of all journals under `root`, outer ones first. Runs may rename and remove folders."""
    events = build_events_path(root).relative_to(root)  # .tracking/events.jsonl
    folders = [
        Path(path).parent
        for path, _, files in os.walk(root)
        if os.path.basename(path) == events.parent.name and events.name in files
    ]
    yield from sorted(folders, key=lambda folder: (len(folder.parts), folder))


def read_start_record(folder: Path) -> dict[str, Any]:
    """Return the first record of a journal; {} if there is none yet."""
    return next((record for record, _ in read_lines(build_events_path(folder))), {})


def count_undelivered(folder: Path) -> UndeliveredCounts:
    """Count the undelivered records of one journal, also of a live run."""
    cursor = DeliveryCursor.load(folder)
    metrics_path, events_path = build_metrics_path(folder), build_events_path(folder)
    if (
        _read_file_size(metrics_path) <= cursor.metrics_offset
        and _read_file_size(events_path) <= cursor.events_offset
    ):
        return UndeliveredCounts()
    num_metrics = sum(1 for _ in read_lines(metrics_path, cursor.metrics_offset))
    ops = [record.get("op") for record, _ in read_lines(events_path, cursor.events_offset)]
    return UndeliveredCounts(num_metrics, len(ops), ops.count("model"))


def _read_file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def connect_sink(store: TrackingStore, folder: Path) -> MlflowSink:
    """Connect the sink of one run folder."""
    return MlflowSink(
        store, folder, lambda name, time_ms: _deliver_older_models(store, folder, name, time_ms)
    )


def _deliver_older_models(store: TrackingStore, folder: Path, name: str, time_ms: int) -> None:
    """Deliver models called `name` that other journals recorded before `time_ms`. Raises: BackendError if one waits."""
    for other in list_journals(store.output):
        if other == folder or not _has_older_model(store, other, name, time_ms):
            continue
        try:
            num_waiting = deliver_journal(store, other)
        except FolderBusy:
            num_waiting = 1  # a live run, which delivers its journal
        if num_waiting and _has_older_model(store, other, name, time_ms):
            raise BackendError(f"an older version of {name} waits in {other}")


def _has_older_model(store: TrackingStore, folder: Path, name: str, time_ms: int) -> bool:
    first = _find_first_model_time(store, folder, name)
    return first is not None and first < time_ms


def _find_first_model_time(store: TrackingStore, folder: Path, name: str) -> int | None:
    """Find the time of the first model called `name` that a journal has not delivered, or that the store has lost."""
    cursor = DeliveryCursor.load(folder)
    store = store.select_experiment(read_start_record(folder).get("experiment"))
    is_same_store = cursor.store == store.label and cursor.identity in ("", store.identity)
    offset = cursor.events_offset if is_same_store else 0
    if _read_file_size(build_events_path(folder)) <= offset:
        return None
    records = (record for record, _ in read_lines(build_events_path(folder), offset))
    times = (
        record["time"]
        for record in records
        if record.get("op") == "model" and record.get("name") == name
    )
    return next(times, None)


def deliver_journal(store: TrackingStore, folder: Path) -> int:
    """Deliver the rest of a finished or crashed run's folder; return the number of records that still wait.

    The records go to the experiment for which they were recorded. Everything is sent again to a store other than the
    one it was delivered to, such as a new database at the same address. A run that somebody removed stays removed. The
    folder of a live run is left to that run. Raises: FolderBusy for it.
    """
    if not build_events_path(folder).exists():
        return 0
    folder = folder.resolve()
    start_record = read_start_record(folder)
    store = store.select_experiment(start_record.get("experiment"))
    events = LineLog(build_events_path(folder))
    try:
        journal = MetricsJournal(folder)
        try:
            shipper = Shipper(folder, journal, events, lambda: connect_sink(store, folder))
            clear_journal(folder, shipper.state.events_offset)
            try:
                if not shipper.is_drained or not _is_delivered(
                    store, shipper, bool(start_record.get("experiment"))
                ):
                    _deliver_parent(store, start_record)
                    shipper.deliver_pending()
                    inject_fault("replay.done")
            except BackendError as error:
                log.warning("tracking: %s still waits: %s", folder, error)
                store.is_unreachable = True
                return max(1, sum(shipper.count_waiting()))
            return sum(shipper.count_waiting())
        finally:
            journal.close()
    finally:
        events.close()


def _is_delivered(store: TrackingStore, shipper: Shipper, knows_experiment: bool) -> bool:
    """Return whether this store accepted the whole journal, at whatever address: its experiment has the same mark."""
    state = shipper.state
    if (
        state.store != store.label
        and knows_experiment
        and state.run_id
        and state.identity == store.identity != ""
    ):
        # The store is now at another address. A copy of the database made before the run does not have it.
        if not connect_sink(store, shipper.folder).has_run_or_deleted(state.run_id):
            return False
        state.store = store.label
        state.save(shipper.folder)
    if state.store != store.label or not knows_experiment:
        return state.store == store.label
    if state.identity or state.run_id is None:
        return state.identity == store.identity
    has_run = connect_sink(store, shipper.folder).has_run_or_deleted(state.run_id)
    if has_run:  # delivered by a version that recorded no identity
        state.identity = store.identity
        state.save(shipper.folder)
    return has_run


def _deliver_parent(store: TrackingStore, start_record: dict[str, Any]) -> None:
    """Create the run in which this run is nested, if the store lacks it."""
    if not start_record.get("parent_folder"):
        return
    parent = Path(start_record["parent_folder"])
    cursor = DeliveryCursor.load(parent)
    if cursor.run_id is None or cursor.store != store.label or cursor.identity != store.identity:
        try:
            deliver_journal(store, parent)
        except FolderBusy:
            return  # a live run, which creates its MLflow run
