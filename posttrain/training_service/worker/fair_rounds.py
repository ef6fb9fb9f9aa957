"""Selection of the requests of a round: which are computed together, and how much of a round each owner gets.

Owners share the worker's time, in the spirit of deficit round robin (Shreedhar and Varghese 1995). The balance of each
grows with time by an equal part and falls by the seconds that its requests took. A round serves the owner of the
highest balance, and those less than a quantum below it, with a quantum each. A debt is bounded, and nobody waits while
nobody else has a request.

A request cannot be interrupted, so a round's length is what others wait for. The quantum is therefore half the time
that the least demanding of the present owners usually asks for: two that train at full load share long rounds, and one
that draws a sample now and then finds short ones. An owner that is alone gets long rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from posttrain.training_service.store import StoredRequest
from posttrain.training_service.store.records import resolve_request_line
from posttrain.training_service.store.waiting_requests import ReadyRequest

BATCH_BYTES = 64 << 20  # size of the payloads of one batch; the engine splits them into passes
# A request that caused this many crashes is computed alone, because it may be the reason.
DEATHS_BEFORE_ISOLATION = 3
MIN_QUANTUM_SECONDS, MAX_QUANTUM_SECONDS = 0.005, 0.5
QUANTUM_SHARE = 0.5  # of the time that the least demanding owner asks for
ALONE_SECONDS = 4.0  # length of a round of an owner that is alone, unless a longer one is faster
MIN_ALONE_REQUESTS = 16  # of a kind, in such a round
WORTHWHILE_GAIN = 1.25  # in requests a second, by twice the requests in a round
UNKNOWN_SECONDS = ALONE_SECONDS / MIN_ALONE_REQUESTS  # of a request, before the first is measured
MAX_DEBT_SECONDS = 1.0
# An owner is present for three of its usual intervals after its last request, within these bounds.
MIN_PRESENCE_SECONDS, MAX_PRESENCE_SECONDS = 1.0, 10.0
MEMORY_SECONDS = 600.0  # after which an owner's costs are forgotten
NEWEST_WEIGHT = 0.5  # of the newest measurement in a moving average


@dataclass(slots=True)
class ExecutionRound:
    """Request ids of the four steps of a round, each in the order of computation."""

    single: list[str] = field(default_factory=list)  # computed one by one
    updates: list[str] = field(default_factory=list)  # optim_step, together
    passes: list[str] = field(default_factory=list)  # forward_backward, together
    samples: list[str] = field(default_factory=list)  # together


@dataclass(slots=True)
class _Owner:
    """Presence and recent share of one owner."""

    last_seen: float  # when it last had a ready request
    interval: float = MAX_PRESENCE_SECONDS / 3  # seconds between its requests, moving average
    was_ready: bool = True
    balance: float = 0.0  # seconds; below 0: it had more than its part
    demand: float | None = None  # seconds that its ready requests take, moving average
    seconds: dict[str, float] = field(default_factory=dict)  # of a request, by kind
    # requests a second by kind and number in a batch, which is rounded down to 16, 32, 64, ...
    rates: dict[str, dict[int, float]] = field(default_factory=dict)

    def record_batch(self, kind: str, number: int, seconds: float) -> None:
        """Record the speed of a batch of this owner alone."""
        if number >= MIN_ALONE_REQUESTS and seconds > 0:
            size = MIN_ALONE_REQUESTS << (number // MIN_ALONE_REQUESTS).bit_length() - 1
            rates = self.rates.setdefault(kind, {})
            rates[size] = _average(rates.get(size, number / seconds), number / seconds)

    def choose_batch_size(self, kind: str, most: int) -> int:
        """Choose the number of requests of an owner that is alone.

        Twice as many are tried once, and preferred if they end in time or are computed faster together: on a GPU many
        sequences take hardly longer than one.
        """
        size, rates = MIN_ALONE_REQUESTS, self.rates.get(kind, {})
        while size < most and size in rates:
            doubled = 2 * size
            is_short = doubled / rates.get(doubled, rates[size]) <= ALONE_SECONDS
            gain = rates.get(doubled, WORTHWHILE_GAIN * rates[size]) / rates[size]
            if not is_short and gain < WORTHWHILE_GAIN:
                break
            size = doubled
        return size


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Ready request and its position among those of its owner."""

    request: ReadyRequest
    step: str  # of the round
    position: tuple[int, int, int]  # turn among its target's, place, number


