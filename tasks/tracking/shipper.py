"""The background thread that delivers a run folder to the tracking store, in order, each record at least once.

Records carry their own time stamp and run, and the store keeps one copy of equal records, so at least once is exactly
once. A store that is down costs nothing but waiting: the offset stays, the thread backs off and tries again.
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
from rl_core.storage.faults import fault
from tasks.tracking.journal import DeliveryCursor, Journal, LineLog, events_path, read_lines

__all__ = ["BATCH", "RunGone", "Shipper", "Sink"]

log = logging.getLogger(__name__)

BATCH = 1000  # metrics of one call; MLflow refuses more
ATTEMPTS = 3  # for a record that the store refuses while it is up
LONGEST_PAUSE = 30.0  # seconds between attempts while the store is down


class RunGone(Exception):
    """The store does not know the run any more."""


class Sink(Protocol):
    """A tracking store as the shipper uses it. BackendError = retry later; any other error = drop the record."""

    store: str

    @property
    def identity(self) -> str:
        """Mark of the store's experiment: another one at the same address is another store. "" = it has none."""

    def start(self, event: dict[str, Any], *, retried: bool) -> tuple[str, str]:
        """Create the run (or find the one an earlier attempt created); returns its id and its experiment's."""

    def knows(self, run_id: str) -> bool:
        """True = the run still exists."""

    def metrics(self, run_id: str, rows: list[tuple[str, float, int, int]]) -> None:
        """Store at most BATCH (name, value, time in ms, step)."""

    def event(self, run_id: str, event: dict[str, Any]) -> int | None:
        """Store anything else; of a model, the version that it became."""


