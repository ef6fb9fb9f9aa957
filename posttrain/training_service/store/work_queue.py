"""The worker's side of requests: ready requests, claims, answers, history for replay, snapshots and expiry."""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sqlalchemy as sa

import posttrain.training_service.store.tables as tables
from posttrain.training_service.store.database import (
    Durability,
    StoreDatabase,
    next_counter_value,
    record_latest_time,
)
from posttrain.training_service.store.intake import (
    MAX_IDS_PER_STATEMENT,
    cancel_requests,
    parse_request_row,
)
from posttrain.training_service.store.records import (
    RecordedSequence,
    ResultBody,
    StoredRequest,
    replace_unstorable,
)
from posttrain.training_service.store.waiting_requests import ReadyRequest, WaitingRequests
from rl_core.errors import ServiceError
from rl_core.storage.faults import inject_fault

_requests, _runs, _recorded = tables.requests, tables.runs, tables.recorded_sequences
CANCELLED_TOGETHER = 1000  # requests, in a transaction during which nobody else writes
DEADLINE_PASSED_MESSAGE = "its deadline passed before it was started"

# Built once, because building a statement costs more than running it.
_SELECT_LOST_SESSIONS = (
    sa.select(_runs.c.model_id)
    .outerjoin(tables.sessions, tables.sessions.c.session_id == _runs.c.session_id)
    .where(
        _runs.c.model_id.in_(sa.bindparam("targets", expanding=True)),
        tables.sessions.c.finished.is_not(None)
        | (
            (_runs.c.touched < sa.bindparam("silent_since"))
            & (sa.func.coalesce(tables.sessions.c.touched, 0.0) < sa.bindparam("silent_since"))
        ),
    )
    .order_by(_runs.c.model_id)
)
_MATCHES_IDS = _requests.c.request_id.in_(sa.bindparam("ids", expanding=True))
_CLAIM_REQUESTS = (
    _requests.update()
    .where(_MATCHES_IDS, _requests.c.state == "waiting")
    .values(state="running", started=sa.bindparam("now"))
    .returning(_requests)
)
_SELECT_OPEN_REQUESTS = sa.select(
    _requests.c.request_id, _requests.c.target, _requests.c.line, _requests.c.seq
).where(_MATCHES_IDS, _requests.c.finished.is_(None))
_OUTCOME_COLUMNS = (
    "state",
    "finished",
    "finish_place",
    "answer",
    "answer_type",
    "answer_digest",
    "error",
    "category",
)
_WRITE_OUTCOME = (
    _requests.update()
    .where(_requests.c.request_id == sa.bindparam("id"))
    .values({name: sa.bindparam(name) for name in _OUTCOME_COLUMNS})
)
_WRITE_OUTCOME_DROP_PAYLOAD = _WRITE_OUTCOME.values(payload=b"")  # nothing replays it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """End of a request, and the changes committed with it."""

    request_id: str
    answer: ResultBody | ServiceError
    run: Mapping[str, Any] = field(default_factory=dict)  # new values of the target's row in `runs`
    rows: tuple[
        tuple[str, Mapping[str, Any]], ...
    ] = ()  # (table, row); replace rows of the same key
    used_sequences: tuple[str, ...] = ()  # recorded sequences whose lifetime begins again
    used_at: float = 0.0  # when the request that uses them was accepted


