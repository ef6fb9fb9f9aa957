"""Background thread that delivers a run folder to the tracking store, in order, each record at least once.

Records carry their time stamp and run, and the store keeps one copy of equal records, so at least once amounts to
exactly once. An unreachable store only causes waiting: the offset stays, and the thread backs off and retries.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rl_core.errors import BackendError
from rl_core.storage.faults import inject_fault
from tasks.tracking.journal import (
    DeliveryCursor,
    LineLog,
    MetricsJournal,
    build_events_path,
    read_lines,
)

log = logging.getLogger(__name__)

BATCH_SIZE = 1000  # metrics in a call; MLflow refuses more
MAX_ATTEMPTS = 3  # for a record that the store refuses while it is up
MAX_PAUSE_SECONDS = 30.0  # between attempts while the store is unreachable


class RunNotFound(Exception):
    """Run that the store no longer has."""


class TrackingSink(Protocol):
    """Tracking store as the shipper uses it. BackendError = retry later; any other error = drop the record."""

    store: str

    @property
    def identity(self) -> str:
        """Mark of the store's experiment, which differs for another store at the same address. "" = none."""

    def create_run(self, event: dict[str, Any], *, retried: bool) -> tuple[str, str]:
        """Create the run, or find the one that an earlier attempt created; return its id and its experiment's id."""

    def has_run(self, run_id: str) -> bool:
        """Return whether the run still exists."""

    def store_metrics(self, run_id: str, rows: list[tuple[str, float, int, int]]) -> None:
        """Store at most BATCH_SIZE rows (name, value, time in ms, step)."""

    def store_event(self, run_id: str, event: dict[str, Any]) -> int | None:
        """Store any other record; return the version of a model."""


