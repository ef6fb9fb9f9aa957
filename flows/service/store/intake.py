"""The server's side of requests: accept, look up, wait, forget, cancel; limits of keys."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

import flows.service.store.tables as tables
from flows.service.store.records import NewRequest, OverLimit, RequestGone, SeqReused, StoredRequest, line_of
from flows.service.store.transactions import Database, GroupCommit, counted
from rl_core.errors import ServiceError
from rl_core.storage.faults import fault

__all__ = ["Intake", "finish_place", "stored"]

_requests, _runs, _samplers = tables.requests, tables.runs, tables.samplers
_minutes, _keys = tables.minutes, tables.keys
_OPEN = ("waiting", "running")
_FIELDS = [column for column in _requests.c if column.name not in ("line", "digest", "finish_place")]
FEW_SECONDS = 5.0  # to come again where a queue is full


def stored(row: sa.Row[Any]) -> StoredRequest:
    """A row of `requests` as a record."""
    return StoredRequest(**{column.name: row._mapping[column] for column in _FIELDS})


def finish_place(connection: sa.Connection) -> int:
    """The next place in the order of finishing."""
    return counted(connection, "finished")


class Intake:
    """Requests as the server sees them."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._accept = GroupCommit(self._accept_all)

    def accept(self, new: NewRequest) -> StoredRequest:
        """Take a request; it is durable when this returns. Any number of threads may call.

        The same (target, line, seq) with the same payload again gives the request that is there, with its facts.
        A creation (`create_model`, or `load_weights` with seq 0) makes the run's record, too.
        Raises: SeqReused for another payload; RequestGone for one whose answer is forgotten for good; OverLimit;
            ServiceError (user) for a run that does not exist; BackendError where the store does not answer.
        """
        return self._accept(new)

    def _accept_all(self, batch: list[NewRequest]) -> list[StoredRequest | Exception]:
        answers: list[StoredRequest | Exception] = []
        with self._database.writing() as connection:
            for new in batch:
                try:
                    answers.append(self._accept_one(connection, new))
                except ServiceError as error:  # nothing of it is written yet
                    answers.append(error)
            fault("service.accepting")
        fault("service.accepted")
        return answers

    def _accept_one(self, connection: sa.Connection, new: NewRequest) -> StoredRequest:
        line, now = line_of(new.kind), self._clock()
        same = (_requests.c.target == new.target) & (_requests.c.line == line) & (_requests.c.seq == new.seq)
        row = connection.execute(sa.select(_requests).where(same)).first()
        if row is not None:
            if row.digest != new.digest:
                raise SeqReused(
                    f"seq_id {new.seq} of {new.target} was used before with another request; "
                    "use the next number, or send the same request again"
                )
            return stored(row)
        if line == "training":
            self._check_place(connection, new)
        self._check_limits(connection, new.owner, now)
        if line == "training" and new.seq == 0:
            connection.execute(
                _runs.insert().values(
                    model_id=new.target, owner=new.owner, session_id=new.session_id, created=now, touched=now,
                    state="creating", facts=dict(new.facts), info={},
                )
            )  # fmt: skip
        else:
            table, name = (_runs, _runs.c.model_id) if line == "training" else (_samplers, _samplers.c.sampler_id)
            connection.execute(table.update().where(name == new.target).values(touched=now))
        values = dict(
            request_id=f"r-{secrets.token_hex(12)}", kind=new.kind, line=line, owner=new.owner,
            session_id=new.session_id, target=new.target, seq=new.seq, payload=new.payload, digest=new.digest,
            content_type=new.content_type, facts=dict(new.facts), deadline=new.deadline, state="waiting", accepted=now,
            forgotten=False,
        )  # fmt: skip
        return stored(connection.execute(_requests.insert().values(values).returning(_requests)).one())

    def _check_place(self, connection: sa.Connection, new: NewRequest) -> None:
        """Refuse a training request of a run that is not there, or one that was computed long ago."""
        run = connection.execute(
            sa.select(_runs.c.next_seq, _runs.c.state).where(_runs.c.model_id == new.target)
        ).first()
        if run is None and new.seq != 0:
            raise ServiceError(f"model_id: there is no training run '{new.target}'", "user")
        if run is not None and new.seq < run.next_seq:
            raise RequestGone(f"seq_id {new.seq} of {new.target}: its answer was fetched and is forgotten")
        if run is not None and run.state == "unloaded":
            raise ServiceError(f"model_id: the training run '{new.target}' was unloaded", "user")

    def _check_limits(self, connection: sa.Connection, owner: str, now: float) -> None:
        """Count an accepted request. Raises: OverLimit."""
        key = connection.execute(
            sa.select(_keys.c.requests_per_minute, _keys.c.queue).where(_keys.c.key_id == owner)
        ).first()
        if key is not None and key.queue is not None:
            mine = (_requests.c.owner == owner) & _requests.c.state.in_(_OPEN)
            waiting = connection.scalar(sa.select(sa.func.count()).select_from(_requests).where(mine)) or 0
            if waiting >= key.queue:
                raise OverLimit(
                    f"{waiting} requests of this key wait (limit {key.queue}); fetch or cancel", FEW_SECONDS
                )
        if key is None or key.requests_per_minute is None:
            return
        minute, passed = int(now // 60), (now % 60) / 60
        counts = dict(
            connection.execute(
                sa.select(_minutes.c.minute, _minutes.c.accepted)
                .where(_minutes.c.owner == owner, _minutes.c.minute.in_((minute - 1, minute)))
            ).tuples().all()
        )  # fmt: skip
        # sliding window: the last minute counts by its part that lies within the last 60 seconds
        if counts.get(minute - 1, 0) * (1 - passed) + counts.get(minute, 0) + 1 > key.requests_per_minute:
            wait = max(1.0, math.ceil(60 * (1 - passed)) / 4)
            raise OverLimit(f"this key has a limit of {key.requests_per_minute} requests per minute", wait)
        here = (_minutes.c.owner == owner) & (_minutes.c.minute == minute)
        if minute in counts:
            connection.execute(_minutes.update().where(here).values(accepted=_minutes.c.accepted + 1))
        else:
            connection.execute(_minutes.insert().values(owner=owner, minute=minute, accepted=1))
            connection.execute(_minutes.delete().where(_minutes.c.owner == owner, _minutes.c.minute < minute - 1))

    def request(self, request_id: str) -> StoredRequest | None:
        """An accepted request; None where there is none, or it is long forgotten."""
        with self._database.reading() as connection:
            row = connection.execute(sa.select(_requests).where(_requests.c.request_id == request_id)).first()
        return None if row is None else stored(row)

    def result(self, request_id: str) -> StoredRequest | None:
        """A request with its answer, without its payload."""
        light = [column for column in _FIELDS if column.name != "payload"]
        with self._database.reading() as connection:
            row = connection.execute(sa.select(*light).where(_requests.c.request_id == request_id)).first()
        return None if row is None else StoredRequest(**{c.name: row._mapping[c] for c in light}, payload=b"")

    def finish_cursor(self) -> int:
        """The cursor for `finished_since` from now on."""
        counters = tables.counters
        with self._database.reading() as connection:
            return connection.scalar(sa.select(counters.c.value).where(counters.c.name == "finished")) or 0

    def finished_since(self, cursor: int, limit: int = 1000) -> tuple[list[tuple[str, str]], int]:
        """(request id, target) of requests that became final after `cursor`, in that order, and the next cursor.

        Wait with `changes` and `wait_for_change`; take the number of `changes` before this list.
        """
        place = _requests.c.finish_place
        with self._database.reading() as connection:
            rows = connection.execute(
                sa.select(_requests.c.request_id, _requests.c.target, place)
                .where(place > cursor)
                .order_by(place)
                .limit(limit)
            ).all()
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
            chosen = _requests.c.request_id.in_(ids) & _requests.c.finished.is_not(None)
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
