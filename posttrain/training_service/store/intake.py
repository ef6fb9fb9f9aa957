"""Acceptance of requests, many at a time: repeats are known, order and limits are kept, one transaction for all.

The server's side of requests: accept, look up, wait, forget, cancel.
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
QUEUE_RETRY_SECONDS = 5.0  # to come again where a queue is full
TOUCH_INTERVAL_SECONDS = 5.0  # between two notes that a run or sampler is in use

# Made once: building a statement costs more than running it.
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
        _request_rows.c.state.in_(("waiting", "running")),
    )
)
_SELECT_ACCEPTED_COUNTS = sa.select(_minutes.c.minute, _minutes.c.accepted).where(
    _minutes.c.owner == sa.bindparam("owner")
)
_DELETE_ACCEPTED_COUNTS = _minutes.delete().where(_minutes.c.owner == sa.bindparam("name"))
_INSERT_REQUESTS, _INSERT_RUNS, _INSERT_ACCEPTED_COUNTS = (
    _request_rows.insert(),
    _runs.insert(),
    _minutes.insert(),
)
_UPDATE_TOUCHED = [
    table.update()
    .where(name == sa.bindparam("name"), table.c.touched < sa.bindparam("old"))
    .values(touched=sa.bindparam("now"))
    for table, name in ((_runs, _runs.c.model_id), (_samplers, _samplers.c.sampler_id))
]


def parse_request_row(row: sa.Row[Any]) -> StoredRequest:
    """A row of `requests` as a record."""
    return StoredRequest(**{name: row._mapping[name] for name in _REQUEST_FIELDS})


def accept_new_requests(
    connection: sa.Connection, batch: Sequence[NewRequest], now: float
) -> list[StoredRequest | Exception]:
    """Answers in order: the stored request, new or known, or the error for its sender."""
    return _IntakeBatch(connection, batch, now).accept_all()


class _IntakeBatch:
    """Requests that are accepted in one transaction, and what it has to know of the store."""

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
        """Decide on all, then write."""
        place = next_counter_value(self._connection, "places", len(self._batch)) - len(self._batch)
        found: list[StoredRequest | Exception] = []
        for offset, new in enumerate(self._batch, 1):
            try:
                found.append(self._accept_request(new, place + offset))
            except ServiceError as error:
                found.append(error)
        self._write_rows()
        return found

    def _accept_request(self, new: NewRequest, place: int) -> StoredRequest:
        line, digest = resolve_request_line(new.kind), new.digest
        key = (new.target, line, new.seq)
        if key in self._known_requests:
            before, found = self._known_requests[key]
            if before != digest:
                raise SequenceIdReused(
                    f"seq_id {new.seq} of {new.target} was used before with another request; "
                    "use the next number, or send the same request again"
                )
            return found
        if line == "training":
            self._check_sequence(new)
        if new.owner not in self._limits:
            self._limits[new.owner] = _KeyLimits(self._connection, new.owner, self._now)
        self._limits[new.owner].count_request()
        if line == "training" and new.seq == 0:
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
        found = StoredRequest(
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
        self._known_requests[key] = digest, found
        row = {name: getattr(found, name) for name in _REQUEST_FIELDS}
        self._rows.append({**row, "line": line, "digest": digest})
        return found

    def _check_sequence(self, new: NewRequest) -> None:
        """Refuse a training request of a run that is not there, or one that was computed long ago."""
        run = self._runs.get(new.target)
        if run is None:
            if new.seq != 0:
                raise ServiceError(f"model_id: there is no training run '{new.target}'", "user")
            return
        next_seq, state = run
        if new.seq < next_seq:
            raise RequestForgotten(
                f"seq_id {new.seq} of {new.target}: its answer was fetched and is forgotten"
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
    """Limits of one key, and what it has used of them."""

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
        """Count one more request. Raises: OverLimit."""
        if self._queue is not None and self._waiting >= self._queue:
            raise KeyLimitExceeded(
                f"{self._waiting} requests of this key wait (limit {self._queue}); fetch or cancel",
                QUEUE_RETRY_SECONDS,
            )
        before, here = self._accepted.get(self._minute - 1, 0), self._accepted.get(self._minute, 0)
        # sliding window: the last minute counts by its part that lies within the last 60 seconds
        if self._rate is not None and before * (1 - self._minute_fraction) + here + 1 > self._rate:
            wait = max(1.0, math.ceil(60 * (1 - self._minute_fraction)) / 4)
            raise KeyLimitExceeded(
                f"this key has a limit of {self._rate} requests per minute", wait
            )
        self._waiting += 1
        self._accepted[self._minute] = here + 1

    def write_counts(self) -> None:
        """Keep the counts of the last two minutes."""
        if self._rate is None:
            return
        self._connection.execute(_DELETE_ACCEPTED_COUNTS, {"name": self._owner})
        rows = [
            {"owner": self._owner, "minute": minute, "accepted": number}
            for minute, number in self._accepted.items()
        ]
        self._connection.execute(_INSERT_ACCEPTED_COUNTS, rows)


_requests_table = tables.requests
MAX_IDS_PER_STATEMENT = 10_000  # requests of one statement: SQLite takes 32,766 values in one
_OPEN_STATES = ("waiting", "running")
_REQUEST_COLUMNS = [
    column for column in _requests_table.c if column.name not in ("line", "digest", "finish_place")
]
_LIGHT_COLUMNS = [column for column in _REQUEST_COLUMNS if column.name != "payload"]
_SELECT_REQUEST = sa.select(_requests_table).where(
    _requests_table.c.request_id == sa.bindparam("request_id")
)
_SELECT_FINISHED = (
    sa.select(
        _requests_table.c.request_id, _requests_table.c.target, _requests_table.c.finish_place
    )
    .where(_requests_table.c.finish_place > sa.bindparam("cursor"))
    .order_by(_requests_table.c.finish_place)
    .limit(sa.bindparam("most"))
)
_SELECT_RESULT = sa.select(*_LIGHT_COLUMNS).where(
    _requests_table.c.request_id == sa.bindparam("request_id")
)
_SELECT_RESULTS = sa.select(*_LIGHT_COLUMNS).where(
    _requests_table.c.request_id.in_(sa.bindparam("ids", expanding=True))
)


def next_finish_place(connection: sa.Connection) -> int:
    """The next place in the order of finishing."""
    return next_counter_value(connection, "finished")


class RequestIntake:
    """Requests as the server sees them."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def accept_request(self, new: NewRequest) -> StoredRequest:
        """Take a request; it is durable when this returns. Any number of threads may call.

        The same (target, line, seq) with the same payload again gives the request that is there, with its facts.
        A creation (`create_model`, or `load_weights` with seq 0) makes the run's record, too.
        Raises: SeqReused for another payload; RequestGone for one whose answer is forgotten for good; OverLimit;
            ServiceError (user) for a run that does not exist; BackendError where the store does not answer.
        """
        (answer,) = self.accept_batch([new])
        if isinstance(answer, Exception):
            raise answer
        self.sync_to_disk()
        return answer

    def accept_batch(self, batch: Sequence[NewRequest]) -> list[StoredRequest | Exception]:
        """As `accept`, answers and errors in order; call `sync` before anybody hears of them. Raises: BackendError."""
        with self._database.write_transaction("when told") as connection:
            answers = accept_new_requests(connection, batch, self._clock())
            inject_fault("service.accepting")
        inject_fault("service.accepted")
        return answers

    def sync_to_disk(self) -> None:
        """Have everything on the disk that anybody has committed by now: what is told must be there."""
        self._database.sync_to_disk()

    def find_request(self, request_id: str) -> StoredRequest | None:
        """An accepted request; None where there is none, or it is long forgotten."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_SELECT_REQUEST, {"request_id": request_id}).first()
        return None if row is None else parse_request_row(row)

    def find_result(self, request_id: str) -> StoredRequest | None:
        """A request with its answer, without its payload."""
        with self._database.read_transaction() as connection:
            row = connection.execute(_SELECT_RESULT, {"request_id": request_id}).first()
        return None if row is None else _parse_light_row(row)

    def find_results(self, request_ids: Iterable[str]) -> list[StoredRequest]:
        """Those of these requests that are there, with their answers, without their payloads, in any order."""
        if not (ids := list(request_ids)):
            return []
        with self._database.read_transaction() as connection:
            return [
                _parse_light_row(row) for row in connection.execute(_SELECT_RESULTS, {"ids": ids})
            ]

    def find_sampler_creation(self, sampler_id: str) -> StoredRequest | None:
        """The request that makes a sampler, without its payload."""
        mine = (_requests_table.c.target == sampler_id) & (_requests_table.c.line == "sampler")
        with self._database.read_transaction() as connection:
            row = connection.execute(sa.select(*_LIGHT_COLUMNS).where(mine)).first()
        return None if row is None else _parse_light_row(row)

    def read_finish_cursor(self) -> int:
        """The cursor for `list_finished_since` from now on."""
        counters = tables.counters
        with self._database.read_transaction() as connection:
            return (
                connection.scalar(sa.select(counters.c.value).where(counters.c.name == "finished"))
                or 0
            )

    def list_finished_since(
        self, cursor: int, limit: int = 1000
    ) -> tuple[list[tuple[str, str]], int]:
        """(request id, target) of requests that became final after `cursor`, in that order, and the next cursor.

        Wait with `changes` and `wait_for_change`; take the number of `changes` before this list.
        """
        with self._database.read_transaction() as connection:
            rows = connection.execute(_SELECT_FINISHED, {"cursor": cursor, "most": limit}).all()
        return [(row.request_id, row.target) for row in rows], (
            rows[-1].finish_place if rows else cursor
        )

    def list_finished_samples(
        self, target: str, first: int, last: int, cursor: int, limit: int = 1000
    ) -> tuple[list[tuple[str, str, int]], int]:
        """(request id, state, bytes of the answer) of a sampler's samples that became final after `cursor`, and the
        next cursor. `first`, `last`: bounds of their sequence ids.
        """
        place = _requests_table.c.finish_place
        mine = (
            (_requests_table.c.target == target)
            & (_requests_table.c.line == "sample")
            & _requests_table.c.seq.between(first, last)
        )
        size = sa.func.length(_requests_table.c.answer).label("size")
        query = sa.select(_requests_table.c.request_id, _requests_table.c.state, size, place).where(
            mine, place > cursor
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.order_by(place).limit(limit)).all()
        found = [(row.request_id, row.state, row.size or 0) for row in rows]
        return found, (rows[-1].finish_place if rows else cursor)

    def drop_results(self, request_ids: Iterable[str], owner: str | None = None) -> None:
        """Drop answers that were fetched (of one owner); that they were there stays known (see `Work.expire`)."""
        ids = list(request_ids)
        if not ids:
            return
        with self._database.write_transaction() as connection:
            for start in range(0, len(ids), MAX_IDS_PER_STATEMENT):
                chosen = _requests_table.c.request_id.in_(
                    ids[start : start + MAX_IDS_PER_STATEMENT]
                ) & _requests_table.c.finished.is_not(None)
                if owner is not None:
                    chosen &= _requests_table.c.owner == owner
                connection.execute(
                    _requests_table.update().where(chosen).values(forgotten=True, answer=None)
                )

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a request that waits; its place in the order is passed over. False = it runs, is final, or unknown."""
        with self._database.write_transaction() as connection:
            chosen = (_requests_table.c.request_id == request_id) & (
                _requests_table.c.state == "waiting"
            )
            return cancel_requests(connection, chosen, "cancelled", self._clock()) > 0

    def count_open_requests(self, target: str | None = None) -> dict[str, dict[str, int]]:
        """Open requests: kind -> state -> number."""
        found: dict[str, dict[str, int]] = {}
        query = sa.select(_requests_table.c.kind, _requests_table.c.state, sa.func.count()).where(
            _requests_table.c.state.in_(_OPEN_STATES)
        )
        if target is not None:
            query = query.where(_requests_table.c.target == target)
        with self._database.read_transaction() as connection:
            for kind, state, number in connection.execute(
                query.group_by(_requests_table.c.kind, _requests_table.c.state)
            ):
                found.setdefault(kind, {})[state] = number
        return found

    def list_request_timings(
        self, target: str | None = None, limit: int = 1000
    ) -> list[tuple[str, float, float]]:
        """(kind, seconds waited, seconds served) of the newest finished requests."""
        columns = (
            _requests_table.c.kind,
            _requests_table.c.accepted,
            _requests_table.c.started,
            _requests_table.c.finished,
        )
        query = sa.select(*columns).where(
            _requests_table.c.started.is_not(None), _requests_table.c.finished.is_not(None)
        )
        if target is not None:
            query = query.where(_requests_table.c.target == target)
        with self._database.read_transaction() as connection:
            rows = connection.execute(
                query.order_by(_requests_table.c.finish_place.desc()).limit(limit)
            ).all()
        return [(row.kind, row.started - row.accepted, row.finished - row.started) for row in rows]

    def list_requests(
        self, target: str, limit: int = 100, offset: int = 0
    ) -> Sequence[StoredRequest]:
        """Requests of a run or sampler, the newest first, without payloads and answers."""
        light = [c for c in _REQUEST_COLUMNS if c.name not in ("payload", "answer")]
        query = (
            sa.select(*light)
            .where(_requests_table.c.target == target)
            .order_by(_requests_table.c.place.desc())
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return [
            StoredRequest(**{c.name: row._mapping[c] for c in light}, payload=b"") for row in rows
        ]


def _parse_light_row(row: sa.Row[Any]) -> StoredRequest:
    return StoredRequest(**{c.name: row._mapping[c] for c in _LIGHT_COLUMNS}, payload=b"")


def cancel_requests(connection: sa.Connection, condition: Any, error: str, now: float) -> int:
    """Cancel what is chosen; the number of requests."""
    ids = connection.scalars(
        sa.select(_requests_table.c.request_id).where(condition).order_by(_requests_table.c.place)
    ).all()
    for request_id in ids:
        connection.execute(
            _requests_table.update()
            .where(_requests_table.c.request_id == request_id)
            .values(
                state="cancelled",
                error=error,
                category="user",
                finished=now,
                finish_place=next_finish_place(connection),
                payload=b"",
            )
        )
    return len(ids)
