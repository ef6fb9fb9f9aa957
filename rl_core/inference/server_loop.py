"""The serving loop: requests of many clients over the slots of one engine, on weights that are replaced while it runs.

Between two decoding steps requests join and leave: in the order of arrival, callers in turn; cancelled and late ones
free their slots at once; where others wait, one that has had its slot for `turn_tokens` tokens steps back and goes on
later, with the same tokens. A request ends on the weights that it began on.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_core.errors import OutOfMemory
from rl_core.inference.fair_queue import FairQueue
from rl_core.inference.request_slots import OpenSlots, RequestSlots
from rl_core.inference.served_requests import (
    Cancelled,
    DeadlinePassed,
    Ended,
    Overloaded,
    Progress,
    ServedRequest,
    ServingFault,
)
from rl_core.memory import first_line

__all__ = ["LoopLimits", "LoopState", "ServerLoop"]

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = 4096  # of the prompts that begin between two steps, above which no further one begins
_LOOK_S = 0.25  # between two looks at deadlines and environments, where nothing else happens
_RECENT = 256  # ended requests that the rate is taken over
_MOST_LATE = 1000  # deadlines of requests that have ended, above which they are forgotten
_MOST_VERSIONS = 3  # sets of weights in memory; a newer one waits until the oldest has answered its requests


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Bounds of a serving loop."""

    max_waiting: int = 256  # requests in the queue
    turn_tokens: int = 256  # tokens of a request's turn in a slot, where others wait


@dataclass(frozen=True, slots=True)
class LoopState:
    """Numbers about a serving loop."""

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
class _Weights:
    """One set of weights and its requests."""

    version: int
    slots: RequestSlots
    open: OpenSlots


