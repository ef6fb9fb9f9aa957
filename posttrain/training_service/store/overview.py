"""Statistics of the queue, and a read-only view of a store for pages, whether its service runs or not."""

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
NUM_RECENT_REQUESTS = 1000  # finished requests over which quantiles are computed
MAX_RUNS, MAX_ERRORS = 50, 20
_requests, _runs, _keys = tables.requests, tables.runs, tables.keys
_OPEN_STATES = ("waiting", "running")


def compute_kind_stats(
    depths: dict[str, dict[str, int]], timings: list[tuple[str, float, float]]
) -> dict[str, KindStats]:
    """Compute statistics of open and finished requests by kind."""
    stats = {}
    for kind in sorted({*depths, *(timed_kind for timed_kind, _, _ in timings)}):
        waits = [waited for timed_kind, waited, _ in timings if timed_kind == kind]
        serves = [served for timed_kind, _, served in timings if timed_kind == kind]
        stats[kind] = KindStats(
            waiting=depths.get(kind, {}).get("waiting", 0),
            running=depths.get(kind, {}).get("running", 0),
            finished=len(waits),
            waited_seconds={f"{q}": quantile(waits, q) for q in QUANTILES} if waits else {},
            served_seconds={f"{q}": quantile(serves, q) for q in QUANTILES} if serves else {},
        )
    return stats


def quantile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that at least a share `q` of all values does not exceed. values: not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class ServiceRunRow:
    """Training run in an overview. Times are seconds since 1970."""

    model_id: str
    key: str  # name of its owner's key
    base: str
    state: str
    steps: int
    touched: float
    open_requests: int


@dataclass(frozen=True, slots=True)
class MinuteCounts:
    """Number of requests that became final within one minute."""

    minute: int  # since 1970
    done: int
    failed: int  # includes cancelled requests


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """Request that failed."""

    finished: float
    kind: str
    target: str
    category: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOverview:
    """Snapshot of a store."""

    kinds: dict[str, KindStats]
    runs: list[ServiceRunRow]  # newest first
    num_runs: int
    minutes: list[MinuteCounts]  # in order; minutes without a request are left out
    errors: list[FailedRequest]  # newest first
    oldest_waiting: float | None  # time of acceptance


def read_store_overview(url: str, since: float) -> StoreOverview:
    """Read the overview of the store at a URL. Raises: BackendError.

    Args:
        since: whole minute from which on finished requests are counted.
    """
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
    """Open a connection that cannot write. Readers of SQLite's log block nobody."""
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
    counts: dict[str, dict[str, int]] = {}
    query = sa.select(_requests.c.kind, _requests.c.state, sa.func.count())
    query = query.where(_requests.c.state.in_(_OPEN_STATES)).group_by(
        _requests.c.kind, _requests.c.state
    )
    for kind, state, number in connection.execute(query):
        counts.setdefault(kind, {})[state] = number
    return counts


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
    open_requests = sa.select(_requests.c.target, sa.func.count().label("number"))
    open_requests = open_requests.where(_requests.c.state.in_(_OPEN_STATES)).group_by(
        _requests.c.target
    )
    num_open = dict(connection.execute(open_requests).tuples().all())
    key_names = dict(connection.execute(sa.select(_keys.c.key_id, _keys.c.name)).tuples().all())
    rows = connection.execute(sa.select(_runs).order_by(_runs.c.touched.desc()).limit(MAX_RUNS))
    return [
        ServiceRunRow(
            row.model_id,
            key_names.get(row.owner, row.owner),
            str(row.facts.get("base") or row.base),
            row.state,
            row.steps,
            row.touched,
            num_open.get(row.model_id, 0),
        )
        for row in rows
    ]


def _count_by_minute(connection: sa.Connection, since: float) -> list[MinuteCounts]:
    # SQLite and PostgreSQL both divide integers to integers.
    minute = sa.cast(_requests.c.finished - since, sa.Integer) // 60
    done = sa.func.sum(sa.case((_requests.c.state == "done", 1), else_=0))
    query = sa.select(minute, done, sa.func.count()).where(_requests.c.finished >= since)
    counts: dict[int, tuple[int, int]] = {}
    for index, num_done, total in connection.execute(query.group_by(minute)):
        done_before, failed_before = counts.get(int(index), (0, 0))
        num_failed = int(total - num_done)
        counts[int(index)] = done_before + int(num_done), failed_before + num_failed
    first = int(since // 60)
    return [MinuteCounts(first + index, *pair) for index, pair in sorted(counts.items())]


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
        FailedRequest(finished, kind, target, category or "", error or "")
        for finished, kind, target, category, error in rows
    ]
