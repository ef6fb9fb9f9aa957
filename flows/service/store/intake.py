"""The server's side of requests: accept, look up, wait, forget, cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

import flows.service.store.tables as tables
from flows.service.store.acceptance import accept_all, stored
from flows.service.store.records import NewRequest, StoredRequest
from flows.service.store.transactions import Database, counted
from rl_core.storage.faults import fault

__all__ = ["Intake", "cancel_where", "finish_place"]

_requests = tables.requests
MOST_NAMED = 10_000  # requests of one statement: SQLite takes 32,766 values in one
_OPEN = ("waiting", "running")
_FIELDS = [column for column in _requests.c if column.name not in ("line", "digest", "finish_place")]
_LIGHT = [column for column in _FIELDS if column.name != "payload"]
_ONE = sa.select(_requests).where(_requests.c.request_id == sa.bindparam("request_id"))
_FINISHED = (
    sa.select(_requests.c.request_id, _requests.c.target, _requests.c.finish_place)
    .where(_requests.c.finish_place > sa.bindparam("cursor"))
    .order_by(_requests.c.finish_place)
    .limit(sa.bindparam("most"))
)
_RESULT = sa.select(*_LIGHT).where(_requests.c.request_id == sa.bindparam("request_id"))
_RESULTS = sa.select(*_LIGHT).where(_requests.c.request_id.in_(sa.bindparam("ids", expanding=True)))


def finish_place(connection: sa.Connection) -> int:
    """The next place in the order of finishing."""
    return counted(connection, "finished")


class Intake:
    """Requests as the server sees them."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def accept(self, new: NewRequest) -> StoredRequest:
        """Take a request; it is durable when this returns. Any number of threads may call.

        The same (target, line, seq) with the same payload again gives the request that is there, with its facts.
        A creation (`create_model`, or `load_weights` with seq 0) makes the run's record, too.
        Raises: SeqReused for another payload; RequestGone for one whose answer is forgotten for good; OverLimit;
            ServiceError (user) for a run that does not exist; BackendError where the store does not answer.
        """
        (answer,) = self.accept_together([new])
        if isinstance(answer, Exception):
            raise answer
        self.sync()
        return answer

    def accept_together(self, batch: Sequence[NewRequest]) -> list[StoredRequest | Exception]:
        """As `accept`, answers and errors in order; call `sync` before anybody hears of them. Raises: BackendError."""
        with self._database.writing("when told") as connection:
            answers = accept_all(connection, batch, self._clock())
            fault("service.accepting")
        fault("service.accepted")
        return answers

    def sync(self) -> None:
        """Have everything on the disk that anybody has committed by now: what is told must be there."""
        self._database.sync()

    def request(self, request_id: str) -> StoredRequest | None:
        """An accepted request; None where there is none, or it is long forgotten."""
        with self._database.reading() as connection:
            row = connection.execute(_ONE, {"request_id": request_id}).first()
        return None if row is None else stored(row)

    def result(self, request_id: str) -> StoredRequest | None:
        """A request with its answer, without its payload."""
        with self._database.reading() as connection:
            row = connection.execute(_RESULT, {"request_id": request_id}).first()
        return None if row is None else _light(row)

    def results(self, request_ids: Iterable[str]) -> list[StoredRequest]:
        """Those of these requests that are there, with their answers, without their payloads, in any order."""
        if not (ids := list(request_ids)):
            return []
        with self._database.reading() as connection:
            return [_light(row) for row in connection.execute(_RESULTS, {"ids": ids})]

    def creation_of_sampler(self, sampler_id: str) -> StoredRequest | None:
        """The request that makes a sampler, without its payload."""
        mine = (_requests.c.target == sampler_id) & (_requests.c.line == "sampler")
        with self._database.reading() as connection:
            row = connection.execute(sa.select(*_LIGHT).where(mine)).first()
        return None if row is None else _light(row)

    def finish_cursor(self) -> int:
        """The cursor for `finished_since` from now on."""
        counters = tables.counters
        with self._database.reading() as connection:
            return connection.scalar(sa.select(counters.c.value).where(counters.c.name == "finished")) or 0

    def finished_since(self, cursor: int, limit: int = 1000) -> tuple[list[tuple[str, str]], int]:
        """(request id, target) of requests that became final after `cursor`, in that order, and the next cursor.

        Wait with `changes` and `wait_for_change`; take the number of `changes` before this list.
        """
        with self._database.reading() as connection:
            rows = connection.execute(_FINISHED, {"cursor": cursor, "most": limit}).all()
        return [(row.request_id, row.target) for row in rows], (rows[-1].finish_place if rows else cursor)

    def finished_of(
        self, target: str, first: int, last: int, cursor: int, limit: int = 1000
    ) -> tuple[list[tuple[str, str, int]], int]:
        """(request id, state, bytes of the answer) of a sampler's samples that became final after `cursor`, and the
        next cursor. `first`, `last`: bounds of their sequence ids.
        """
        place = _requests.c.finish_place
        mine = (_requests.c.target == target) & (_requests.c.line == "sample") & _requests.c.seq.between(first, last)
        size = sa.func.length(_requests.c.answer).label("size")
        query = sa.select(_requests.c.request_id, _requests.c.state, size, place).where(mine, place > cursor)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(place).limit(limit)).all()
        found = [(row.request_id, row.state, row.size or 0) for row in rows]
        return found, (rows[-1].finish_place if rows else cursor)

    def forget(self, request_ids: Iterable[str], owner: str | None = None) -> None:
        """Drop answers that were fetched (of one owner); that they were there stays known (see `Work.expire`)."""
        ids = list(request_ids)
        if not ids:
            return
        with self._database.writing() as connection:
            for start in range(0, len(ids), MOST_NAMED):
                chosen = _requests.c.request_id.in_(ids[start : start + MOST_NAMED]) & _requests.c.finished.is_not(None)
                if owner is not None:
                    chosen &= _requests.c.owner == owner
                connection.execute(_requests.update().where(chosen).values(forgotten=True, answer=None))

    def cancel(self, request_id: str) -> bool:
        """Cancel a request that waits; its place in the order is passed over. False = it runs, is final, or unknown."""
        with self._database.writing() as connection:
            chosen = (_requests.c.request_id == request_id) & (_requests.c.state == "waiting")
            return cancel_where(connection, chosen, "cancelled", self._clock()) > 0

    def depths(self, target: str | None = None) -> dict[str, dict[str, int]]:
        """Open requests: kind -> state -> number."""
        found: dict[str, dict[str, int]] = {}
        query = sa.select(_requests.c.kind, _requests.c.state, sa.func.count()).where(_requests.c.state.in_(_OPEN))
        if target is not None:
            query = query.where(_requests.c.target == target)
        with self._database.reading() as connection:
            for kind, state, number in connection.execute(query.group_by(_requests.c.kind, _requests.c.state)):
                found.setdefault(kind, {})[state] = number
        return found

    def timings(self, target: str | None = None, limit: int = 1000) -> list[tuple[str, float, float]]:
        """(kind, seconds waited, seconds served) of the newest finished requests."""
        columns = _requests.c.kind, _requests.c.accepted, _requests.c.started, _requests.c.finished
        query = sa.select(*columns).where(_requests.c.started.is_not(None), _requests.c.finished.is_not(None))
        if target is not None:
            query = query.where(_requests.c.target == target)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(_requests.c.finish_place.desc()).limit(limit)).all()
        return [(row.kind, row.started - row.accepted, row.finished - row.started) for row in rows]

    def requests_of(self, target: str, limit: int = 100, offset: int = 0) -> Sequence[StoredRequest]:
        """Requests of a run or sampler, the newest first, without payloads and answers."""
        light = [c for c in _FIELDS if c.name not in ("payload", "answer")]
        query = sa.select(*light).where(_requests.c.target == target).order_by(_requests.c.place.desc())
        with self._database.reading() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return [StoredRequest(**{c.name: row._mapping[c] for c in light}, payload=b"") for row in rows]


def _light(row: sa.Row[Any]) -> StoredRequest:
    return StoredRequest(**{c.name: row._mapping[c] for c in _LIGHT}, payload=b"")


def cancel_where(connection: sa.Connection, chosen: Any, error: str, now: float) -> int:
    """Cancel what is chosen; the number of requests."""
    ids = connection.scalars(sa.select(_requests.c.request_id).where(chosen).order_by(_requests.c.place)).all()
    for request_id in ids:
        connection.execute(
            _requests.update().where(_requests.c.request_id == request_id).values(
                state="cancelled", error=error, category="user", finished=now, finish_place=finish_place(connection),
                payload=b"",
            )
        )  # fmt: skip
    return len(ids)