class ServerLoop:
    """Requests in, answers out. `submit`, `cancel`, `publish` and `close` may be called on any thread; `run` and `step`
    belong to one."""

    def __init__(
        self,
        open_slots: OpenSlots,
        version: int,
        deliver: Callable[[Sequence[Progress | Ended]], None],
        limits: LoopLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` is called on the loop's thread with what happened to requests; it must neither wait nor raise."""
        self.limits, self._deliver, self._clock = limits or LoopLimits(), deliver, clock
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._queue = FairQueue()  # requests that have not begun, and parked ones
        self._fresh = 0  # of them those that have not begun
        self._parked: dict[ServedRequest, _Weights] = {}
        self._cancelled: deque[ServedRequest] = deque()
        self._next: tuple[OpenSlots, int] | None = None  # weights to be taken over
        self._draining: tuple[OpenSlots, int] | None = None  # the same, once there is memory for them
        self._home: dict[ServedRequest, _Weights] = {}
        self._late: list[tuple[float, int, ServedRequest]] = []  # heap of deadlines
        self._numbers = itertools.count()
        self._is_closed = False
        self._events: list[Progress | Ended] = []
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self._parkings = self._reloads = self._sampled = 0
        self._weights = [_Weights(version, open_slots(self._woken.set), open_slots)]  # the newest last

    # -- on any thread -------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[ServedRequest]) -> None:
        """Queue requests, all or none of them.

        Raises: Overloaded if the queue has no room; ServingFault after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise ServingFault("the server is stopping")
            if self._fresh + len(requests) > self.limits.max_waiting:
                raise Overloaded(
                    f"{self._fresh} requests wait, of at most {self.limits.max_waiting}", self._wait_seconds()
                )
            self._fresh += len(requests)
            for request in requests:
                self._queue.put(request)
                if request.deadline < float("inf"):
                    heapq.heappush(self._late, (request.deadline, next(self._numbers), request))
        self._woken.set()

    def cancel(self, request: ServedRequest) -> None:
        """Take a request back: it leaves the queue or its slot before the next step. Nothing happens to one that has
        ended."""
        request.is_cancelled = True
        self._cancelled.append(request)
        self._woken.set()

    def publish(self, open_slots: OpenSlots, version: int) -> None:
        """Answer requests that begin from now on with other weights; of several that wait, the last counts."""
        with self._lock:
            self._next = (open_slots, version)
        self._woken.set()

    def close(self) -> None:
        """End `run`; requests that have not ended fail."""
        with self._lock:
            self._is_closed = True
        self._woken.set()

    @property
    def state(self) -> LoopState:
        """Numbers for people."""
        weights, parked = list(self._weights), len(self._parked)
        return LoopState(
            policy_version=weights[-1].version, versions=len(weights), waiting=self._fresh,
            active=max(0, len(self._home) - parked), parked=parked, capacity=weights[-1].slots.capacity,
            tokens=self._sampled, parkings=self._parkings, reloads=self._reloads, ended_per_second=self._rate(),
        )  # fmt: skip

    def _rate(self) -> float:
        """Requests that ended a second, of late; 0 = not known."""
        ends = list(self._ends)
        seconds = self._clock() - ends[0] if len(ends) > 1 else 0.0
        return len(ends) / seconds if seconds > 0 else 0.0

    def _wait_seconds(self) -> float:
        """Time after which the queue is likely to have room."""
        rate = self._rate()
        return min(60.0, max(1.0, self._fresh / rate / 2)) if rate else 1.0

    # -- on the loop's thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `close`."""
        while not self._is_closed:
            self._woken.clear()
            if not self.step():
                self._woken.wait(_LOOK_S)
        self._fail_all(ServingFault("the server is stopping"))
        for weights in self._weights:
            weights.slots.release()

    def step(self) -> bool:
        """Let requests leave and join, and decode once. Returns: False = nothing can go on before something happens."""
        self._take_back()
        self._take_over()
        self._fill()
        worked = False
        for weights in list(self._weights):
            if weights.slots.can_step:
                worked = True
                self._decode(weights)
        self._drop_old()
        events, self._events = self._events, []
        if events:
            self._deliver(events)
        return worked or bool(events)

    def _decode(self, weights: _Weights) -> None:
        try:
            ended, progress = weights.slots.step()
        except Exception as error:
            logger.exception("a decoding step failed; its requests are given back")
            self._break(weights, error)
            return
        self._events += progress
        for request in ended:
            self._end(request)

    def _end(self, request: ServedRequest, error: BaseException | None = None) -> None:
        """Note that a request is over; its slot is free already."""
        request.error = error or request.error
        request.has_ended = True
        self._home.pop(request, None)
        self._ends.append(self._clock())
        self._sampled += len(getattr(request.sequence, "tokens", ()))
        self._events.append(Ended(request))

    def _leave(self, request: ServedRequest, error: BaseException) -> None:
        """End a request wherever it is."""
        if request.has_ended:
            return
        weights = self._home.get(request)
        with self._lock:
            is_queued = self._queue.remove(request)
            self._fresh -= is_queued and weights is None
        self._parked.pop(request, None)
        if weights is not None:
            weights.slots.remove(request)
        self._end(request, error)

    def _take_back(self) -> None:
        """Let cancelled and late requests leave."""
        while self._cancelled:
            self._leave(self._cancelled.popleft(), Cancelled("the request was taken back"))
        if len(self._late) > _MOST_LATE + 2 * (len(self._home) + len(self._queue)):
            with self._lock:  # those that have ended would be kept until their deadline
                self._late = [entry for entry in self._late if not entry[2].has_ended]
                heapq.heapify(self._late)
        now = self._clock()
        while self._late and self._late[0][0] <= now:
            with self._lock:
                late = heapq.heappop(self._late)[2]
            limit = f" ({late.limit})" if late.limit else ""
            self._leave(late, DeadlinePassed(f"the request was not answered in the time that it had{limit}"))

    # -- weights -------------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Open the weights that were published; where memory has no room for two sets, once the present one is idle."""
        if self._draining is not None:
            if all(weights.slots.is_empty for weights in self._weights):
                self._exchange(*self._draining)
            return
        if self._next is None or len(self._weights) >= _MOST_VERSIONS:
            return
        with self._lock:
            (open_slots, version), self._next = self._next, None
        try:
            self._weights.append(_Weights(version, open_slots(self._woken.set), open_slots))
            self._reloads += 1
        except OutOfMemory as error:
            logger.warning("version %d waits for requests to end: %s", version, first_line(error))
            self._draining = (open_slots, version)
        except Exception as error:
            logger.error("version %d was not taken over: %s", version, first_line(error))

    def _exchange(self, open_slots: OpenSlots, version: int) -> None:
        """Let go of all weights, then open others; the newest of before where these cannot be opened."""
        self._draining, before = None, self._weights[-1]
        for weights in self._weights:
            weights.slots.release()
        try:
            self._weights = [_Weights(version, open_slots(self._woken.set), open_slots)]
            self._reloads += 1
        except Exception as error:
            logger.error("version %d was not taken over: %s", version, first_line(error))
            self._weights = [_Weights(before.version, before.open(self._woken.set), before.open)]

    def _drop_old(self) -> None:
        """Let go of weights that have answered all their requests."""
        for weights in self._weights[:-1]:
            if weights.slots.is_empty:
                self._weights.remove(weights)
                weights.slots.release()

    def _break(self, weights: _Weights, error: BaseException) -> None:
        """Fail the requests of weights whose step failed."""
        for request in weights.slots.requests:
            self._leave(request, ServingFault(f"the engine failed ({first_line(error)}); send the request again"))

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            waiting = list(self._queue)
        for request in dict.fromkeys([*waiting, *self._home]):
            self._leave(request, error)
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Free slots, of as many as one set of weights has."""
        taken = sum(weights.slots.capacity - weights.slots.free for weights in self._weights)
        return self._weights[-1].slots.capacity - taken

    def _fill(self) -> None:
        """Give free slots to those that wait, and take slots from those that have had their turn."""
        if not len(self._queue):
            return
        self._park()
        newest, begun = self._weights[-1], self._next_ones(self._room())
        if not begun:
            return
        try:
            newest.slots.admit(begun)
        except Exception as error:
            logger.exception("requests could not be begun")
            fault = ServingFault(f"the engine failed ({first_line(error)}); send the request again")
            for request in begun:
                self._end(request, fault)
            self._break(newest, error)
            return
        for request in begun:
            request.policy_version = newest.version
            self._home[request] = newest

    def _next_ones(self, room: int) -> list[ServedRequest]:
        """Requests to begin, as many as there are slots for; parked ones among them go on where they were."""
        newest, begun, back, tokens = self._weights[-1], list[ServedRequest](), list[ServedRequest](), 0
        for _ in range(len(self._queue)):
            if room <= 0 or tokens >= _PREFILL_TOKENS:
                break
            with self._lock:
                request = self._queue.take()
                self._fresh -= request is not None and request not in self._parked
            if request is None:
                break
            weights = self._parked.get(request, newest)
            is_fresh = request not in self._parked
            if is_fresh and self._draining is None and newest.slots.free > len(begun):
                begun.append(request)
                tokens += len(request.prompt_ids)
            elif not is_fresh and weights.slots.may_resume(request) and weights.slots.free > 0:
                weights.slots.resume(request)
                del self._parked[request]
            else:
                back.append(request)
                continue
            room -= 1
        with self._lock:
            for request in back:
                self._queue.put(request)
                self._fresh += request not in self._parked
        return begun

    def _park(self) -> None:
        """Free slots of requests that have had their turn, as many as could be used by others."""
        ready = sum(weights.slots.may_resume(request) for request, weights in self._parked.items())
        wanted = (self._fresh if self._draining is None else 0) + ready - self._room()
        if wanted <= 0:
            return
        held = [(tokens, request, w) for w in self._weights for request, tokens in w.slots.held()]
        done = sorted((entry for entry in held if entry[0] >= self.limits.turn_tokens), key=lambda entry: -entry[0])
        for _, request, weights in done[:wanted]:
            weights.slots.park(request)
            self._parked[request] = weights
            self._parkings += 1
            with self._lock:
                self._queue.put(request)
