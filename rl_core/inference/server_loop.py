"""The serving loop: requests of many clients over one engine's slots, on weights that are replaced while it runs.

Requests join and leave between two decoding steps, in order of arrival with callers in turn. Cancelled and late
requests free their slots immediately. If others wait, a request that has held its slot for `turn_tokens` tokens is
paused and resumed later, with the same tokens. A request ends on the weights that it began on.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rl_core.errors import OutOfMemory
from rl_core.inference.serving_requests import (
    DeadlineExceeded,
    EngineFault,
    RequestCancelled,
    RequestEnded,
    RequestProgress,
    RequestSlots,
    ServedRequest,
    ServerOverloaded,
    SlotsFactory,
)
from rl_core.out_of_memory import format_first_line

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = (
    4096  # no further request starts between two steps once their prompts have this many tokens
)
_POLL_S = 0.25  # interval of checking deadlines and environments while nothing else happens
_RATE_WINDOW = 256  # ended requests that the rate is computed over
_MAX_STALE_DEADLINES = 1000  # deadlines of ended requests that may pile up before they are removed
_MAX_WEIGHT_VERSIONS = 3  # sets of weights in memory; a newer one waits until the oldest is idle


class FairQueue:
    """A queue in order of arrival per caller, with callers taking turns.

    A caller with a thousand requests delays another caller's first request by one request, not by a thousand.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ServedRequest]] = (
            OrderedDict()
        )  # by caller, the next one first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[ServedRequest]:
        return (request for line in self._lines.values() for request in line)

    def add_request(self, request: ServedRequest) -> None:
        """Add a request after its caller's others; a new caller comes after all callers."""
        self._lines.setdefault(request.caller, deque()).append(request)
        self._size += 1

    def take_request(
        self, fits: Callable[[ServedRequest], bool] = lambda request: True
    ) -> ServedRequest | None:
        """Remove and return the next request; return None if there is none or it does not fit."""
        if not self._lines:
            return None
        caller, line = next(iter(self._lines.items()))
        if not fits(line[0]):
            return None
        request = line.popleft()
        self._size -= 1
        self._lines.move_to_end(caller)
        if not line:
            del self._lines[caller]
        return request

    def remove_request(self, request: ServedRequest) -> bool:
        """Remove a request; return whether it was queued."""
        line = self._lines.get(request.caller)
        if line is None or request not in line:
            return False
        line.remove(request)
        self._size -= 1
        if not line:
            del self._lines[request.caller]
        return True


@dataclass(frozen=True, slots=True)
class ServerLoopLimits:
    """Bounds of a serving loop."""

    max_waiting: int = 256  # queued requests
    turn_tokens: int = 256  # sampled tokens per turn in a slot while others wait


@dataclass(frozen=True, slots=True)
class ServerLoopState:
    """A snapshot of a serving loop, for display."""

    policy_version: int  # of the newest weights
    versions: int  # sets of weights in memory
    waiting: int
    active: int
    parked: int
    capacity: int
    tokens: int  # sampled tokens of requests that have ended
    parkings: int
    reloads: int
    ended_per_second: float


@dataclass(slots=True)
class _WeightsVersion:
    """One set of weights and its requests."""

    version: int
    slots: RequestSlots
    open_slots: SlotsFactory


