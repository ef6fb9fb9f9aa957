"""Waiting requests in the worker's memory, so that a round reads only what has changed in the store since the last one.

Requests behind a gap in their run's numbers cost nothing until the gap is filled: they are not read again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

import posttrain.training_service.store.tables as tables

_requests, _runs = tables.requests, tables.runs

# Built once, because building a statement costs more than running it.
_SELECT_NEW_REQUESTS = (
    sa.select(
        _requests.c.request_id,
        _requests.c.kind,
        _requests.c.line,
        _requests.c.owner,
        _requests.c.target,
        _requests.c.seq,
        _requests.c.place,
        _requests.c.deadline,
        _requests.c.deaths,
        sa.func.length(_requests.c.payload).label("size"),
    )
    .where(_requests.c.state == "waiting", _requests.c.place > sa.bindparam("after"))
    .order_by(_requests.c.place)
)
_SELECT_FINISHED = (
    sa.select(
        _requests.c.request_id,
        _requests.c.line,
        _requests.c.owner,
        _requests.c.target,
        _requests.c.seq,
        _requests.c.state,
        _requests.c.finish_place,
    )
    .where(_requests.c.finish_place > sa.bindparam("after"))
    .order_by(_requests.c.finish_place)
)
_SELECT_LAST_FINISH = sa.select(tables.counters.c.value).where(tables.counters.c.name == "finished")
_SELECT_NEXT_NUMBERS = sa.select(_runs.c.model_id, _runs.c.owner, _runs.c.next_seq).where(
    _runs.c.model_id.in_(sa.bindparam("targets", expanding=True))
)
_SELECT_CANCELLED = (
    sa.select(_requests.c.target, _requests.c.seq)
    .join(_runs, _runs.c.model_id == _requests.c.target)
    .where(
        _requests.c.target.in_(sa.bindparam("targets", expanding=True)),
        _requests.c.line == "training",
        _requests.c.seq >= _runs.c.next_seq,
        _requests.c.state == "cancelled",
    )
)
MAX_TARGETS_PER_STATEMENT = 10_000  # SQLite takes 32,766 values in a statement


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """Request that may be computed now, without its contents."""

    request_id: str
    kind: str
    target: str
    seq: int
    place: int
    size: int  # bytes of the payload
    deaths: int = 0  # number of workers that crashed while computing it
    owner: str = ""  # id of the API key


@dataclass(slots=True)
class _Chain:
    """Waiting training requests of one run."""

    owner: str
    next_seq: int  # the number to be computed next
    # by number, in the order of acceptance
    waiting: dict[int, ReadyRequest] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)  # numbers that are no gap

    def skip_cancelled(self) -> None:
        """Move the next number past cancelled ones."""
        while self.next_seq in self.cancelled:
            self.cancelled.discard(self.next_seq)
            self.next_seq += 1

    @property
    def is_ready(self) -> bool:
        """True if the next number waits."""
        return self.next_seq in self.waiting

    def list_ready(self, limit: int) -> list[ReadyRequest]:
        """List at most `limit` requests that follow each other without a gap."""
        ready: list[ReadyRequest] = []
        seq = self.next_seq
        while len(ready) < limit:
            if seq in self.waiting:
                ready.append(self.waiting[seq])
            elif seq not in self.cancelled:
                break
            seq += 1
        return ready


class WaitingRequests:
    """Waiting requests by owner. `read_changes` brings them up to date; only the worker uses them."""

    def __init__(self) -> None:
        self._is_stale = True

    def _clear(self, last_finish: int) -> None:
        self._is_stale = False
        self._last_place, self._last_finish = -1, last_finish
        self._chains: dict[str, _Chain] = {}
        self._ready_targets: dict[str, dict[str, None]] = {}  # by owner, longest unserved first
        self._others: dict[str, dict[str, ReadyRequest]] = {}  # by owner and request, oldest first
        self._deadlines: list[tuple[float, str]] = []  # a heap
        self._ids: set[str] = set()  # of all that wait

    def invalidate(self) -> None:
        """Read everything again next time, because running requests returned to the queue."""
        self._is_stale = True

    def read_changes(self, connection: sa.Connection) -> None:
        """Add requests accepted since the last call, and remove those that are final."""
        if self._is_stale:
            self._clear(connection.scalar(_SELECT_LAST_FINISH) or 0)
        rows = connection.execute(_SELECT_NEW_REQUESTS, {"after": self._last_place}).all()
        finished = connection.execute(_SELECT_FINISHED, {"after": self._last_finish}).all()
        targets = {row.target for row in rows if row.line == "training"} - self._chains.keys()
        self._load_chains(connection, sorted(targets))
        for row in rows:
            self._add_row(row)
        for row in finished:
            self._last_finish = row.finish_place
            self._remove_row(row)
        for target in {row.target: None for row in (*rows, *finished) if row.line == "training"}:
            self._update_target(target)

    def _load_chains(self, connection: sa.Connection, targets: list[str]) -> None:
        for start in range(0, len(targets), MAX_TARGETS_PER_STATEMENT):
            part = {"targets": targets[start : start + MAX_TARGETS_PER_STATEMENT]}
            for row in connection.execute(_SELECT_NEXT_NUMBERS, part):
                self._chains[row.model_id] = _Chain(row.owner, row.next_seq)
            for target, seq in connection.execute(_SELECT_CANCELLED, part):
                self._chains[target].cancelled.add(seq)

    def _add_row(self, row: sa.Row[Any]) -> None:
        self._last_place = row.place
        request = ReadyRequest(
            row.request_id,
            row.kind,
            row.target,
            row.seq,
            row.place,
            row.size or 0,
            row.deaths,
            row.owner,
        )
        self._ids.add(row.request_id)
        if row.line != "training":
            self._others.setdefault(row.owner, {})[row.request_id] = request
        elif row.target in self._chains:
            self._chains[row.target].waiting[row.seq] = request
        if row.deadline is not None:
            heapq.heappush(self._deadlines, (row.deadline, row.request_id))

    def _remove_row(self, row: sa.Row[Any]) -> None:
        """Remove a final request, and move its run to the next number."""
        self._ids.discard(row.request_id)
        if row.line != "training":
            self._others.get(row.owner, {}).pop(row.request_id, None)
            return
        chain = self._chains.get(row.target)
        if chain is None:
            return
        chain.waiting.pop(row.seq, None)
        if row.state != "cancelled":
            chain.next_seq = max(chain.next_seq, row.seq + 1)
            self._ready_targets.get(chain.owner, {}).pop(
                row.target, None
            )  # added again as the last
        elif row.seq >= chain.next_seq:
            chain.cancelled.add(row.seq)

    def _update_target(self, target: str) -> None:
        """Note whether a run has a request that may be computed."""
        chain = self._chains.get(target)
        if chain is None:
            return
        chain.skip_cancelled()
        if chain.is_ready:
            self._ready_targets.setdefault(chain.owner, {}).setdefault(target)
            return
        self._ready_targets.get(chain.owner, {}).pop(target, None)
        if not chain.waiting:  # read again with the run's next request
            del self._chains[target]

    def remove_claimed(self, requests: Iterable[sa.Row[Any]]) -> None:
        """Remove requests that are being computed. Their runs wait until they are final."""
        for row in () if self._is_stale else requests:
            self._ids.discard(row.request_id)
            if row.line != "training":
                self._others.get(row.owner, {}).pop(row.request_id, None)
            elif row.target in self._chains:
                chain = self._chains[row.target]
                chain.waiting.pop(row.seq, None)
                if not chain.is_ready:
                    self._ready_targets.get(chain.owner, {}).pop(row.target, None)

    def list_late(self, now: float) -> list[str]:
        """Return the ids of waiting requests whose deadline has passed; each is returned once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request_id = heapq.heappop(self._deadlines)[1]
            if request_id in self._ids:
                late.append(request_id)
        return late

    def list_blocked(self) -> dict[str, int]:
        """Return the missing number of each run whose requests wait behind a gap."""
        return {
            target: chain.next_seq
            for target, chain in self._chains.items()
            if chain.waiting and not chain.is_ready
        }

    def list_ready(self, limit: int) -> list[ReadyRequest]:
        """List ready requests in the order of acceptance.

        Args:
            limit: of all owners together; each has an equal part of it, for its runs and for its other requests.
        """
        owners = {name for name, targets in self._ready_targets.items() if targets}
        owners |= {name for name, requests in self._others.items() if requests}
        ready: list[tuple[int, int, ReadyRequest]] = []
        for owner in owners:
            share = max(1, limit // len(owners))
            others = itertools.islice(self._others.get(owner, {}).values(), share)
            ready += ((request.place, request.seq, request) for request in others)
            for target in self._ready_targets.get(owner, ()):
                if share <= 0:
                    break
                chain = self._chains[target]
                requests = chain.list_ready(share)
                share -= len(requests)
                # A request that arrived late takes the position of the first that waits.
                places = (request.place for request in chain.waiting.values())
                ready += ((next(places), request.seq, request) for request in requests)
        return [request for _, _, request in sorted(ready, key=lambda entry: entry[:2])]
