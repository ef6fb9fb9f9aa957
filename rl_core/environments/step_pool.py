"""Thread pool for blocking environment steps, with a concurrency limit and timeouts.

Only environment code runs on the threads. Sequence state is read and written by the decoding thread alone, so results
do not depend on the order in which steps finish.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from rl_core.environments.environment import Step
from rl_core.errors import EnvironmentFault
from rl_core.time_limits import MAX_HUNG, count_hung_calls, terminate_thread
from rl_core.timing import span

_POLL_S = 0.25  # polling interval for overdue calls


class EnvironmentCall:
    """One call into an environment, queued or running."""

    def __init__(
        self,
        pool: StepPool,
        description: str,
        timeout_s: float,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.future: Future[Any] = Future()
        self._pool, self._description, self._timeout_s = pool, description, timeout_s
        self._function, self._args = function, args
        self._started_at: float | None = None
        self.thread: threading.Thread | None = None  # the thread that runs it
        # True = the call exceeded its time limit, and its thread no longer belongs to the pool.
        self.is_abandoned = False
        self._is_finished = False
        self._lock = threading.Lock()  # the call either finishes or is abandoned

    def run_call(self) -> None:
        """Execute the call on a pool thread."""
        self.thread = threading.current_thread()
        self._started_at = time.monotonic()
        value, error = None, None
        try:
            value = self._function(*self._args)
        except BaseException as raised:  # re-raised by `result`
            error = raised
        with self._lock:
            if self.is_abandoned:
                return
            self._is_finished = True
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)

    def is_done(self) -> bool:
        """Return whether the call has finished or exceeded its time limit; then its result raises EnvironmentFault."""
        if not self.future.done() and self._compute_time_left() <= 0:
            with self._lock:
                is_late = not self._is_finished and not self.is_abandoned
                self.is_abandoned = self.is_abandoned or is_late
            if is_late:
                self._pool.abandon_call(self)
                fault = f"{self._description} has not returned within {self._timeout_s:g} s (sampling.step_timeout_s)"
                self.future.set_exception(EnvironmentFault(fault))
        return self.future.done()

    def wait_for_result(self) -> Any:
        """Wait until the call has finished; return its value or raise its exception.

        Raises: EnvironmentFault if it exceeded its time limit.
        """
        self.wait_until_done()
        return self.future.result()

    def wait_until_done(self) -> None:
        """Block until the call has finished or exceeded its time limit."""
        while not self.is_done():
            if self._started_at is not None:
                wait([self.future], timeout=min(self._compute_time_left(), 60.0))
                continue
            # A queued call has not used any of its time; the calls that occupy the threads may be overdue.
            self._pool.abandon_overdue_calls()
            wait([self.future], timeout=_POLL_S)

    def _compute_time_left(self) -> float:
        """Compute the seconds until the call is overdue; the full limit if it is still queued."""
        if self._started_at is None:
            return self._timeout_s
        return self._started_at + self._timeout_s - time.monotonic()


class StepPool:
    """Threads for the environment steps of one collection; a context manager.

    Daemon threads, because Python cannot kill a thread. A step that never returns is abandoned: its error is raised,
    queued
    calls get a new thread, and the process can exit, all without waiting for it. A step that runs Python code is made
    to
    end; once MAX_HUNG steps do not, further steps fail immediately (`rl_core.time_limits`).
    """

    def __init__(self, max_concurrent: int, timeout_s: float) -> None:
        """Set the limits: at most `max_concurrent` calls run concurrently, each for `timeout_s` seconds without
        queueing.
        """
        self._max_concurrent, self._timeout_s = max_concurrent, timeout_s
        self._calls: queue.SimpleQueue[EnvironmentCall | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # idle threads not yet claimed by a queued call
        self._num_threads = 0  # threads that take calls
        self._running: list[EnvironmentCall | None] = []  # by thread, abandoned ones included

    def __enter__(self) -> StepPool:
        return self

    def __exit__(self, *exception: object) -> None:
        """Drop queued calls; threads end after their current call."""
        while True:
            try:
                self._calls.get_nowait()
            except queue.Empty:
                break
        for _ in range(self._num_threads):
            self._calls.put(None)

    def submit_call(
        self, description: str, function: Callable[..., Any], *args: Any
    ) -> EnvironmentCall:
        """Queue `function` for a thread; `description` names the call in errors."""
        call = EnvironmentCall(self, description, self._timeout_s, function, args)
        if (count := count_hung_calls()) >= MAX_HUNG:
            call.future.set_exception(
                EnvironmentFault(f"{description} was not begun: {count} earlier calls still hang")
            )
            return call
        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._num_threads < self._max_concurrent:
            self._add_thread()
        return call

    def abandon_overdue_calls(self) -> None:
        """Abandon the running calls that are overdue; new threads take the queued ones."""
        for call in list(self._running):
            if call is not None:
                call.is_done()

    def abandon_call(self, call: EnvironmentCall) -> None:
        """Drop the thread of an overdue call from the pool, and terminate it if possible."""
        self._num_threads -= 1
        if call.thread is not None:
            terminate_thread(call.thread)
        if not self._calls.empty():
            self._add_thread()

    def _add_thread(self) -> None:
        self._running.append(None)
        thread = threading.Thread(
            target=self._run_queued_calls, args=(len(self._running) - 1,), daemon=True
        )
        self._num_threads += 1
        thread.name = f"step {len(self._running)}"
        thread.start()

    def _run_queued_calls(self, index: int) -> None:
        while (call := self._calls.get()) is not None:
            self._running[index] = call
            call.run_call()
            self._running[index] = None
            if call.is_abandoned:
                return
            self._idle.release()


@dataclass(frozen=True, slots=True)
class ReplacementContext:
    """An observation that replaces all tokens so far by a newly rendered prompt."""

    ids: list[int]  # the prompt, up to the header of the next action
    # Maximum length of this context in tokens: the prompt, plus at most what remains of the sequence's
    # max_completion_tokens, which count the tokens of all its contexts.
    limit: int


Observation = list[int] | ReplacementContext | None  # tokens to append; None = the episode is over


class PendingTurn:
    """A turn whose step is still running; `RolloutSequence.advance` returns it instead of an observation."""

    def __init__(
        self, call: EnvironmentCall, finish: Callable[[Callable[[], Step]], Observation]
    ) -> None:
        """Store the call and `finish`, which takes the call's `wait_for_result` and returns the observation."""
        self.call = call
        self._finish = finish

    def is_done(self) -> bool:
        """Return whether `finish_turn` would not block."""
        return self.call.is_done()

    def finish_turn(self) -> Observation:
        """Return the observation, or None at the end; blocks until the step is done.

        Called once, by the decoding thread.
        """
        with span("environment"):
            self.call.wait_until_done()
        return self._finish(self.call.wait_for_result)


TurnOutcome = Observation | PendingTurn  # result of `RolloutSequence.advance`


def wait_for_observation(outcome: TurnOutcome) -> Observation:
    """Return the observation, blocking while it is pending; None = the episode is over."""
    return outcome.finish_turn() if isinstance(outcome, PendingTurn) else outcome


def wait_for_any_turn(turns: Collection[PendingTurn]) -> None:
    """Block until one of the turns is done."""
    while not any([turn.is_done() for turn in turns]):  # a list, so that every turn is checked
        with span("environment"):
            wait([turn.call.future for turn in turns], timeout=_POLL_S, return_when=FIRST_COMPLETED)
