"""Acceptance of requests, many at a time: repeats are known, order and limits are kept, one transaction for all."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

import flows.service.store.tables as tables
from flows.service.store.records import NewRequest, OverLimit, RequestGone, SeqReused, StoredRequest, line_of
from flows.service.store.transactions import counted
from rl_core.errors import ServiceError

__all__ = ["accept_all", "stored"]

_requests, _runs, _samplers = tables.requests, tables.runs, tables.samplers
_minutes, _keys = tables.minutes, tables.keys
_FIELDS = [column.name for column in _requests.c if column.name not in ("line", "digest", "finish_place")]
FEW_SECONDS = 5.0  # to come again where a queue is full
TOUCH_SECONDS = 5.0  # between two notes that a run or sampler is in use

# Made once: building a statement costs more than running it.
_KNOWN = sa.select(_requests).where(
    sa.tuple_(_requests.c.target, _requests.c.line, _requests.c.seq).in_(sa.bindparam("keys", expanding=True))
)
_RUNS = sa.select(_runs.c.model_id, _runs.c.next_seq, _runs.c.state).where(
    _runs.c.model_id.in_(sa.bindparam("names", expanding=True))
)
_KEY = sa.select(_keys.c.requests_per_minute, _keys.c.queue).where(_keys.c.key_id == sa.bindparam("owner"))
_WAITING = (
    sa.select(sa.func.count()).select_from(_requests)
    .where(_requests.c.owner == sa.bindparam("owner"), _requests.c.state.in_(("waiting", "running")))
)  # fmt: skip
_ACCEPTED = sa.select(_minutes.c.minute, _minutes.c.accepted).where(_minutes.c.owner == sa.bindparam("owner"))
_OLD_MINUTES = _minutes.delete().where(_minutes.c.owner == sa.bindparam("name"))
_INSERT, _NEW_RUN, _NEW_MINUTE = _requests.insert(), _runs.insert(), _minutes.insert()
_TOUCH = [
    table.update().where(name == sa.bindparam("name"), table.c.touched < sa.bindparam("old"))
    .values(touched=sa.bindparam("now"))
    for table, name in ((_runs, _runs.c.model_id), (_samplers, _samplers.c.sampler_id))
]  # fmt: skip


def stored(row: sa.Row[Any]) -> StoredRequest:
    """A row of `requests` as a record."""
    return StoredRequest(**{name: row._mapping[name] for name in _FIELDS})


def accept_all(connection: sa.Connection, batch: Sequence[NewRequest], now: float) -> list[StoredRequest | Exception]:
    """Answers in order: the stored request, new or known, or the error for its sender."""
    return _Batch(connection, batch, now).answers()


class _Batch:
    """Requests that are accepted in one transaction, and what it has to know of the store."""

    def __init__(self, connection: sa.Connection, batch: Sequence[NewRequest], now: float) -> None:
        self._connection, self._batch, self._now = connection, batch, now
        keys = [(new.target, line_of(new.kind), new.seq) for new in batch]
        self._known: dict[tuple[str, str, int], tuple[str, StoredRequest]] = {
            (row.target, row.line, row.seq): (row.digest, stored(row))
            for row in connection.execute(_KNOWN, {"keys": keys})
        }
        names = [target for target, line, _ in keys if line == "training"]
        rows = connection.execute(_RUNS, {"names": names}) if names else ()
        self._runs: dict[str, tuple[int, str]] = {row.model_id: (row.next_seq, row.state) for row in rows}
        self._limits: dict[str, _Limits] = {}
        self._rows: list[dict[str, Any]] = []
        self._new_runs: list[dict[str, Any]] = []

    def answers(self) -> list[StoredRequest | Exception]:
        """Decide on all, then write."""
        place = counted(self._connection, "places", len(self._batch)) - len(self._batch)
        found: list[StoredRequest | Exception] = []
        for offset, new in enumerate(self._batch, 1):
            try:
                found.append(self._accept(new, place + offset))
            except ServiceError as error:
                found.append(error)
        self._write()
        return found

    def _accept(self, new: NewRequest, place: int) -> StoredRequest:
        line, digest = line_of(new.kind), new.digest
        key = (new.target, line, new.seq)
        if key in self._known:
            before, found = self._known[key]
            if before != digest:
                raise SeqReused(
                    f"seq_id {new.seq} of {new.target} was used before with another request; "
                    "use the next number, or send the same request again"
                )
            return found
        if line == "training":
            self._check_place(new)
        if new.owner not in self._limits:
            self._limits[new.owner] = _Limits(self._connection, new.owner, self._now)
        self._limits[new.owner].take()
        if line == "training" and new.seq == 0:
            self._runs[new.target] = (0, "creating")
            self._new_runs.append({
                "model_id": new.target, "owner": new.owner, "session_id": new.session_id, "created": self._now,
                "touched": self._now, "state": "creating", "facts": dict(new.facts), "info": {},
            })  # fmt: skip
        found = StoredRequest(
            kind=new.kind, owner=new.owner, session_id=new.session_id, target=new.target, seq=new.seq,
            payload=new.payload, content_type=new.content_type, facts=dict(new.facts), deadline=new.deadline,
            request_id=f"r-{secrets.token_hex(12)}", place=place, state="waiting", accepted=self._now,
        )  # fmt: skip
        self._known[key] = digest, found
        row = {name: getattr(found, name) for name in _FIELDS}
        self._rows.append({**row, "line": line, "digest": digest})
        return found

    def _check_place(self, new: NewRequest) -> None:
        """Refuse a training request of a run that is not there, or one that was computed long ago."""
        run = self._runs.get(new.target)
        if run is None:
            if new.seq != 0:
                raise ServiceError(f"model_id: there is no training run '{new.target}'", "user")
            return
        next_seq, state = run
        if new.seq < next_seq:
            raise RequestGone(f"seq_id {new.seq} of {new.target}: its answer was fetched and is forgotten")
        if state == "unloaded":
            raise ServiceError(f"model_id: the training run '{new.target}' was unloaded", "user")

    def _write(self) -> None:
        if not self._rows:
            return
        if self._new_runs:
            self._connection.execute(_NEW_RUN, self._new_runs)
        self._connection.execute(_INSERT, self._rows)
        times = {"old": self._now - TOUCH_SECONDS, "now": self._now}
        for statement, is_training in zip(_TOUCH, (True, False), strict=True):
            names = {row["target"] for row in self._rows if (row["line"] == "training") == is_training}
            if names:
                self._connection.execute(statement, [{"name": name, **times} for name in sorted(names)])
        for limits in self._limits.values():
            limits.write()


class _Limits:
    """Limits of one key, and what it has used of them."""

    def __init__(self, connection: sa.Connection, owner: str, now: float) -> None:
        self._connection, self._owner = connection, owner
        key = connection.execute(_KEY, {"owner": owner}).first()
        self._queue: int | None = None if key is None else key.queue
        self._rate: int | None = None if key is None else key.requests_per_minute
        self._waiting = 0
        self._accepted: dict[int, int] = {}
        self._minute, self._passed = int(now // 60), (now % 60) / 60
        if self._queue is not None:
            self._waiting = connection.scalar(_WAITING, {"owner": owner}) or 0
        if self._rate is not None:
            rows = connection.execute(_ACCEPTED, {"owner": owner})
            self._accepted = {row.minute: row.accepted for row in rows if row.minute >= self._minute - 1}

    def take(self) -> None:
        """Count one more request. Raises: OverLimit."""
        if self._queue is not None and self._waiting >= self._queue:
            raise OverLimit(
                f"{self._waiting} requests of this key wait (limit {self._queue}); fetch or cancel", FEW_SECONDS
            )
        before, here = self._accepted.get(self._minute - 1, 0), self._accepted.get(self._minute, 0)
        # sliding window: the last minute counts by its part that lies within the last 60 seconds
        if self._rate is not None and before * (1 - self._passed) + here + 1 > self._rate:
            wait = max(1.0, math.ceil(60 * (1 - self._passed)) / 4)
            raise OverLimit(f"this key has a limit of {self._rate} requests per minute", wait)
        self._waiting += 1
        self._accepted[self._minute] = here + 1

    def write(self) -> None:
        """Keep the counts of the last two minutes."""
        if self._rate is None:
            return
        self._connection.execute(_OLD_MINUTES, {"name": self._owner})
        rows = [
            {"owner": self._owner, "minute": minute, "accepted": number} for minute, number in self._accepted.items()
        ]
        self._connection.execute(_NEW_MINUTE, rows)