class Shipper:
    """Delivers one run folder."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        events: LineLog,
        connect: Callable[[], Sink],
        interval_s: float = 2.0,
        count_cpu: Callable[[float], None] | None = None,
    ) -> None:
        """`connect` makes the sink; it is called on the thread, and again after it failed.

        `count_cpu` is told the processor seconds of each delivery.
        """
        self.folder = folder
        self.state = DeliveryCursor.load(folder)
        self._journal, self._events, self._connect = journal, events, connect
        self._sink: Sink | None = None
        self._interval_s = interval_s
        self._count_cpu = count_cpu
        self._wake = threading.Event()
        self._tried = threading.Event()  # the first attempt to create the run is over
        self._closing = threading.Event()
        self._abandoned = threading.Event()  # the time to deliver is over
        self._checked = False
        self._resumed = events.end > 0  # an earlier process recorded here
        self._start_attempts = 0
        self.problem = ""  # of the newest delivery; "" = the store answers
        self.refused: dict[str, Exception] = {}  # models that the store refused for good, by the key of their record
        self._thread: threading.Thread | None = None

    # -- the thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start delivering in the background."""
        self._thread = threading.Thread(target=self._loop, name=f"tracking-{self.folder.name}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        pause = self._interval_s
        while True:
            used = time.thread_time()
            try:
                self.ship()
                pause = self._interval_s
            except BackendError as error:
                self._report(str(error))
                pause = min(max(2 * pause, 1.0), LONGEST_PAUSE)
                if self._closing.is_set():
                    pause = min(pause, 0.5)
            except Exception:  # a fault of tracking never ends a training run
                log.exception("tracking: unexpected fault while delivering %s; it is tried again", self.folder)
                pause = LONGEST_PAUSE
            finally:
                self._tried.set()
                if self._count_cpu is not None:
                    self._count_cpu(time.thread_time() - used)
            if self._abandoned.is_set() or (self._closing.is_set() and self.drained):
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _report(self, problem: str) -> None:
        level = logging.DEBUG if self.problem else logging.WARNING  # one warning an outage
        log.log(level, "tracking: %s; the run goes on, its records wait in %s", problem, self.folder)
        self.problem = problem

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the run was created, or the first attempt failed."""
        self._tried.wait(timeout_s)

    def kick(self) -> None:
        """Deliver soon."""
        self._wake.set()

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until everything recorded so far is delivered; False when the time is over first."""
        deadline = time.monotonic() + timeout_s
        while not self.drained:
            if time.monotonic() >= deadline or self._thread is None or not self._thread.is_alive():
                return self.drained
            self.kick()
            time.sleep(0.02)
        return True

    def close(self, timeout_s: float) -> bool:
        """Deliver what is left for at most `timeout_s`, then stop; returns whether everything was delivered."""
        self._closing.set()
        self.kick()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._abandoned.set()
        self.kick()
        return self.drained

    @property
    def drained(self) -> bool:
        """True = every record is delivered."""
        lines = (self._journal.lines, self._events)
        offsets = (self.state.metrics_offset, self.state.events_offset)
        return all(offset >= line.end for line, offset in zip(lines, offsets, strict=True))

    def waiting(self) -> tuple[int, int]:
        """Numbers of metric lines and of other records that wait."""
        metrics = sum(1 for _ in read_lines(self._journal.lines.path, self.state.metrics_offset))
        return metrics, sum(1 for _ in read_lines(events_path(self.folder), self.state.events_offset))

    # -- one delivery -------------------------------------------------------------------------------------------

    def ship(self) -> None:
        """Deliver all that is recorded now. Raises: BackendError when the store does not answer."""
        self._journal.lines.flush()
        self._events.flush()
        if self._sink is None:
            self._sink = self._connect()
        fault("ship.begin")
        try:
            if not self._ensure_run(self._sink):
                return
            self._ship_metrics(self._sink)
            self._ship_events(self._sink)
        except RunGone:
            log.warning("tracking: the store lost run %s; it is recorded again from %s", self.state.run_id, self.folder)
            self._forget()
            raise BackendError("the run has to be recorded again") from None
        if self.problem:
            log.warning("tracking: the store answers again; %s is delivered", self.folder)
            self.problem = ""

    def _forget(self) -> None:
        self.state = DeliveryCursor()

    def _ensure_run(self, sink: Sink) -> bool:
        if self.state.run_id is not None and not self._checked:
            moved = self.state.store != sink.store
            is_same = not moved or (self.state.identity != "" and self.state.identity == sink.identity)
            if not is_same or not sink.knows(self.state.run_id):
                self._forget()
            elif moved:  # the same experiment at another address, as of a server in front of its database
                self.state.store = sink.store
                self.state.save(self.folder)
            self._checked = True
        if self.state.run_id is not None:
            return True
        first = next(self._events.read(0), None)
        if first is None:
            return False
        self._start_attempts += 1
        # A run may exist although no answer came back, here or in a process that was killed.
        retried = self._start_attempts > 1 or self._resumed
        run_id, experiment_id = sink.start(first[0] or _lost_start(self.folder), retried=retried)
        fault("ship.created")
        self.state = DeliveryCursor(sink.store, run_id, experiment_id, identity=sink.identity)
        self.state.save(self.folder)
        self._checked = True
        return True

    def _ship_metrics(self, sink: Sink) -> None:
        rows: list[tuple[str, float, int, int]] = []
        offset, damaged = self.state.metrics_offset, 0
        for record, end in self._journal.lines.read(offset):
            values = record.get("metrics", {})
            new = [(name, float(value), record["time"], record["step"]) for name, value in values.items()]
            if rows and len(rows) + len(new) > BATCH:
                self._send_metrics(sink, rows, offset, damaged)
                rows, damaged = [], 0
            rows += new
            damaged += not record
            offset = end
        self._send_metrics(sink, rows, offset, damaged)

    def _send_metrics(self, sink: Sink, rows: list[tuple[str, float, int, int]], offset: int, damaged: int) -> None:
        for start in range(0, len(rows), BATCH):
            self._send_or_split(sink, rows[start : start + BATCH])
        if offset > self.state.metrics_offset:
            fault("ship.metrics")
            self.state.metrics_offset = offset
            self.state.num_damaged += damaged
            self.state.save(self.folder)

    def _send_or_split(self, sink: Sink, rows: list[tuple[str, float, int, int]]) -> None:
        """Send; where the store refuses the batch, find the value that it refuses and leave only that one out."""
        assert self.state.run_id is not None
        try:
            sink.metrics(self.state.run_id, rows)
        except (BackendError, RunGone):
            raise
        except Exception as error:
            if len(rows) > 1:
                self._send_or_split(sink, rows[: len(rows) // 2])
                self._send_or_split(sink, rows[len(rows) // 2 :])
                return
            self._count_failure(f"metric {rows[0]}", error)

    def _ship_events(self, sink: Sink) -> None:
        assert self.state.run_id is not None
        for event, end in self._events.read(self.state.events_offset):
            for attempt in range(1, ATTEMPTS + 1) if event else ():  # a damaged line says nothing
                try:
                    version = sink.event(self.state.run_id, event)
                    if version is not None:
                        self.state.versions[event["key"]] = version
                    break
                except (BackendError, RunGone):
                    raise
                except Exception as error:
                    if attempt == ATTEMPTS:
                        label = event.get("path") or event.get("name") or ""
                        if event.get("op") == "model":
                            self.refused[event["key"]] = error
                        self._count_failure(f"{event.get('op')} {label}".strip(), error)
                    else:
                        time.sleep(0.05 * attempt)
            fault("ship.event")
            self.state.events_offset = end
            self.state.num_damaged += not event
            self.state.save(self.folder)

    def _count_failure(self, what: str, error: Exception) -> None:
        self.state.num_failed += 1
        log.warning("tracking: %s was refused and left out (%d so far): %s", what, self.state.num_failed, error)


def _lost_start(folder: Path) -> dict[str, Any]:
    """Record with which a run begins, made up where its line is damaged: name and time of its folder."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    name = folder.name.removesuffix(".tracking")
    time_ms = int(events_path(folder).stat().st_mtime * 1000)
    return {"op": "start", "key": digest, "name": name, "time": time_ms}
