"""The server's side of requests: accept, look up, wait, drop, cancel.

Requests are accepted in batches, one transaction per batch. Repeated requests are recognised, order and limits are
enforced.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

import posttrain.training_service.store.tables as tables
from posttrain.training_service.store.database import StoreDatabase, next_counter_value
from posttrain.training_service.store.records import (
    KeyLimitExceeded,
    NewRequest,
    RequestForgotten,
    SequenceIdReused,
    StoredRequest,
    replace_unstorable,
    resolve_request_line,
)
from rl_core.errors import ServiceError
from rl_core.storage.faults import inject_fault

_request_rows, _runs, _samplers = tables.requests, tables.runs, tables.samplers
_minutes, _keys = tables.minutes, tables.keys
_REQUEST_FIELDS = [
    column.name
    for column in _request_rows.c
    if column.name not in ("line", "digest", "finish_place")
]
_REQUEST_COLUMNS = [_request_rows.c[name] for name in _REQUEST_FIELDS]
_LIGHT_COLUMNS = [column for column in _REQUEST_COLUMNS if column.name != "payload"]
_OPEN_STATES = ("waiting", "running")
MAX_IDS_PER_STATEMENT = 10_000  # SQLite takes 32,766 values in a statement
QUEUE_RETRY_SECONDS = 5.0  # suggested to clients whose queue is full
TOUCH_INTERVAL_SECONDS = (
    5.0  # smallest interval between two updates of a run's or sampler's last use
)

# Built once, because building a statement costs more than running it.
_SELECT_KNOWN_REQUESTS = sa.select(_request_rows).where(
    sa.tuple_(_request_rows.c.target, _request_rows.c.line, _request_rows.c.seq).in_(
        sa.bindparam("keys", expanding=True)
    )
)
_SELECT_RUNS = sa.select(_runs.c.model_id, _runs.c.next_seq, _runs.c.state).where(
    _runs.c.model_id.in_(sa.bindparam("names", expanding=True))
)
_SELECT_KEY_LIMITS = sa.select(_keys.c.requests_per_minute, _keys.c.queue).where(
    _keys.c.key_id == sa.bindparam("owner")
)
_COUNT_WAITING = (
    sa.select(sa.func.count())
    .select_from(_request_rows)
    .where(
        _request_rows.c.owner == sa.bindparam("owner"),
        _request_rows.c.state.in_(_OPEN_STATES),
    )
)
_SELECT_ACCEPTED_COUNTS = sa.select(_minutes.c.minute, _minutes.c.accepted).where(
    _minutes.c.owner == sa.bindparam("owner")
)
_DELETE_ACCEPTED_COUNTS = _minutes.delete().where(_minutes.c.owner == sa.bindparam("name"))
_INSERT_REQUESTS = _request_rows.insert()
_INSERT_RUNS = _runs.insert()
_INSERT_ACCEPTED_COUNTS = _minutes.insert()
_UPDATE_TOUCHED = [
    table.update()
    .where(name == sa.bindparam("name"), table.c.touched < sa.bindparam("old"))
    .values(touched=sa.bindparam("now"))
    for table, name in ((_runs, _runs.c.model_id), (_samplers, _samplers.c.sampler_id))
]
_CANCEL_REQUEST = (
    _request_rows.update()
    .where(_request_rows.c.request_id == sa.bindparam("id"))
    .values(
        state="cancelled",
        error=sa.bindparam("cancel_error"),
        category="user",
        finished=sa.bindparam("now"),
        finish_place=sa.bindparam("at"),
        payload=b"",
    )
)
_SELECT_REQUEST = sa.select(_request_rows).where(
    _request_rows.c.request_id == sa.bindparam("request_id")
)
_SELECT_FINISHED = (
    sa.select(_request_rows.c.request_id, _request_rows.c.target, _request_rows.c.finish_place)
    .where(_request_rows.c.finish_place > sa.bindparam("cursor"))
    .order_by(_request_rows.c.finish_place)
    .limit(sa.bindparam("most"))
)
_SELECT_RESULT = sa.select(*_LIGHT_COLUMNS).where(
    _request_rows.c.request_id == sa.bindparam("request_id")
)
_SELECT_RESULTS = sa.select(*_LIGHT_COLUMNS).where(
    _request_rows.c.request_id.in_(sa.bindparam("ids", expanding=True))
)


def parse_request_row(row: sa.Row[Any]) -> StoredRequest:
    """Convert a row of `requests` to a record."""
    return StoredRequest(**{name: row._mapping[name] for name in _REQUEST_FIELDS})


class _IntakeBatch:
    """Requests accepted in one transaction, with the state of the store that the decision needs."""

    def __init__(self, connection: sa.Connection, batch: Sequence[NewRequest], now: float) -> None:
        self._connection, self._batch, self._now = connection, batch, now
        keys = [(new.target, resolve_request_line(new.kind), new.seq) for new in batch]
        self._known_requests: dict[tuple[str, str, int], tuple[str, StoredRequest]] = {
            (row.target, row.line, row.seq): (row.digest, parse_request_row(row))
            for row in connection.execute(_SELECT_KNOWN_REQUESTS, {"keys": keys})
        }
        names = [target for target, line, _ in keys if line == "training"]
        rows = connection.execute(_SELECT_RUNS, {"names": names}) if names else ()
        self._runs: dict[str, tuple[int, str]] = {
            row.model_id: (row.next_seq, row.state) for row in rows
        }
        self._limits: dict[str, _KeyLimits] = {}
        self._rows: list[dict[str, Any]] = []
        self._new_runs: list[dict[str, Any]] = []

    def accept_all(self) -> list[StoredRequest | Exception]:
        """Check all requests, then write the accepted ones.

        Returns: in order, the stored request, new or known, or the error for its sender.
        """
        first_place = next_counter_value(self._connection, "places", len(self._batch)) - len(
            self._batch
        )
        answers: list[StoredRequest | Exception] = []
        for offset, new in enumerate(self._batch, 1):
            try:
                answers.append(self._accept_request(new, first_place + offset))
            except ServiceError as error:
                answers.append(error)
        self._write_rows()
        return answers

    def _accept_request(self, new: NewRequest, place: int) -> StoredRequest:
        line, digest = resolve_request_line(new.kind), new.digest
        key = (new.target, line, new.seq)
        if key in self._known_requests:
            known_digest, known = self._known_requests[key]
            if known_digest != digest:
                raise SequenceIdReused(
                    f"seq_id {new.seq} of {new.target} was used before with another request; "
                    "use the next number, or send the same request again"
                )
            return known
        if line == "training":
            self._check_sequence(new)
        if new.owner not in self._limits:
            self._limits[new.owner] = _KeyLimits(self._connection, new.owner, self._now)
        self._limits[new.owner].count_request()
        if line == "training" and new.seq == 0:
            self._add_run(new)
        accepted = StoredRequest(
            kind=new.kind,
            owner=new.owner,
            session_id=new.session_id,
            target=new.target,
            seq=new.seq,
            payload=new.payload,
            content_type=new.content_type,
            facts=dict(new.facts),
            deadline=new.deadline,
            request_id=f"r-{secrets.token_hex(12)}",
            place=place,
            state="waiting",
            accepted=self._now,
        )
        self._known_requests[key] = digest, accepted
        row = {name: getattr(accepted, name) for name in _REQUEST_FIELDS}
        self._rows.append({**row, "line": line, "digest": digest})
        return accepted

    def _add_run(self, new: NewRequest) -> None:
        self._runs[new.target] = (0, "creating")
        self._new_runs.append(
            {
                "model_id": new.target,
                "owner": new.owner,
                "session_id": new.session_id,
                "created": self._now,
                "touched": self._now,
                "state": "creating",
                "facts": dict(new.facts),
                "info": {},
            }
        )

    def _check_sequence(self, new: NewRequest) -> None:
        """Refuse a training request if its run does not exist or has already computed and dropped it."""
        run = self._runs.get(new.target)
        if run is None:
            if new.seq != 0:
                raise ServiceError(f"model_id: there is no training run '{new.target}'", "user")
            return
        next_seq, state = run
        if new.seq < next_seq:
            raise RequestForgotten(
                f"seq_id {new.seq} of {new.target}: its answer was fetched and has been dropped"
            )
        if state == "unloaded":
            raise ServiceError(f"model_id: the training run '{new.target}' was unloaded", "user")

    def _write_rows(self) -> None:
        if not self._rows:
            return
        if self._new_runs:
            self._connection.execute(_INSERT_RUNS, self._new_runs)
        self._connection.execute(_INSERT_REQUESTS, self._rows)
        times = {"old": self._now - TOUCH_INTERVAL_SECONDS, "now": self._now}
        for statement, is_training in zip(_UPDATE_TOUCHED, (True, False), strict=True):
            names = {
                row["target"] for row in self._rows if (row["line"] == "training") == is_training
            }
            if names:
                self._connection.execute(
                    statement, [{"name": name, **times} for name in sorted(names)]
                )
        for limits in self._limits.values():
            limits.write_counts()


class _KeyLimits:
    """Limits of one key, and how much of them it has used."""

    def __init__(self, connection: sa.Connection, owner: str, now: float) -> None:
        self._connection, self._owner = connection, owner
        key = connection.execute(_SELECT_KEY_LIMITS, {"owner": owner}).first()
        self._queue: int | None = None if key is None else key.queue
        self._rate: int | None = None if key is None else key.requests_per_minute
        self._waiting = 0
        self._accepted: dict[int, int] = {}
        self._minute, self._minute_fraction = int(now // 60), (now % 60) / 60
        if self._queue is not None:
            self._waiting = connection.scalar(_COUNT_WAITING, {"owner": owner}) or 0
        if self._rate is not None:
            rows = connection.execute(_SELECT_ACCEPTED_COUNTS, {"owner": owner})
            self._accepted = {
                row.minute: row.accepted for row in rows if row.minute >= self._minute - 1
            }

    def count_request(self) -> None:
        """Count a request against the limits. Raises: KeyLimitExceeded."""
        if self._queue is not None and self._waiting >= self._queue:
            raise KeyLimitExceeded(
                f"{self._waiting} requests of this key wait (limit {self._queue}); fetch or cancel",
                QUEUE_RETRY_SECONDS,
            )
        last_minute = self._accepted.get(self._minute - 1, 0)
        this_minute = self._accepted.get(self._minute, 0)
        # Sliding window: of the last minute, the share within the last 60 seconds counts.
        rate = last_minute * (1 - self._minute_fraction) + this_minute + 1
        if self._rate is not None and rate > self._rate:
            wait = max(1.0, math.ceil(60 * (1 - self._minute_fraction)) / 4)
            raise KeyLimitExceeded(
                f"this key has a limit of {self._rate} requests per minute", wait
            )
        self._waiting += 1
        self._accepted[self._minute] = this_minute + 1

    def write_counts(self) -> None:
        """Store the counts of the last two minutes."""
        if self._rate is None:
            return
        self._connection.execute(_DELETE_ACCEPTED_COUNTS, {"name": self._owner})
        rows = [
            {"owner": self._owner, "minute": minute, "accepted": number}
            for minute, number in self._accepted.items()
        ]
        self._connection.execute(_INSERT_ACCEPTED_COUNTS, rows)


class RequestIntake:
    """Requests as the server sees them."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def accept_request(self, new: NewRequest) -> StoredRequest:
        """Accept a request. It is durable when this returns. Thread-safe.

        A repeated (target, line, seq) with the same payload returns the existing request with its facts. A creation
        (`create_model`, or `load_weights` with seq 0) also creates the run's record.
        Raises: SequenceIdReused for another payload; RequestForgotten for a request whose answer was dropped for good;
            KeyLimitExceeded; ServiceError (user) for a run that does not exist; BackendError if the store does not
            answer.
        """
        (answer,) = self.accept_batch([new])
        if isinstance(answer, Exception):
            raise answer
        self.sync_to_disk()
        return answer

    def accept_batch(self, batch: Sequence[NewRequest]) -> list[StoredRequest | Exception]:
        """Accept requests as `accept_request` does; return answers and errors in order. Raises: BackendError.

        Call `sync_to_disk` before acknowledging any of them.
        """
        with self._database.write_transaction("on_acknowledgement") as connection:
            answers = _IntakeBatch(connection, batch, self._clock()).accept_all()
            inject_fault("service.accepting")
        inject_fault("service.accepted")
        return answers

    def sync_to_disk(self) -> None:
        """Sync everything committed so far to disk. Nothing may be acknowledged before."""
        self._database.sync_to_disk()

    def find_request(self, request_id: str) -> StoredRequest | None:
        """Return an accepted request; None if there is none or it was removed."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_SELECT_REQUEST, {"request_id": request_id}).first()
        return None if row is None else parse_request_row(row)

    def find_result(self, request_id: str) -> StoredRequest | None:
        """Return a request with its answer, without its payload."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_SELECT_RESULT, {"request_id": request_id}).first()
        return None if row is None else _parse_light_row(row)

    def find_results(self, request_ids: Iterable[str]) -> list[StoredRequest]:
        """Return those of these requests that exist, with answers, without payloads, in any order."""
        ids = list(request_ids)
        if not ids:
            return []
        with self._database.read_transaction() as connection:
            rows = connection.execute(_SELECT_RESULTS, {"ids": ids})
            return [_parse_light_row(row) for row in rows]

    def find_sampler_creation(self, sampler_id: str) -> StoredRequest | None:
        """Return the request that creates a sampler, without its payload."""
        is_creation = (_request_rows.c.target == sampler_id) & (_request_rows.c.line == "sampler")
        with self._database.read_transaction() as connection:
            row = connection.execute(sa.select(*_LIGHT_COLUMNS).where(is_creation)).first()
        return None if row is None else _parse_light_row(row)

    def read_finish_cursor(self) -> int:
        """Return the cursor with which `list_finished_since` lists what finishes from now on."""
        counters = tables.counters
        query = sa.select(counters.c.value).where(counters.c.name == "finished")
        with self._database.read_transaction() as connection:
            return connection.scalar(query) or 0

    def list_finished_since(
        self, cursor: int, limit: int = 1000
    ) -> tuple[list[tuple[str, str]], int]:
        """List (request id, target) of requests that became final after `cursor`, in that order.

        To wait, call `read_change_counter` before this function and `wait_for_change` after it.
        Returns: the list; the next cursor.
        """
        with self._database.read_transaction() as connection:
            rows = connection.execute(_SELECT_FINISHED, {"cursor": cursor, "most": limit}).all()
        next_cursor = rows[-1].finish_place if rows else cursor
        return [(row.request_id, row.target) for row in rows], next_cursor

    def list_finished_samples(
        self, target: str, first: int, last: int, cursor: int, limit: int = 1000
    ) -> tuple[list[tuple[str, str, int]], int]:
        """List (request id, state, bytes of the answer) of a sampler's samples that became final after `cursor`.

        Args:
            first, last: bounds of the samples' sequence ids.
        Returns: the list; the next cursor.
        """
        place = _request_rows.c.finish_place
        is_sample = (
            (_request_rows.c.target == target)
            & (_request_rows.c.line == "sample")
            & _request_rows.c.seq.between(first, last)
        )
        size = sa.func.length(_request_rows.c.answer).label("size")
        query = sa.select(_request_rows.c.request_id, _request_rows.c.state, size, place).where(
            is_sample, place > cursor
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.order_by(place).limit(limit)).all()
        samples = [(row.request_id, row.state, row.size or 0) for row in rows]
        return samples, (rows[-1].finish_place if rows else cursor)

    def drop_results(self, request_ids: Iterable[str], owner: str | None = None) -> None:
        """Drop fetched answers, optionally only those of one owner.

        The requests themselves stay known (see `WorkQueue.expire_results`).
        """
        ids = list(request_ids)
        if not ids:
            return
        with self._database.write_transaction() as connection:
            for start in range(0, len(ids), MAX_IDS_PER_STATEMENT):
                has_id = _request_rows.c.request_id.in_(ids[start : start + MAX_IDS_PER_STATEMENT])
                is_dropped = has_id & _request_rows.c.finished.is_not(None)
                if owner is not None:
                    is_dropped &= _request_rows.c.owner == owner
                connection.execute(
                    _request_rows.update().where(is_dropped).values(forgotten=True, answer=None)
                )

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a waiting request; its run's order skips it. Return False if it runs, is final, or is unknown."""
        is_waiting = (_request_rows.c.request_id == request_id) & (
            _request_rows.c.state == "waiting"
        )
        with self._database.write_transaction() as connection:
            return cancel_requests(connection, is_waiting, "cancelled", self._clock()) > 0

    def count_open_requests(self, target: str | None = None) -> dict[str, dict[str, int]]:
        """Count open requests: kind -> state -> number."""
        query = sa.select(_request_rows.c.kind, _request_rows.c.state, sa.func.count()).where(
            _request_rows.c.state.in_(_OPEN_STATES)
        )
        if target is not None:
            query = query.where(_request_rows.c.target == target)
        query = query.group_by(_request_rows.c.kind, _request_rows.c.state)
        counts: dict[str, dict[str, int]] = {}
        with self._database.read_transaction() as connection:
            for kind, state, number in connection.execute(query):
                counts.setdefault(kind, {})[state] = number
        return counts

    def list_request_timings(
        self, target: str | None = None, limit: int = 1000
    ) -> list[tuple[str, float, float]]:
        """List (kind, seconds waited, seconds served) of the newest finished requests."""
        columns = (
            _request_rows.c.kind,
            _request_rows.c.accepted,
            _request_rows.c.started,
            _request_rows.c.finished,
        )
        query = sa.select(*columns).where(
            _request_rows.c.started.is_not(None), _request_rows.c.finished.is_not(None)
        )
        if target is not None:
            query = query.where(_request_rows.c.target == target)
        with self._database.read_transaction() as connection:
            rows = connection.execute(
                query.order_by(_request_rows.c.finish_place.desc()).limit(limit)
            ).all()
        return [(row.kind, row.started - row.accepted, row.finished - row.started) for row in rows]

    def list_requests(
        self, target: str, limit: int = 100, offset: int = 0
    ) -> Sequence[StoredRequest]:
        """List requests of a run or sampler, newest first, without payloads and answers."""
        columns = [
            column for column in _REQUEST_COLUMNS if column.name not in ("payload", "answer")
        ]
        query = (
            sa.select(*columns)
            .where(_request_rows.c.target == target)
            .order_by(_request_rows.c.place.desc())
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return [
            StoredRequest(**{column.name: row._mapping[column] for column in columns}, payload=b"")
            for row in rows
        ]


def _parse_light_row(row: sa.Row[Any]) -> StoredRequest:
    return StoredRequest(
        **{column.name: row._mapping[column] for column in _LIGHT_COLUMNS}, payload=b""
    )


def cancel_requests(connection: sa.Connection, condition: Any, error: str, now: float) -> int:
    """Cancel all requests that match the condition; return their number."""
    ids = connection.scalars(
        sa.select(_request_rows.c.request_id).where(condition).order_by(_request_rows.c.place)
    ).all()
    if ids:
        last = next_counter_value(connection, "finished", len(ids))
        values = {"cancel_error": replace_unstorable(error), "now": now}
        connection.execute(
            _CANCEL_REQUEST,
            [
                {"id": request_id, "at": place, **values}
                for place, request_id in enumerate(ids, last - len(ids) + 1)
            ],
        )
    return len(ids)
