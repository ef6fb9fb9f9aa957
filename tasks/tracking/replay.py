"""Delivery of what runs that are over left in their journals: outer runs first, model versions in their order.

Versions are numbered by the store, in the order in which it hears of models. So a record that makes a version, or names
one by its model's content, first has every older model of that name delivered, from whichever journal it waits in.
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
    """Records that no tracking store has taken yet."""

    metrics: int = 0  # lines
    others: int = 0
    models: int = 0  # of the others, those that become model versions

    @property
    def total(self) -> int:
        """All of them."""
        return self.metrics + self.others

    def __add__(self, other: UndeliveredCounts) -> UndeliveredCounts:
        return UndeliveredCounts(
            self.metrics + other.metrics, self.others + other.others, self.models + other.models
        )

    def __str__(self) -> str:
        rest = self.others - self.models
        counts = (
            (self.metrics, "line", " of metrics"),
            (self.models, "model version", ""),
            (rest, "other record", ""),
        )
        metrics, models, others = (
            f"{n} {noun}{'' if n == 1 else 's'}{more}" for n, noun, more in counts
        )
        return f"{metrics}, {models} and {others}"


def list_journals(root: Path) -> Iterator[Path]:
    """Folders of all journals under `root`, outer ones first; runs may rename and remove folders meanwhile."""
    name = build_events_path(root).relative_to(root)  # .tracking/events.jsonl
    found = [
        Path(place).parent
        for place, _, files in os.walk(root)
        if os.path.basename(place) == name.parent.name and name.name in files
    ]
    yield from sorted(found, key=lambda folder: (len(folder.parts), folder))


def read_start_record(folder: Path) -> dict[str, Any]:
    """The record with which a journal begins; {} where there is none yet."""
    return next((record for record, _ in read_lines(build_events_path(folder))), {})


def count_undelivered(folder: Path) -> UndeliveredCounts:
    """Records of one journal that wait; of a live run as well."""
    state = DeliveryCursor.load(folder)
    if (
        _read_file_size(build_metrics_path(folder)) <= state.metrics_offset
        and _read_file_size(build_events_path(folder)) <= state.events_offset
    ):
        return UndeliveredCounts()
    metrics = sum(1 for _ in read_lines(build_metrics_path(folder), state.metrics_offset))
    ops = [
        record.get("op") for record, _ in read_lines(build_events_path(folder), state.events_offset)
    ]
    return UndeliveredCounts(metrics, len(ops), ops.count("model"))


def _read_file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def connect_sink(store: TrackingStore, folder: Path) -> MlflowSink:
    """The sink of one run folder."""
    return MlflowSink(
        store, folder, lambda name, time_ms: _deliver_older_models(store, folder, name, time_ms)
    )


def _deliver_older_models(store: TrackingStore, folder: Path, name: str, time_ms: int) -> None:
    """Deliver models called `name` that other journals recorded before `time_ms`. Raises: BackendError if one waits."""
    for other in list_journals(store.output):
        if (
            other != folder
            and (first := _find_first_model_time(store, other, name)) is not None
            and first < time_ms
        ):
            try:
                left = deliver_journal(store, other)
            except FolderBusy:
                left = 1  # alive: it delivers by itself
            if (
                left
                and (after := _find_first_model_time(store, other, name)) is not None
                and after < time_ms
            ):
                raise BackendError(f"an older version of {name} waits in {other}")


def _find_first_model_time(store: TrackingStore, folder: Path, name: str) -> int | None:
    """Time of the first model called `name` that waits in a journal, or that the store has lost."""
    state = DeliveryCursor.load(folder)
    store = store.select_experiment(read_start_record(folder).get("experiment"))
    has_it = state.store == store.label and state.identity in ("", store.identity)
    offset = state.events_offset if has_it else 0
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
    """Deliver what waits in the folder of a run that is over; returns how many records still wait.

    It goes into the experiment that it was recorded for. What was delivered is sent again to a store that is not the
    one it was delivered to, such as a new database at the same address; a run that somebody removed stays removed.
    The folder of a run that is alive is left to that run. Raises: FolderBusy for it.
    """
    if not build_events_path(folder).exists():
        return 0
    folder = folder.resolve()
    start = read_start_record(folder)
    store = store.select_experiment(start.get("experiment"))
    events = LineLog(build_events_path(folder))
    try:
        journal = MetricsJournal(folder)
        try:
            shipper = Shipper(folder, journal, events, lambda: connect_sink(store, folder))
            clear_journal(folder, shipper.state.events_offset)
            try:
                if not shipper.is_drained or not _is_delivered(
                    store, shipper, bool(start.get("experiment"))
                ):
                    _deliver_parent(store, start)
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
    """True = the store that took a whole journal is this one, at whatever address: its experiment has the same mark."""
    state = shipper.state
    if (
        state.store != store.label
        and knows_experiment
        and state.run_id
        and state.identity == store.identity != ""
    ):
        # a copy that was made before the run
        if not connect_sink(store, shipper.folder).has_run_or_deleted(state.run_id):
            return False
        state.store = store.label
        state.save(shipper.folder)
    if state.store != store.label or not knows_experiment:
        return state.store == store.label
    if state.identity or state.run_id is None:
        return state.identity == store.identity
    with_run = connect_sink(store, shipper.folder).has_run_or_deleted(state.run_id)
    if with_run:  # delivered by a version that noted no identity
        state.identity = store.identity
        state.save(shipper.folder)
    return with_run


def _deliver_parent(store: TrackingStore, start: dict[str, Any]) -> None:
    """Create the run that the one of `start` is nested in, where the store lacks it."""
    if not start.get("parent_folder"):
        return
    parent = Path(start["parent_folder"])
    state = DeliveryCursor.load(parent)
    if state.run_id is None or state.store != store.label or state.identity != store.identity:
        try:
            deliver_journal(store, parent)
        except FolderBusy:
            return  # alive: it creates its run by itself