class WorkQueue:
    """Requests as the worker sees them. One worker at a time, guarded by a lock of the service's folder."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    @cached_property
    def _waiting(self) -> WaitingRequests:
        return WaitingRequests()

    def list_ready_requests(self, limit: int = 1024) -> list[ReadyRequest]:
        """List requests that may be computed, in the order of acceptance.

        Training requests are included only if no earlier number of their run is missing, and in the order of their
        numbers. Requests whose deadline has passed are cancelled. Each owner gets an equal part of the list, so no
        number of requests of one hides those of another. Only changes since the last call are read from the store.
        """
        with self._database.read_transaction() as connection:
            self._waiting.read_changes(connection)
        if late := self._waiting.list_late(self._clock()):
            with self._database.write_transaction() as connection:
                for start in range(0, len(late), MAX_IDS_PER_STATEMENT):
                    ids = late[start : start + MAX_IDS_PER_STATEMENT]
                    is_late = _requests.c.request_id.in_(ids) & (_requests.c.state == "waiting")
                    cancel_requests(connection, is_late, DEADLINE_PASSED_MESSAGE, self._clock())
            with self._database.read_transaction() as connection:
                self._waiting.read_changes(connection)
        return self._waiting.list_ready(limit)

    def cancel_blocked_requests(self, silent_seconds: float) -> int:
        """Cancel requests behind a gap in their run's numbers if their session can no longer fill it.

        Args:
            silent_seconds: how long an unfinished session may be silent: no heartbeat and no request of the run.
        Returns: the number of cancelled requests.
        """
        now = self._clock()
        with self._database.read_transaction() as connection:
            self._waiting.read_changes(connection)
            blocked = self._waiting.list_blocked()
            over: list[str] = []
            names = sorted(blocked)
            for start in range(0, len(names), MAX_IDS_PER_STATEMENT):
                part = {"targets": names[start : start + MAX_IDS_PER_STATEMENT]}
                rows = connection.execute(
                    _SELECT_LOST_SESSIONS, {**part, "silent_since": now - silent_seconds}
                )
                over += rows.scalars()
        num_cancelled = 0
        for target in over:
            error = (
                f"seq_id {blocked[target]} of {target} never arrived, and the session has ended or is silent; "
                "requests after it were cancelled"
            )
            is_blocked = (
                (_requests.c.target == target)
                & (_requests.c.line == "training")
                & (_requests.c.state == "waiting")
                & (_requests.c.seq > blocked[target])
            )
            first = sa.select(_requests.c.request_id).where(is_blocked).limit(CANCELLED_TOGETHER)
            num_new = CANCELLED_TOGETHER
            while num_new == CANCELLED_TOGETHER:
                with self._database.write_transaction() as connection:
                    num_new = cancel_requests(
                        connection, _requests.c.request_id.in_(first), error, now
                    )
                num_cancelled += num_new
        return num_cancelled

    def claim_requests(self, request_ids: Iterable[str]) -> list[StoredRequest]:
        """Mark those requests that still wait as running; return them in the order of acceptance."""
        ids = list(request_ids)
        if not ids:
            return []
        with self._database.write_transaction("later") as connection:
            rows = connection.execute(_CLAIM_REQUESTS, {"ids": ids, "now": self._clock()}).all()
        self._waiting.remove_claimed(rows)
        inject_fault("service.claimed")
        return sorted((parse_request_row(row) for row in rows), key=lambda request: request.place)

    def reset_running_requests(self, *, count_death: bool = True) -> int:
        """Return requests that a worker was computing to the queue; return their number.

        Args:
            count_death: count a crash of the worker against them.
        """
        self._waiting.invalidate()
        with self._database.write_transaction() as connection:
            return connection.execute(
                _requests.update()
                .where(_requests.c.state == "running")
                .values(state="waiting", started=None, deaths=_requests.c.deaths + int(count_death))
            ).rowcount

    def finish_requests(
        self,
        outcomes: Sequence[RequestOutcome | tuple[str, ResultBody | ServiceError]],
        *,
        is_synced: bool = True,
    ) -> None:
        """Store answers and their changes, all or nothing. Requests that are final already stay unchanged.

        Args:
            is_synced: on disk when this returns. Otherwise call `sync_to_disk` before handing out such an answer or
                writing down anything that follows from it.
        """
        if not outcomes:
            return
        finished = [
            outcome
            if isinstance(outcome, RequestOutcome)
            else RequestOutcome(request_id=outcome[0], answer=outcome[1])
            for outcome in outcomes
        ]
        ids = [outcome.request_id for outcome in finished]
        durability: Durability = "now" if is_synced else "on_acknowledgement"
        with self._database.write_transaction(durability) as connection:
            rows = connection.execute(_SELECT_OPEN_REQUESTS, {"ids": ids})
            open_rows = {row.request_id: row for row in rows}
            written = [outcome for outcome in finished if outcome.request_id in open_rows]
            if written:
                last = next_counter_value(connection, "finished", len(written))
                self._write_outcomes(connection, written, open_rows, last - len(written) + 1)
            inject_fault("service.finishing")
        inject_fault("service.finished")

    def _write_outcomes(
        self,
        connection: sa.Connection,
        outcomes: Sequence[RequestOutcome],
        open_rows: Mapping[str, sa.Row[Any]],
        first_place: int,
    ) -> None:
        """Write the outcomes of open requests at positions of the order of finishing from `first_place` on."""
        now = self._clock()
        values_by_line: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # True = training
        run_changes: list[dict[str, Any]] = []
        for place, outcome in enumerate(outcomes, first_place):
            row = open_rows[outcome.request_id]
            is_training = row.line == "training"
            values_by_line[is_training].append(_format_outcome(outcome, place, now))
            if is_training:
                run_changes.append({"id": row.target, "next_seq": row.seq + 1, **outcome.run})
        for is_training, values in values_by_line.items():
            if values:
                connection.execute(
                    _WRITE_OUTCOME if is_training else _WRITE_OUTCOME_DROP_PAYLOAD, values
                )
        # Only neighbours are grouped, so changes of the same run stay in order.
        for names, changes in itertools.groupby(run_changes, key=tuple):
            connection.execute(_build_run_update(names[1:]), list(changes))
        for outcome in outcomes:
            for name, content in outcome.rows:
                _replace_row(connection, tables.metadata.tables[name], content)
            for start in range(0, len(outcome.used_sequences), MAX_IDS_PER_STATEMENT):
                ids = outcome.used_sequences[start : start + MAX_IDS_PER_STATEMENT]
                is_older = _recorded.c.touched < outcome.used_at
                connection.execute(
                    _recorded.update()
                    .where(_recorded.c.sequence_id.in_(ids), is_older)
                    .values(touched=outcome.used_at)
                )

    def find_recorded_sequences(
        self, session_id: str, sequence_ids: Iterable[str]
    ) -> dict[str, RecordedSequence]:
        """Return those of the sequences that were recorded in this session."""
        ids = list(sequence_ids)
        sequences: dict[str, RecordedSequence] = {}
        with self._database.read_transaction() as connection:
            for start in range(0, len(ids), MAX_IDS_PER_STATEMENT):
                query = sa.select(_recorded).where(
                    _recorded.c.sequence_id.in_(ids[start : start + MAX_IDS_PER_STATEMENT]),
                    _recorded.c.session_id == session_id,
                )
                for row in connection.execute(query):
                    sequences[row.sequence_id] = RecordedSequence(**row._mapping)
        return sequences

    def remove_expired_sequences(self, lifetime: float) -> int:
        """Remove recorded sequences that no request can use any more; return their number.

        A request may use what was recorded or used at most `lifetime` seconds before it was accepted. A sequence thus
        stays as long as a request of its session may be computed, or computed again, that was accepted in time.
        """
        now = self._clock()
        with self._database.read_transaction() as connection:
            expired = _recorded.c.touched < now - lifetime
            sessions = connection.scalars(
                sa.select(_recorded.c.session_id).where(expired).distinct()
            ).all()
        removed = 0
        for session_id in sessions:
            of_session = sa.select(_runs.c.model_id).where(_runs.c.session_id == session_id)
            oldest_use = sa.select(sa.func.min(_requests.c.accepted)).where(
                _requests.c.target.in_(of_session),
                _requests.c.kind == "forward_backward",
                sa.func.length(_requests.c.payload) > 0,
            )
            with self._database.write_transaction() as connection:
                oldest = connection.scalar(oldest_use)
                before = (now if oldest is None else min(now, oldest)) - lifetime
                is_unused = (_recorded.c.session_id == session_id) & (_recorded.c.touched < before)
                removed += connection.execute(_recorded.delete().where(is_unused)).rowcount
        return removed

    def list_replay_requests(self, model_id: str, after: int) -> list[StoredRequest]:
        """List a run's final training requests after number `after`, in their order."""
        query = sa.select(_requests).where(
            _requests.c.target == model_id,
            _requests.c.line == "training",
            _requests.c.seq > after,
            _requests.c.finished.is_not(None),
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.order_by(_requests.c.seq))
            return [parse_request_row(row) for row in rows]

    def list_runs_to_snapshot(self) -> list[str]:
        """List runs that have loaded saved weights since their newest snapshot."""
        loaded = (_requests.c.kind == "load_weights") & (_requests.c.state == "done")
        query = sa.select(_runs.c.model_id).join(_requests, _requests.c.target == _runs.c.model_id)
        query = query.where(
            _runs.c.state == "live", loaded, _requests.c.seq > _runs.c.covered
        ).distinct()
        with self._database.read_transaction() as connection:
            return list(connection.scalars(query.order_by(_runs.c.model_id)))

    def record_snapshot(self, model_id: str, seq: int, steps: int) -> None:
        """Record a durable snapshot of the requests up to `seq`.

        Requests up to the previous snapshot lose their payload.
        """
        with self._database.write_transaction() as connection:
            is_run = _runs.c.model_id == model_id
            previous = connection.scalar(sa.select(_runs.c.covered).where(is_run))
            if previous is None or seq <= previous:
                return
            connection.execute(
                _runs.update()
                .where(is_run)
                .values(covered=seq, covered_before=previous, steps=steps)
            )
            covered = (
                (_requests.c.target == model_id)
                & (_requests.c.line == "training")
                & (_requests.c.seq <= previous)
            )
            has_payload = _requests.c.finished.is_not(None) & (
                sa.func.length(_requests.c.payload) > 0
            )
            connection.execute(_requests.update().where(covered & has_payload).values(payload=b""))
        inject_fault("service.covered")

    def count_worker_event(self, name: str, by: int = 1) -> None:
        """Add to a counter of the worker."""
        with self._database.write_transaction() as connection:
            next_counter_value(connection, f"worker.{name}", by)

    def read_worker_counters(self) -> dict[str, int]:
        """Return the worker's counters since the store was created."""
        counters = tables.counters
        query = sa.select(counters.c.name, counters.c.value).where(
            counters.c.name.startswith("worker.")
        )
        with self._database.read_transaction() as connection:
            return {
                name.removeprefix("worker."): int(value)
                for name, value in connection.execute(query)
            }

    def expire_results(self, *, result_seconds: float, memory_seconds: float) -> tuple[int, int]:
        """Drop answers that nobody fetched, and later the requests themselves.

        Args:
            result_seconds: lifetime of an answer.
            memory_seconds: how long a repeated request is recognised after its answer was dropped. Requests that are
                not part of a snapshot always stay.
        Returns: (number of answers dropped, number of requests removed).
        """
        now = self._clock()
        is_final = _requests.c.finished.is_not(None)
        with self._database.write_transaction() as connection:
            is_expired = (
                is_final & ~_requests.c.forgotten & (_requests.c.finished < now - result_seconds)
            )
            forgotten = connection.execute(
                _requests.update().where(is_expired).values(forgotten=True, answer=None)
            ).rowcount
            covered = (
                sa.select(_runs.c.covered_before)
                .where(_runs.c.model_id == _requests.c.target)
                .scalar_subquery()
            )
            has_run_ended = sa.exists().where(
                _runs.c.model_id == _requests.c.target, _runs.c.state.in_(("failed", "unloaded"))
            )
            is_unneeded = (
                (_requests.c.line != "training") | (_requests.c.seq <= covered) | has_run_ended
            )
            is_removable = (
                _requests.c.forgotten & (_requests.c.finished < now - memory_seconds) & is_unneeded
            )
            removed = connection.execute(_requests.delete().where(is_removable)).rowcount
            record_latest_time(connection, now)
        return forgotten, removed