class ServerLoop:
    """A loop that decodes submitted requests and delivers their tokens.

    `submit_requests`, `cancel_request`, `publish_weights` and `close` may be called on any thread;
    `serve_until_closed` and `step` belong to one thread.
    """

    def __init__(
        self,
        open_slots: SlotsFactory,
        version: int,
        deliver: Callable[[Sequence[RequestProgress | RequestEnded]], None],
        limits: ServerLoopLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the slots.

        Args:
            deliver: called on the loop's thread with events of requests; it must neither block nor raise.
        """
        self.limits, self._deliver, self._clock = limits or ServerLoopLimits(), deliver, clock
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._queue = FairQueue()  # requests that have not begun, and paused ones
        self._num_waiting = 0  # queued requests that have not begun
        self._paused: dict[ServedRequest, _WeightsVersion] = {}
        self._cancelled: deque[ServedRequest] = deque()
        self._published_weights: tuple[SlotsFactory, int] | None = None  # weights to open next
        # weights to open once there is memory for them
        self._pending_weights: tuple[SlotsFactory, int] | None = None
        self._weights_by_request: dict[ServedRequest, _WeightsVersion] = {}
        self._deadlines: list[tuple[float, int, ServedRequest]] = []  # heap of deadlines
        self._numbers = itertools.count()
        self._is_closed = False
        self._events: list[RequestProgress | RequestEnded] = []
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._parkings = self._reloads = self._sampled = 0
        # the newest last
        self._weights = [_WeightsVersion(version, open_slots(self._woken.set), open_slots)]

    def submit_requests(self, requests: Sequence[ServedRequest]) -> None:
        """Queue all requests or none.

        Raises: ServerOverloaded if the queue has no room; EngineFault after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise EngineFault("the server is stopping")
            if self._num_waiting + len(requests) > self.limits.max_waiting:
                raise ServerOverloaded(
                    f"{self._num_waiting} requests are queued, of at most {self.limits.max_waiting}",
                    self._compute_wait_seconds(),
                )
            self._num_waiting += len(requests)
            for request in requests:
                self._queue.add_request(request)
                if request.deadline < float("inf"):
                    heapq.heappush(
                        self._deadlines, (request.deadline, next(self._numbers), request)
                    )
        self._woken.set()

    def cancel_request(self, request: ServedRequest) -> None:
        """Cancel a request: it leaves the queue or its slot before the next step. Ignore one that has ended."""
        request.is_cancelled = True
        self._cancelled.append(request)
        self._woken.set()

    def publish_weights(self, open_slots: SlotsFactory, version: int) -> None:
        """Use other weights for requests that begin from now on; of several pending versions, the last counts."""
        with self._lock:
            self._published_weights = (open_slots, version)
        self._woken.set()

    def close(self) -> None:
        """Stop `serve_until_closed`; unfinished requests fail."""
        with self._lock:
            self._is_closed = True
        self._woken.set()

    @property
    def state(self) -> ServerLoopState:
        """The current `ServerLoopState`."""
        weights, parked = list(self._weights), len(self._paused)
        return ServerLoopState(
            policy_version=weights[-1].version,
            versions=len(weights),
            waiting=self._num_waiting,
            active=max(0, len(self._weights_by_request) - parked),
            parked=parked,
            capacity=weights[-1].slots.capacity,
            tokens=self._sampled,
            parkings=self._parkings,
            reloads=self._reloads,
            ended_per_second=self._compute_rate(),
        )

    def _compute_rate(self) -> float:
        """Return recently ended requests per second; 0 = unknown."""
        ends = list(self._ends)
        seconds = self._clock() - ends[0] if len(ends) > 1 else 0.0
        return len(ends) / seconds if seconds > 0 else 0.0

    def _compute_wait_seconds(self) -> float:
        """Estimate the seconds until the queue has room."""
        rate = self._compute_rate()
        return min(60.0, max(1.0, self._num_waiting / rate / 2)) if rate else 1.0

    def serve_until_closed(self) -> None:
        """Serve until `close`."""
        try:
            while not self._is_closed:
                self._woken.clear()
                if not self.step():
                    self._woken.wait(_POLL_S)
        finally:
            self._fail_all_requests(EngineFault("the server is stopping"))
            for weights in self._weights:
                weights.slots.release_memory()

    def step(self) -> bool:
        """Let requests leave and join, and decode once; return False if there was nothing to do."""
        self._drop_cancelled_and_late()
        self._open_published_weights()
        self._fill_slots()
        has_decoded = False
        for weights in list(self._weights):
            if weights.slots.can_step:
                has_decoded = True
                self._decode_step(weights)
        self._drop_idle_weights()
        events, self._events = self._events, []
        if events:
            self._deliver(events)
        return has_decoded or bool(events)

    def _decode_step(self, weights: _WeightsVersion) -> None:
        try:
            ended, progress = weights.slots.step()
        except Exception as error:
            logger.exception("a decoding step failed; failing its requests")
            self._fail_weights(weights, error)
            return
        self._events += progress
        for request in ended:
            self._end_request(request)

    def _end_request(self, request: ServedRequest, error: BaseException | None = None) -> None:
        """Record the end of a request whose slot is already free."""
        request.error = error or request.error
        request.has_ended = True
        self._weights_by_request.pop(request, None)
        self._ends.append(self._clock())
        self._sampled += len(getattr(request.sequence, "tokens", ()))
        self._events.append(RequestEnded(request))

    def _remove_request(self, request: ServedRequest, error: BaseException) -> None:
        """End a request wherever it is."""
        if request.has_ended:
            return
        weights = self._weights_by_request.get(request)
        with self._lock:
            is_queued = self._queue.remove_request(request)
            self._num_waiting -= is_queued and weights is None
        self._paused.pop(request, None)
        if weights is not None:
            weights.slots.remove_request(request)
        self._end_request(request, error)

    def _drop_cancelled_and_late(self) -> None:
        """Remove cancelled and late requests."""
        while self._cancelled:
            error = RequestCancelled("the request was cancelled")
            self._remove_request(self._cancelled.popleft(), error)
        num_open_requests = len(self._weights_by_request) + len(self._queue)
        if len(self._deadlines) > _MAX_STALE_DEADLINES + 2 * num_open_requests:
            with self._lock:  # ended requests would otherwise stay until their deadline
                self._deadlines = [entry for entry in self._deadlines if not entry[2].has_ended]
                heapq.heapify(self._deadlines)
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            with self._lock:
                late = heapq.heappop(self._deadlines)[2]
            limit = f" ({late.limit})" if late.limit else ""
            self._remove_request(
                late, DeadlineExceeded(f"the request was not answered within its time limit{limit}")
            )

    def _open_published_weights(self) -> None:
        """Open published weights; if memory has no room for two sets, wait until the current one is idle."""
        if self._pending_weights is not None:
            if all(weights.slots.is_empty for weights in self._weights):
                self._replace_weights(*self._pending_weights)
            return
        if self._published_weights is None or len(self._weights) >= _MAX_WEIGHT_VERSIONS:
            return
        with self._lock:
            (open_slots, version), self._published_weights = self._published_weights, None
        try:
            self._weights.append(_WeightsVersion(version, open_slots(self._woken.set), open_slots))
            self._reloads += 1
        except OutOfMemory as error:
            logger.warning(
                "policy version %d waits until running requests end: %s",
                version,
                format_first_line(error),
            )
            self._pending_weights = (open_slots, version)
        except Exception as error:
            logger.error("could not load policy version %d: %s", version, format_first_line(error))

    def _replace_weights(self, open_slots: SlotsFactory, version: int) -> None:
        """Release all weights, then open others; reopen the previous ones if that fails."""
        self._pending_weights, previous = None, self._weights[-1]
        for weights in self._weights:
            weights.slots.release_memory()
        try:
            self._weights = [_WeightsVersion(version, open_slots(self._woken.set), open_slots)]
            self._reloads += 1
        except Exception as error:
            logger.error("could not load policy version %d: %s", version, format_first_line(error))
            slots = previous.open_slots(self._woken.set)
            self._weights = [_WeightsVersion(previous.version, slots, previous.open_slots)]

    def _drop_idle_weights(self) -> None:
        """Release older weights without requests."""
        for weights in self._weights[:-1]:
            if weights.slots.is_empty:
                self._weights.remove(weights)
                weights.slots.release_memory()

    def _fail_weights(self, weights: _WeightsVersion, error: BaseException) -> None:
        """Fail the requests of weights whose step failed."""
        for request in weights.slots.requests:
            self._remove_request(
                request,
                EngineFault(f"the engine failed ({format_first_line(error)}); retry the request"),
            )

    def _fail_all_requests(self, error: BaseException) -> None:
        with self._lock:
            waiting = list(self._queue)
        for request in dict.fromkeys([*waiting, *self._weights_by_request]):
            self._remove_request(request, error)
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    def _count_free_slots(self) -> int:
        """Count the free slots, out of as many as one set of weights has."""
        taken = sum(weights.slots.capacity - weights.slots.free for weights in self._weights)
        return self._weights[-1].slots.capacity - taken

    def _fill_slots(self) -> None:
        """Start or resume queued requests in free slots; pause requests that have used up their turn."""
        if not len(self._queue):
            return
        self._pause_requests()
        newest, to_start = self._weights[-1], self._select_next_requests(self._count_free_slots())
        if not to_start:
            return
        try:
            newest.slots.start_requests(to_start)
        except Exception as error:
            logger.exception("could not start requests")
            fault = EngineFault(
                f"the engine failed ({format_first_line(error)}); retry the request"
            )
            for request in to_start:
                self._end_request(request, fault)
            self._fail_weights(newest, error)
            return
        for request in to_start:
            request.policy_version = newest.version
            self._weights_by_request[request] = newest

    def _select_next_requests(self, room: int) -> list[ServedRequest]:
        """Select requests to start, as many as there are slots; resume paused ones."""
        newest, tokens = self._weights[-1], 0
        to_start: list[ServedRequest] = []
        to_requeue: list[ServedRequest] = []
        for _ in range(len(self._queue)):
            if room <= 0 or tokens >= _PREFILL_TOKENS:
                break
            with self._lock:
                request = self._queue.take_request()
                self._num_waiting -= request is not None and request not in self._paused
            if request is None:
                break
            weights = self._paused.get(request, newest)
            is_new = request not in self._paused
            if is_new and self._pending_weights is None and newest.slots.free > len(to_start):
                to_start.append(request)
                tokens += len(request.prompt_ids)
            elif not is_new and weights.slots.can_resume(request) and weights.slots.free > 0:
                weights.slots.resume_request(request)
                del self._paused[request]
            else:
                to_requeue.append(request)
                continue
            room -= 1
        with self._lock:
            for request in to_requeue:
                self._queue.add_request(request)
                self._num_waiting += request not in self._paused
        return to_start

    def _pause_requests(self) -> None:
        """Pause requests that have used up their turn, as many as others can replace."""
        ready = sum(weights.slots.can_resume(request) for request, weights in self._paused.items())
        wanted = (
            (self._num_waiting if self._pending_weights is None else 0)
            + ready
            - self._count_free_slots()
        )
        if wanted <= 0:
            return
        held = [
            (tokens, request, w)
            for w in self._weights
            for request, tokens in w.slots.list_held_requests()
        ]
        pausable = sorted(
            (entry for entry in held if entry[0] >= self.limits.turn_tokens),
            key=lambda entry: -entry[0],
        )
        for _, request, weights in pausable[:wanted]:
            weights.slots.pause_request(request)
            self._paused[request] = weights
            self._parkings += 1
            with self._lock:
                self._queue.add_request(request)
