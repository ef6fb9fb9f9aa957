"""Steps of environments that may wait: on threads, at most so many at a time, each within a time limit.

Only the environment runs there. What an episode was given and said is read and written by the thread that decodes, so
the order in which steps finish is seen by no sequence.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from rl_core.environments.environment import Step
from rl_core.errors import EnvironmentFault
from rl_core.timing import span

__all__ = ["Call", "PendingTurn", "StepPool", "Turnover", "resolve", "wait_for_any"]

_LOOK_S = 0.25  # how often a wait for any of several calls looks whether one of them is overdue


class Call:
    """One call into an environment, running or waiting for its thread."""

    def __init__(
        self, pool: StepPool, what: str, timeout_s: float, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.future: Future[Any] = Future()
        self._pool, self._what, self._timeout_s, self._function, self._args = pool, what, timeout_s, function, args
        self._began: float | None = None

    def run(self) -> None:
        """Make the call; done by a thread of the pool."""
        self._began = time.monotonic()
        try:
            value = self._function(*self._args)
        except BaseException as error:  # raised again where the result is asked for
            self.future.set_exception(error)
        else:
            self.future.set_result(value)

    def done(self) -> bool:
        """Whether the result is there. Raises: EnvironmentFault when the call has run past its limit."""
        if self.future.done():
            return True
        if self._left() <= 0:
            raise EnvironmentFault(
                f"{self._what} has not returned within {self._timeout_s:g} s (sampling.step_timeout_s)"
            )
        return False

    def result(self) -> Any:
        """What the call returned or raised, once it has.

        Raises: EnvironmentFault as `done` does, also for a call that this one waits behind.
        """
        while not self.done():
            if self._began is not None:
                wait([self.future], timeout=min(self._left(), 60.0))
                continue
            # One that still waits for a thread has its whole time before it; those that hold the threads have not.
            self._pool.check()
            wait([self.future], timeout=_LOOK_S)
        return self.future.result()

    def _left(self) -> float:
        """Seconds until the call is overdue; one that has not begun is not."""
        return self._timeout_s if self._began is None else self._began + self._timeout_s - time.monotonic()


class StepPool:
    """Threads for the steps of one collection; use it in a `with` block.

    They are daemons, because Python cannot kill a thread: a step that never returns is left behind, and holds up
    neither the error that names it nor the end of the process.
    """

    def __init__(self, max_concurrent: int, timeout_s: float) -> None:
        """At most `max_concurrent` calls run at once, each for `timeout_s`; waiting for a thread does not count."""
        self._max_concurrent, self._timeout_s = max_concurrent, timeout_s
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a call that nobody else was promised
        self._num_threads = 0
        self._running: list[Call | None] = []  # by thread

    def __enter__(self) -> StepPool:
        return self

    def __exit__(self, *exception: object) -> None:
        """Calls that have not begun never will; threads end after the one that they are in."""
        while True:
            try:
                self._calls.get_nowait()
            except queue.Empty:
                break
        for _ in range(self._num_threads):
            self._calls.put(None)

    def submit(self, what: str, function: Callable[..., Any], *args: Any) -> Call:
        """Have `function` called on a thread; `what` names the call in errors."""
        call = Call(self, what, self._timeout_s, function, args)
        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._num_threads < self._max_concurrent:
            self._running.append(None)
            thread = threading.Thread(target=self._work, args=(self._num_threads,), daemon=True)
            self._num_threads += 1
            thread.name = f"step {self._num_threads}"
            thread.start()
        return call

    def check(self) -> None:
        """Raises: EnvironmentFault when a call that holds a thread is overdue."""
        for call in self._running:
            if call is not None:
                call.done()

    def _work(self, place: int) -> None:
        while (call := self._calls.get()) is not None:
            self._running[place] = call
            call.run()
            self._running[place] = None
            self._idle.release()


class PendingTurn:
    """A turn whose step is on its way: what `RolloutSequence.advance` gives instead of an observation."""

    def __init__(self, call: Call, finish: Callable[[Step], list[int] | None]) -> None:
        self.call = call
        self._finish = finish

    def done(self) -> bool:
        """Whether `result` would give an answer at once. Raises: EnvironmentFault when the step is overdue."""
        return self.call.done()

    def result(self) -> list[int] | None:
        """Wait for the step; then what `advance` gives otherwise. To be called once, by the decoding thread."""
        with span("environment"):
            step = self.call.result()
        return self._finish(step)


Turnover = list[int] | PendingTurn | None  # what `RolloutSequence.advance` gives


def resolve(turnover: Turnover) -> list[int] | None:
    """The observation, waited for where it is on its way; None = the episode is over."""
    return turnover.result() if isinstance(turnover, PendingTurn) else turnover


def wait_for_any(turns: Collection[PendingTurn]) -> None:
    """Return as soon as one of them is done. Raises: EnvironmentFault when one is overdue."""
    while not any([turn.done() for turn in turns]):  # a list: every one is looked at
        with span("environment"):
            wait([turn.call.future for turn in turns], timeout=_LOOK_S, return_when=FIRST_COMPLETED)
