"""The worker's side of requests: what is ready, claiming, answers, the history that is replayed, snapshots, expiry."""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

import posttrain.training_service.store.tables as tables
from posttrain.training_service.store.database import (
    StoreDatabase,
    next_counter_value,
    record_latest_time,
)
from posttrain.training_service.store.intake import cancel_requests, parse_request_row
from posttrain.training_service.store.records import ResultBody, StoredRequest, replace_unstorable
from rl_core.errors import ServiceError
from rl_core.storage.faults import inject_fault

_requests, _runs = tables.requests, tables.runs
DEADLINE_PASSED_MESSAGE = "its deadline passed before it was begun"

# Made once: building a statement costs more than running it.
_SELECT_WAITING = (
    sa.select(
        _requests.c.request_id,
        _requests.c.kind,
        _requests.c.line,
        _requests.c.target,
        _requests.c.seq,
        _requests.c.place,
        _requests.c.deadline,
        _requests.c.deaths,
        sa.func.length(_requests.c.payload).label("size"),
    )
    .where(_requests.c.state == "waiting", _requests.c.place > sa.bindparam("after"))
    .order_by(_requests.c.place)
    .limit(sa.bindparam("most"))
)
_SELECT_CHAINS = (
    sa.select(_requests.c.target, _requests.c.seq, _runs.c.next_seq, _requests.c.state)
    .join(_runs, _runs.c.model_id == _requests.c.target)
    .where(
        _requests.c.target.in_(sa.bindparam("targets", expanding=True)),
        _requests.c.line == "training",
        _requests.c.seq >= _runs.c.next_seq,
        _requests.c.state.in_(("waiting", "running", "cancelled")),
    )
    .order_by(_requests.c.target, _requests.c.seq)
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


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request that may be computed now, without its contents."""

    request_id: str
    kind: str
    target: str
    seq: int
    place: int
    size: int  # bytes of the payload
    deaths: int = 0  # of workers that were computing it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """The end of a request, and what else becomes true with it."""

    request_id: str
    answer: ResultBody | ServiceError
    run: Mapping[str, Any] = field(default_factory=dict)  # new values of the target's row in `runs`
    rows: tuple[
        tuple[str, Mapping[str, Any]], ...
    ] = ()  # rows of other tables, in place of those of the same key


class WorkQueue:
    """Requests as the worker sees them. One worker at a time (it holds a lock of the service's folder)."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    # -- what to compute -----------------------------------------------------------------------------------------------

    def list_ready_requests(self, limit: int = 1024) -> list[ReadyRequest]:
        """Requests that may be computed, in the order of acceptance; of training those without a hole before them, each
        run's in the order of its numbers.

        Those whose deadline has passed are cancelled. However many wait behind a hole, those behind them are found.
        """
        now, most = self._clock(), 8 * limit
        rows: list[sa.Row[Any]] = []
        chains: dict[str, list[int]] = {}
        with self._database.read_transaction() as connection:
            while True:
                page = connection.execute(
                    _SELECT_WAITING, {"most": most, "after": rows[-1].place if rows else -1}
                ).all()
                rows += page
                late = [
                    row.request_id
                    for row in page
                    if row.deadline is not None and row.deadline <= now
                ]
                targets = {row.target for row in page if row.line == "training"}
                chains |= self._find_ready_chains(connection, targets - chains.keys())
                found = _sort_by_chain(rows, chains)
                if late or found or len(page) < most:
                    break
        if late:
            with self._database.write_transaction() as connection:
                chosen = _requests.c.request_id.in_(late) & (_requests.c.state == "waiting")
                cancel_requests(connection, chosen, DEADLINE_PASSED_MESSAGE, now)
            return self.list_ready_requests(limit)
        return [
            ReadyRequest(
                row.request_id, row.kind, row.target, row.seq, row.place, row.size or 0, row.deaths
            )
            for row in found[:limit]
        ]

    @staticmethod
    def _find_ready_chains(connection: sa.Connection, targets: set[str]) -> dict[str, list[int]]:
        """Numbers that wait behind each run's newest computed request without a hole; cancelled ones are no hole."""
        rows = connection.execute(_SELECT_CHAINS, {"targets": sorted(targets)}) if targets else ()
        chains: dict[str, list[int]] = {target: [] for target in targets}
        ends: dict[str, int] = {}
        for target, seq, next_seq, state in rows:
            if seq == ends.setdefault(target, next_seq):
                ends[target] += 1
                if state == "waiting":
                    chains[target].append(seq)
        return chains

    def claim_requests(self, request_ids: Iterable[str]) -> list[StoredRequest]:
        """Those that still wait, as running ones, in the order of acceptance."""
        ids = list(request_ids)
        if not ids:
            return []
        with self._database.write_transaction("later") as connection:
            rows = connection.execute(_CLAIM_REQUESTS, {"ids": ids, "now": self._clock()}).all()
        inject_fault("service.claimed")
        return sorted((parse_request_row(row) for row in rows), key=lambda request: request.place)

    def reset_running_requests(self, *, count_death: bool = True) -> int:
        """Have requests wait again that a worker was computing; their number. `died`: count it against them."""
        with self._database.write_transaction() as connection:
            return connection.execute(
                _requests.update()
                .where(_requests.c.state == "running")
                .values(state="waiting", started=None, deaths=_requests.c.deaths + int(count_death))
            ).rowcount

    # -- answers -------------------------------------------------------------------------------------------------------

    def finish_requests(
        self,
        outcomes: Sequence[RequestOutcome | tuple[str, ResultBody | ServiceError]],
        *,
        is_synced: bool = True,
    ) -> None:
        """Store answers and what becomes true with them, all or nothing; what is final already stays as it is.

        synced: on the disk when this returns; else whoever hands out such an answer, or writes down anything that
            follows from it, calls `sync` before.
        """
        if not outcomes:
            return
        given = [
            outcome
            if isinstance(outcome, RequestOutcome)
            else RequestOutcome(request_id=outcome[0], answer=outcome[1])
            for outcome in outcomes
        ]
        with self._database.write_transaction("now" if is_synced else "when told") as connection:
            rows = connection.execute(
                _SELECT_OPEN_REQUESTS, {"ids": [one.request_id for one in given]}
            )
            known = {row.request_id: row for row in rows}
            found = [one for one in given if one.request_id in known]
            if found:
                last = next_counter_value(connection, "finished", len(found))
                self._write_outcomes(connection, found, known, last - len(found) + 1)
            inject_fault("service.finishing")
        inject_fault("service.finished")

    def _write_outcomes(
        self,
        connection: sa.Connection,
        outcomes: Sequence[RequestOutcome],
        known: Mapping[str, sa.Row[Any]],
        first: int,
    ) -> None:
        """Write ends of open requests at places of the order of finishing from `first` on."""
        now = self._clock()
        ends: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # of training, and others
        runs: list[dict[str, Any]] = []
        for place, outcome in enumerate(outcomes, first):
            row = known[outcome.request_id]
            is_training = row.line == "training"
            ends[is_training].append(_format_outcome(outcome, place, now))
            if is_training:
                runs.append({"id": row.target, "next_seq": row.seq + 1, **outcome.run})
        for is_training, values in ends.items():
            if values:
                connection.execute(
                    _WRITE_OUTCOME if is_training else _WRITE_OUTCOME_DROP_PAYLOAD, values
                )
        for names, some in itertools.groupby(
            runs, key=tuple
        ):  # in their order: a run may be there twice
            connection.execute(_build_run_update(names[1:]), list(some))
        for outcome in outcomes:
            for name, content in outcome.rows:
                _replace_row(connection, tables.metadata.tables[name], content)

    # -- replay --------------------------------------------------------------------------------------------------------

    def list_replay_requests(self, model_id: str, after: int) -> list[StoredRequest]:
        """A run's final training requests behind number `after`, in their order."""
        mine = (
            (_requests.c.target == model_id)
            & (_requests.c.line == "training")
            & (_requests.c.seq > after)
        )
        query = (
            sa.select(_requests)
            .where(mine, _requests.c.finished.is_not(None))
            .order_by(_requests.c.seq)
        )
        with self._database.read_transaction() as connection:
            return [parse_request_row(row) for row in connection.execute(query)]

    def list_runs_to_snapshot(self) -> list[str]:
        """Runs that have loaded saved weights since their newest snapshot."""
        loaded = (_requests.c.kind == "load_weights") & (_requests.c.state == "done")
        query = sa.select(_runs.c.model_id).join(_requests, _requests.c.target == _runs.c.model_id)
        query = query.where(
            _runs.c.state == "live", loaded, _requests.c.seq > _runs.c.covered
        ).distinct()
        with self._database.read_transaction() as connection:
            return list(connection.scalars(query.order_by(_runs.c.model_id)))

    def record_snapshot(self, model_id: str, seq: int, steps: int) -> None:
        """A durable snapshot holds the requests up to `seq`: those up to the snapshot before lose their payload."""
        with self._database.write_transaction() as connection:
            mine = _runs.c.model_id == model_id
            before = connection.scalar(sa.select(_runs.c.covered).where(mine))
            if before is None or seq <= before:
                return
            connection.execute(
                _runs.update().where(mine).values(covered=seq, covered_before=before, steps=steps)
            )
            covered = (
                (_requests.c.target == model_id)
                & (_requests.c.line == "training")
                & (_requests.c.seq <= before)
            )
            held = _requests.c.finished.is_not(None) & (sa.func.length(_requests.c.payload) > 0)
            connection.execute(_requests.update().where(covered & held).values(payload=b""))
        inject_fault("service.covered")

    def count_worker_event(self, name: str, by: int = 1) -> None:
        """Raise one of the worker's counters."""
        with self._database.write_transaction() as connection:
            next_counter_value(connection, f"worker.{name}", by)

    def read_worker_counters(self) -> dict[str, int]:
        """The worker's counters since the store was made."""
        counters = tables.counters
        query = sa.select(counters.c.name, counters.c.value).where(
            counters.c.name.startswith("worker.")
        )
        with self._database.read_transaction() as connection:
            return {
                name.removeprefix("worker."): int(value)
                for name, value in connection.execute(query)
            }

    # -- expiry --------------------------------------------------------------------------------------------------------

    def expire_results(self, *, result_seconds: float, memory_seconds: float) -> tuple[int, int]:
        """Forget answers that nobody fetched, and in the end that they were there.

        Args:
            result_seconds: lifetime of an answer. memory_seconds: for which a repeated request is still known after
                its answer is forgotten; requests that a snapshot does not hold stay in any case.
        Returns: (answers forgotten, requests removed).
        """
        now = self._clock()
        final = _requests.c.finished.is_not(None)
        with self._database.write_transaction() as connection:
            old = final & ~_requests.c.forgotten & (_requests.c.finished < now - result_seconds)
            forgotten = connection.execute(
                _requests.update().where(old).values(forgotten=True, answer=None)
            ).rowcount
            covered = (
                sa.select(_runs.c.covered_before)
                .where(_runs.c.model_id == _requests.c.target)
                .scalar_subquery()
            )
            ended = sa.exists().where(
                _runs.c.model_id == _requests.c.target, _runs.c.state.in_(("failed", "unloaded"))
            )
            dropped = (_requests.c.line != "training") | (_requests.c.seq <= covered) | ended
            gone = _requests.c.forgotten & (_requests.c.finished < now - memory_seconds) & dropped
            removed = connection.execute(_requests.delete().where(gone)).rowcount
            record_latest_time(connection, now)
        return forgotten, removed


def _sort_by_chain(
    rows: Sequence[sa.Row[Any]], chains: Mapping[str, Sequence[int]]
) -> list[sa.Row[Any]]:
    """Rows in their order, those of a run in that of its numbers: one that came late takes the place of the first.

    So whatever is cut off at the end, nothing is left without what comes before it.

    Args:
        chains: numbers of each run that may be computed, in order; what follows one that is not among the rows is not.
    """
    mine = {(row.target, row.seq): row for row in rows if row.line == "training"}
    turns: dict[str, Iterator[sa.Row[Any]]] = {}
    for target, chain in chains.items():
        there = itertools.takewhile(mine.__contains__, [(target, seq) for seq in chain])
        turns[target] = iter([mine[key] for key in there])
    found = [row if row.line != "training" else next(turns[row.target], None) for row in rows]
    return [row for row in found if row is not None]


def _format_outcome(outcome: RequestOutcome, place: int, now: float) -> dict[str, Any]:
    """The columns of a request that is over."""
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
    """The statement that sets these columns of a run."""
    return (
        _runs.update()
        .where(_runs.c.model_id == sa.bindparam("id"))
        .values({name: sa.bindparam(name) for name in names})
    )


def _replace_row(connection: sa.Connection, table: sa.Table, content: Mapping[str, Any]) -> None:
    """Insert a row, in place of one with the same key."""
    key = sa.and_(*(column == content[column.name] for column in table.primary_key))
    connection.execute(table.delete().where(key))
    connection.execute(table.insert().values(dict(content)))