def _format_outcome(outcome: RequestOutcome, place: int, now: float) -> dict[str, Any]:
    """Format the columns of a finished request."""
    values: dict[str, Any] = dict.fromkeys(
        ("answer", "answer_type", "answer_digest", "error", "category")
    )
    if isinstance(outcome.answer, ServiceError):
        values |= {
            "state": "failed",
            "error": replace_unstorable(str(outcome.answer)),
            "category": outcome.answer.category,
        }
    else:
        body = outcome.answer.body
        values |= {"state": "done", "answer": body, "answer_type": outcome.answer.content_type}
        values["answer_digest"] = hashlib.sha256(body).hexdigest()
    return values | {"finished": now, "finish_place": place, "id": outcome.request_id}


@functools.cache
def _build_run_update(names: tuple[str, ...]) -> sa.Update:
    """Build the statement that sets these columns of a run."""
    return (
        _runs.update()
        .where(_runs.c.model_id == sa.bindparam("id"))
        .values({name: sa.bindparam(name) for name in names})
    )


def _replace_row(connection: sa.Connection, table: sa.Table, content: Mapping[str, Any]) -> None:
    """Insert a row, replacing a row of the same key."""
    key = sa.and_(*(column == content[column.name] for column in table.primary_key))
    connection.execute(table.delete().where(key))
    connection.execute(table.insert().values(dict(content)))
