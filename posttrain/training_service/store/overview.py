"""Statistics of the queue: open requests and quantiles of waiting and service times, by kind.

A look at a store by a reader that changes nothing: for pages, of services that run or are over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

import posttrain.training_service.store.tables as tables
from rl_core.errors import BackendError
from rl_core.service.responses import KindStats

QUANTILES = (0.5, 0.9, 0.99)


def compute_kind_stats(
    depths: dict[str, dict[str, int]], timings: list[tuple[str, float, float]]
) -> dict[str, KindStats]:
    """Statistics by kind of open and finished requests."""
    found = {}
    for kind in sorted({*depths, *(kind for kind, _, _ in timings)}):
        waits = [waited for one, waited, _ in timings if one == kind]
        serves = [served for one, _, served in timings if one == kind]
        found[kind] = KindStats(
            waiting=depths.get(kind, {}).get("waiting", 0),
            running=depths.get(kind, {}).get("running", 0),
            finished=len(waits),
            waited_seconds={f"{q}": quantile(waits, q) for q in QUANTILES} if waits else {},
            served_seconds={f"{q}": quantile(serves, q) for q in QUANTILES} if serves else {},
        )
    return found


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share `q` of all is not above. values: not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


_requests, _runs, _keys = tables.requests, tables.runs, tables.keys
NUM_RECENT_REQUESTS = 1000  # finished requests that quantiles are taken over
MAX_RUNS, MAX_ERRORS = 50, 20


@dataclass(frozen=True, slots=True)
class ServiceRunRow:
    """A training run. Times are seconds since 1970."""

    model_id: str
    key: str  # name of its owner's key
    base: str
    state: str
    steps: int
    touched: float
    open_requests: int


@dataclass(frozen=True, slots=True)
class MinuteCounts:
    """Requests that became final within one minute."""

    minute: int  # since 1970
    done: int
    failed: int  # and cancelled


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed."""

    finished: float
    kind: str
    target: str
    category: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOverview:
    """A store at one moment."""

    kinds: dict[str, KindStats]
    runs: list[ServiceRunRow]  # the newest first
    num_runs: int
    minutes: list[MinuteCounts]  # in order; minutes without a request are left out
    errors: list[FailedRequest]  # the newest first
    oldest_waiting: float | None  # when it was accepted


def read_store_overview(url: str, since: float) -> StoreOverview:
    """The store at an address; `since`: a whole minute from which on they are counted. Raises: BackendError."""
    with _open_read_only(url) as connection:
        return StoreOverview(
            kinds=compute_kind_stats(
                _count_open_requests(connection), _list_request_timings(connection)
            ),
            runs=_list_run_rows(connection),
            num_runs=connection.scalar(sa.select(sa.func.count()).select_from(_runs)) or 0,
            minutes=_count_by_minute(connection, since),
            errors=_list_failed_requests(connection),
            oldest_waiting=connection.scalar(
                sa.select(sa.func.min(_requests.c.accepted)).where(_requests.c.state == "waiting")
            ),
        )


@contextmanager
def _open_read_only(url: str) -> Iterator[sa.Connection]:
    """A connection that cannot write; readers of SQLite's log block nobody."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        path = Path(parsed.database or "")
        if not path.is_file():
            raise BackendError(f"there is no store {path}")
        parsed = sa.make_url(f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true")
    engine = sa.create_engine(parsed, poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            if parsed.get_backend_name() == "postgresql":
                connection.execute(sa.text("set transaction read only"))
            yield connection
    except SQLAlchemyError as error:
        raise BackendError(f"the store cannot be read: {str(error).splitlines()[0]}") from error
    finally:
        engine.dispose()


def _count_open_requests(connection: sa.Connection) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    query = sa.select(_requests.c.kind, _requests.c.state, sa.func.count())
    query = query.where(_requests.c.state.in_(("waiting", "running"))).group_by(
        _requests.c.kind, _requests.c.state
    )
    for kind, state, number in connection.execute(query):
        found.setdefault(kind, {})[state] = number
    return found


def _list_request_timings(connection: sa.Connection) -> list[tuple[str, float, float]]:
    columns = _requests.c.kind, _requests.c.accepted, _requests.c.started, _requests.c.finished
    query = sa.select(*columns).where(
        _requests.c.started.is_not(None), _requests.c.finished.is_not(None)
    )
    rows = connection.execute(
        query.order_by(_requests.c.finish_place.desc()).limit(NUM_RECENT_REQUESTS)
    )
    return [
        (kind, started - accepted, finished - started) for kind, accepted, started, finished in rows
    ]


def _list_run_rows(connection: sa.Connection) -> list[ServiceRunRow]:
    waits = sa.select(_requests.c.target, sa.func.count().label("number"))
    waits = waits.where(_requests.c.state.in_(("waiting", "running"))).group_by(_requests.c.target)
    number = dict(connection.execute(waits).tuples().all())
    names = dict(connection.execute(sa.select(_keys.c.key_id, _keys.c.name)).tuples().all())
    rows = connection.execute(sa.select(_runs).order_by(_runs.c.touched.desc()).limit(MAX_RUNS))
    return [
        ServiceRunRow(
            row.model_id,
            names.get(row.owner, row.owner),
            str(row.facts.get("base") or row.base),
            row.state,
            row.steps,
            row.touched,
            number.get(row.model_id, 0),
        )
        for row in rows
    ]


def _count_by_minute(connection: sa.Connection, since: float) -> list[MinuteCounts]:
    minute = (
        sa.cast(_requests.c.finished - since, sa.Integer) // 60
    )  # whole numbers, in both databases
    done = sa.func.sum(sa.case((_requests.c.state == "done", 1), else_=0))
    query = sa.select(minute, done, sa.func.count()).where(_requests.c.finished >= since)
    found: dict[int, tuple[int, int]] = {}
    for place, finished, total in connection.execute(query.group_by(minute)):
        before = found.get(int(place), (0, 0))
        found[int(place)] = before[0] + int(finished), before[1] + int(total - finished)
    first = int(since // 60)
    return [MinuteCounts(first + place, *counts) for place, counts in sorted(found.items())]


def _list_failed_requests(connection: sa.Connection) -> list[FailedRequest]:
    columns = (
        _requests.c.finished,
        _requests.c.kind,
        _requests.c.target,
        _requests.c.category,
        _requests.c.error,
    )
    query = sa.select(*columns).where(_requests.c.state == "failed")
    rows = connection.execute(query.order_by(_requests.c.finish_place.desc()).limit(MAX_ERRORS))
    return [
        FailedRequest(when, kind, target, category or "", error or "")
        for when, kind, target, category, error in rows
    ]