class FairRounds:
    """Rounds whose time is shared by the owners of the requests."""

    def __init__(
        self, max_requests: int, max_runs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without knowledge of costs.

        Args:
            max_requests: requests in a batch.
            max_runs: runs that fit into memory.
        """
        self._max_requests, self._max_runs, self._clock = max_requests, max_runs, clock
        self._owners: dict[str, _Owner] = {}
        self._last_round = clock()

    def select_round(self, ready: Sequence[ReadyRequest]) -> ExecutionRound:
        """Select the requests of one round.

        Args:
            ready: in the order of acceptance, without gaps within a run (`WorkQueue.list_ready_requests`).
        """
        by_owner = _list_candidates(ready, self._max_runs)
        chosen: list[tuple[int, _Candidate]] = []  # with the rank among its owner's
        for owner, budget in self._share_time(by_owner).items():
            if budget is None:
                chosen += enumerate(self._select_alone(owner, by_owner[owner]))
                continue
            for rank, candidate in enumerate(by_owner[owner]):
                if budget <= 0 and rank > 0:
                    break
                chosen.append((rank, candidate))
                budget -= self._estimate_seconds(candidate.request)
        chosen.sort(key=lambda entry: (entry[0], entry[1].position))
        steps: dict[str, list[ReadyRequest]] = {}
        for _, candidate in chosen:
            steps.setdefault(candidate.step, []).append(candidate.request)
        selected = ExecutionRound(
            passes=_limit_batch(steps.get("passes", ()), self._max_requests),
            samples=_limit_batch(steps.get("samples", ()), self._max_requests),
        )
        selected.single = [request.request_id for request in steps.get("single", ())]
        selected.updates = [request.request_id for request in steps.get("updates", ())]
        return selected

    def _select_alone(self, name: str, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Select the requests of an owner that nobody waits for, by number of each kind."""
        owner, remaining = self._owners[name], dict[str, int]()
        selected, ended = [], set[str]()  # targets of which a request was left out
        for candidate in candidates:
            kind, target = candidate.request.kind, candidate.request.target
            if kind not in remaining:
                remaining[kind] = owner.choose_batch_size(kind, self._max_requests)
            if target in ended or not remaining[kind]:
                ended.add(target)
                continue
            remaining[kind] -= 1
            selected.append(candidate)
        return selected

    def record_seconds(
        self, requests: Sequence[StoredRequest], work: Sequence[float], seconds: float
    ) -> None:
        """Charge the owners of a batch for the time that it took.

        Args:
            work: parts of the requests, in any unit.
        """
        whole = sum(work) or 1.0
        shares_by_kind: dict[tuple[str, str], list[float]] = {}
        for request, part in zip(requests, work, strict=True):
            share = seconds * part / whole
            shares_by_kind.setdefault((request.owner, request.kind), []).append(share)
            if owner := self._owners.get(request.owner):
                owner.balance = max(owner.balance - share, -MAX_DEBT_SECONDS)
        for (name, kind), shares in shares_by_kind.items():
            if owner := self._owners.get(name):
                mean = sum(shares) / len(shares)
                if len(shares) == len(requests):
                    owner.record_batch(kind, len(shares), seconds)
                owner.seconds[kind] = _average(owner.seconds.get(kind, mean), mean)

    def _estimate_seconds(
        self, request: ReadyRequest | StoredRequest, unknown: float = UNKNOWN_SECONDS
    ) -> float:
        owner = self._owners.get(request.owner)
        return unknown if owner is None else owner.seconds.get(request.kind, unknown)

    def _share_time(self, by_owner: dict[str, list[_Candidate]]) -> dict[str, float | None]:
        """Return the seconds of this round of each owner that is served; None = nobody else is present."""
        present = self._update_presence(by_owner)
        if len(present) <= 1:
            return dict.fromkeys(by_owner)
        quantum = QUANTUM_SHARE * min(owner.demand or 0.0 for owner in present.values())
        quantum = min(max(quantum, MIN_QUANTUM_SECONDS), MAX_QUANTUM_SECONDS)
        for owner in present.values():
            owner.balance = min(owner.balance, quantum)
        best = max((present[name].balance for name in by_owner), default=0.0)
        # Within a quantum of the best, so that owners of equal load are computed together.
        return {name: quantum for name in by_owner if present[name].balance > best - quantum}

    def _update_presence(self, by_owner: dict[str, list[_Candidate]]) -> dict[str, _Owner]:
        """Record who has requests; return the owners that are present, after adding their part of the time.

        An owner whose client waits for an answer before it sends the next request is present between the two.
        """
        now = self._clock()
        for name, candidates in by_owner.items():
            owner = self._owners.setdefault(name, _Owner(now))
            if not owner.was_ready:
                gap = min(now - owner.last_seen, MAX_PRESENCE_SECONDS)
                owner.interval = _average(owner.interval, gap)
            owner.last_seen = now
            seconds = sum(
                self._estimate_seconds(candidate.request, MIN_QUANTUM_SECONDS)
                for candidate in candidates
            )
            seconds = min(seconds, MAX_QUANTUM_SECONDS)
            owner.demand = _average(seconds if owner.demand is None else owner.demand, seconds)
        for name, owner in list(self._owners.items()):
            owner.was_ready = name in by_owner
            if now - owner.last_seen > MEMORY_SECONDS:
                del self._owners[name]
        present = {
            name: owner
            for name, owner in self._owners.items()
            if now - owner.last_seen
            <= min(max(3 * owner.interval, MIN_PRESENCE_SECONDS), MAX_PRESENCE_SECONDS)
        }
        for owner in present.values():
            owner.balance += (now - self._last_round) / len(present)
        self._last_round = now
        return present


def _average(old: float, new: float) -> float:
    return (1 - NEWEST_WEIGHT) * old + NEWEST_WEIGHT * new


def _list_candidates(ready: Iterable[ReadyRequest], max_runs: int) -> dict[str, list[_Candidate]]:
    """List what a round may compute, by owner, in the order in which the owner's targets take turns.

    The next request of every run may be computed, and the passes that follow it. A pass never comes before an earlier
    request of its run.
    """
    candidates: dict[str, list[_Candidate]] = {}
    chains: dict[str, dict[str, list[ReadyRequest]]] = {}  # by owner and run
    turns: dict[str, int] = {}  # of samplers
    for request in ready:
        if resolve_request_line(request.kind) == "training":
            runs = chains.setdefault(request.owner, {})
            runs.setdefault(request.target, []).append(request)
            continue
        turn = 0
        if is_sample := request.kind == "sample":
            turn = turns[request.target] = turns.get(request.target, -1) + 1
        candidates.setdefault(request.owner, []).append(
            _Candidate(
                request, "samples" if is_sample else "single", (turn, request.place, request.seq)
            )
        )
    ranked = [
        (rank, chain[0].place, owner, chain)
        for owner, runs in chains.items()
        for rank, chain in enumerate(runs.values())
    ]
    for _, _, owner, chain in sorted(ranked, key=lambda entry: entry[:2])[:max_runs]:
        candidates.setdefault(owner, []).extend(_list_chain_candidates(chain))
    for own in candidates.values():
        own.sort(key=lambda candidate: candidate.position)
    return candidates


def _list_chain_candidates(chain: list[ReadyRequest]) -> list[_Candidate]:
    """List the next request of a run, and the passes that follow it."""
    chain.sort(key=lambda request: request.seq)
    first, candidates, place = chain[0], [], 0
    turn = 0
    for request in chain:
        place = max(place, request.place)  # one that arrived late holds up those after it
        if request.kind == "forward_backward":
            candidates.append(_Candidate(request, "passes", (turn, place, request.seq)))
            turn += 1
        elif request is first:
            is_batched = request.kind == "optim_step" and request.deaths < DEATHS_BEFORE_ISOLATION
            step = "updates" if is_batched else "single"
            candidates.append(_Candidate(request, step, (0, place, request.seq)))
        else:
            break
    return candidates


def _limit_batch(requests: Sequence[ReadyRequest], max_requests: int) -> list[str]:
    """Return as many requests as a batch may hold, at least one. Suspects of crashes are computed alone."""
    batch: list[str] = []
    size = 0
    for request in requests[:max_requests]:
        size += request.size
        if batch and (size > BATCH_BYTES or request.deaths >= DEATHS_BEFORE_ISOLATION):
            break
        batch.append(request.request_id)
        if request.deaths >= DEATHS_BEFORE_ISOLATION:
            break
    return batch