class Shipper:
    """Delivery of one run folder."""

    def __init__(
        self,
        folder: Path,
        journal: MetricsJournal,
        events: LineLog,
        connect: Callable[[], TrackingSink],
        interval_s: float = 2.0,
        count_cpu: Callable[[float], None] | None = None,
    ) -> None:
        """Load the cursor.

        Args:
            connect: creates the sink; called in the thread, and again after a failure.
            count_cpu: receives the processor seconds of each delivery.
        """
        self.folder = folder
        self.state = DeliveryCursor.load(folder)
        self._journal, self._events, self._connect = journal, events, connect
        self._sink: TrackingSink | None = None
        self._interval_s = interval_s
        self._count_cpu = count_cpu
        self._wake = threading.Event()
        # the first attempt to create the run has ended
        self._first_attempt_done = threading.Event()
        self._close_requested = threading.Event()
        self._abandoned = threading.Event()  # the time for the delivery has passed
        self._checked = False
        self._resumed = events.end > 0  # an earlier process recorded to this folder
        self._start_attempts = 0
        self.problem = ""  # of the newest delivery; "" = the store answers
        # record key -> error, of models that the store refused permanently
        self.refused_models: dict[str, Exception] = {}
        self._thread: threading.Thread | None = None

    def start_thread(self) -> None:
        """Start delivering in the background."""
        self._thread = threading.Thread(
            target=self._run_loop, name=f"tracking-{self.folder.name}", daemon=True
        )
        self._thread.start()

    def _run_loop(self) -> None:
        pause = self._interval_s
        while True:
            cpu_before = time.thread_time()
            try:
                self.deliver_pending()
                pause = self._interval_s
            except BackendError as error:
                self._report_problem(str(error))
                pause = min(max(2 * pause, 1.0), MAX_PAUSE_SECONDS)
                if self._close_requested.is_set():
                    pause = min(pause, 0.5)
            except Exception:  # an error of tracking never ends a training run
                log.exception(
                    "tracking: unexpected error while delivering %s; retrying later", self.folder
                )
                pause = MAX_PAUSE_SECONDS
            finally:
                self._first_attempt_done.set()
                if self._count_cpu is not None:
                    self._count_cpu(time.thread_time() - cpu_before)
            if self._abandoned.is_set() or (self._close_requested.is_set() and self.is_drained):
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _report_problem(self, problem: str) -> None:
        level = logging.DEBUG if self.problem else logging.WARNING  # one warning per outage
        log.log(
            level, "tracking: %s; the run continues, its records wait in %s", problem, self.folder
        )
        self.problem = problem

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the run was created, or the first attempt failed."""
        self._first_attempt_done.wait(timeout_s)

    def request_delivery(self) -> None:
        """Wake the thread to deliver soon."""
        self._wake.set()

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until everything recorded so far is delivered; return False on timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.is_drained:
            if time.monotonic() >= deadline or self._thread is None or not self._thread.is_alive():
                return self.is_drained
            self.request_delivery()
            time.sleep(0.02)
        return True

    def close(self, timeout_s: float) -> bool:
        """Deliver the rest for at most `timeout_s`, then stop; return whether everything was delivered."""
        self._close_requested.set()
        self.request_delivery()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._abandoned.set()
        self.request_delivery()
        return self.is_drained

    @property
    def is_drained(self) -> bool:
        """True if every record is delivered."""
        lines = (self._journal.lines, self._events)
        offsets = (self.state.metrics_offset, self.state.events_offset)
        return all(offset >= line.end for line, offset in zip(lines, offsets, strict=True))

    def count_waiting(self) -> tuple[int, int]:
        """Return the numbers of undelivered metric lines and other records."""
        metrics = read_lines(self._journal.lines.path, self.state.metrics_offset)
        events = read_lines(build_events_path(self.folder), self.state.events_offset)
        return sum(1 for _ in metrics), sum(1 for _ in events)

    def deliver_pending(self) -> None:
        """Deliver everything recorded so far. Raises: BackendError if the store does not answer."""
        self._journal.lines.flush_pending()
        self._events.flush_pending()
        if self._sink is None:
            self._sink = self._connect()
        inject_fault("ship.begin")
        try:
            if not self._ensure_run(self._sink):
                return
            self._deliver_metrics(self._sink)
            self._deliver_events(self._sink)
        except RunNotFound:
            log.warning(
                "tracking: the store lost run %s; it is recorded again from %s",
                self.state.run_id,
                self.folder,
            )
            self._forget_run()
            raise BackendError("the run has to be recorded again") from None
        if self.problem:
            log.warning("tracking: the store answers again; %s is delivered", self.folder)
            self.problem = ""

    def _forget_run(self) -> None:
        self.state = DeliveryCursor()

    def _ensure_run(self, sink: TrackingSink) -> bool:
        if self.state.run_id is not None and not self._checked:
            self._check_known_run(sink, self.state.run_id)
            self._checked = True
        if self.state.run_id is not None:
            return True
        first = next(self._events.read_records(0), None)
        if first is None:
            return False
        self._start_attempts += 1
        # A run may exist although no answer arrived, in this process or in one that was killed.
        retried = self._start_attempts > 1 or self._resumed
        start_record = first[0] or _build_lost_start_record(self.folder)
        run_id, experiment_id = sink.create_run(start_record, retried=retried)
        inject_fault("ship.created")
        self.state = DeliveryCursor(sink.store, run_id, experiment_id, identity=sink.identity)
        self.state.save(self.folder)
        self._checked = True
        return True

    def _check_known_run(self, sink: TrackingSink, run_id: str) -> None:
        """Forget a run that this store does not have; follow a store that is now at another address."""
        has_moved = self.state.store != sink.store
        is_same = not has_moved or (
            self.state.identity != "" and self.state.identity == sink.identity
        )
        if not is_same or not sink.has_run(run_id):
            self._forget_run()
        elif has_moved:  # for example a server that now runs in front of the same database
            self.state.store = sink.store
            self.state.save(self.folder)

    def _deliver_metrics(self, sink: TrackingSink) -> None:
        rows: list[tuple[str, float, int, int]] = []
        offset, num_damaged = self.state.metrics_offset, 0
        for record, end in self._journal.lines.read_records(offset):
            values = {} if record.get("local") else record.get("metrics", {})
            record_rows = [
                (name, float(value), record["time"], record["step"])
                for name, value in values.items()
            ]
            if rows and len(rows) + len(record_rows) > BATCH_SIZE:
                self._send_metrics(sink, rows, offset, num_damaged)
                rows, num_damaged = [], 0
            rows += record_rows
            num_damaged += not record
            offset = end
        self._send_metrics(sink, rows, offset, num_damaged)

    def _send_metrics(
        self,
        sink: TrackingSink,
        rows: list[tuple[str, float, int, int]],
        offset: int,
        num_damaged: int,
    ) -> None:
        for start in range(0, len(rows), BATCH_SIZE):
            self._send_or_split(sink, rows[start : start + BATCH_SIZE])
        if offset > self.state.metrics_offset:
            inject_fault("ship.metrics")
            self.state.metrics_offset = offset
            self.state.num_damaged += num_damaged
            self.state.save(self.folder)

    def _send_or_split(self, sink: TrackingSink, rows: list[tuple[str, float, int, int]]) -> None:
        """Send a batch. If the store refuses it, bisect to find the refused value and skip only that one."""
        assert self.state.run_id is not None
        try:
            sink.store_metrics(self.state.run_id, rows)
        except (BackendError, RunNotFound):
            raise
        except Exception as error:
            if len(rows) > 1:
                self._send_or_split(sink, rows[: len(rows) // 2])
                self._send_or_split(sink, rows[len(rows) // 2 :])
                return
            self._count_failure(f"metric {rows[0]}", error)

    def _deliver_events(self, sink: TrackingSink) -> None:
        assert self.state.run_id is not None
        for event, end in self._events.read_records(self.state.events_offset):
            # A damaged line is empty and needs no attempt.
            for attempt in range(1, MAX_ATTEMPTS + 1) if event else ():
                try:
                    version = sink.store_event(self.state.run_id, event)
                    if version is not None:
                        self.state.versions[event["key"]] = version
                    break
                except (BackendError, RunNotFound):
                    raise
                except Exception as error:
                    if attempt == MAX_ATTEMPTS:
                        label = event.get("path") or event.get("name") or ""
                        if event.get("op") == "model":
                            self.refused_models[event["key"]] = error
                        self._count_failure(f"{event.get('op')} {label}".strip(), error)
                    else:
                        time.sleep(0.05 * attempt)
            inject_fault("ship.event")
            self.state.events_offset = end
            self.state.num_damaged += not event
            self.state.save(self.folder)

    def _count_failure(self, record: str, error: Exception) -> None:
        self.state.num_failed += 1
        log.warning(
            "tracking: %s was refused and skipped (%d so far): %s",
            record,
            self.state.num_failed,
            error,
        )


def _build_lost_start_record(folder: Path) -> dict[str, Any]:
    """Build a start record to replace a damaged one, from name and time of the folder."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    name = folder.name.removesuffix(".tracking")
    time_ms = int(build_events_path(folder).stat().st_mtime * 1000)
    return {"op": "start", "key": digest, "name": name, "time": time_ms}
