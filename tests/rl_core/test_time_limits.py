"""Calls with a time limit, which end or are counted."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest

from rl_core import time_limits
from rl_core.environments import step_pool
from rl_core.environments.step_pool import StepPool
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import EnvironmentFault
from rl_core.time_limits import CallTimeout, TooManyHungCalls, call_with_timeout, count_hung_calls
from rl_core.types import ToolCall

PATIENCE_S = 30.0


def wait_until_ended(threads: list[threading.Thread]) -> bool:
    """Wait for the end of all threads, and return whether they ended."""
    end = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        count_hung_calls()
        time.sleep(0.01)
    return not any(thread.is_alive() for thread in threads)


def spin_forever(threads: list[threading.Thread]) -> None:
    """Loop forever, ignoring exceptions."""
    threads.append(threading.current_thread())
    while True:
        try:
            sum(range(100))
        except Exception:  # user code does this in its loops
            continue


def test_values_errors_and_context_pass() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    variable.set("here")
    assert call_with_timeout(PATIENCE_S, "call", lambda x: (x, variable.get()), 1) == (1, "here")
    with pytest.raises(KeyError, match="cell"):
        call_with_timeout(PATIENCE_S, "call", {}.__getitem__, "cell")


@pytest.mark.slow
def test_two_hundred_hanging_tools_leave_no_thread() -> None:
    threads: list[threading.Thread] = []
    toolset = Toolset([Tool("spin", "", {}, lambda: spin_forever(threads), timeout_s=0.01)])
    for _ in range(200):
        observation, is_error = toolset.run(ToolCall("spin", {}))
        assert is_error and "spin" in observation
    assert 32 <= len(threads) <= 200 and wait_until_ended(threads) and count_hung_calls() == 0
    assert {thread.name for thread in threads} == {"tool spin"}
    assert all(thread.daemon for thread in threads)


def test_a_wait_outside_python_is_counted_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "MAX_HUNG", 2)
    monkeypatch.setattr(time_limits, "_GRACE_S", 0.0)
    release = threading.Event()
    threads: list[threading.Thread] = []

    def wait() -> None:
        threads.append(threading.current_thread())
        release.wait(PATIENCE_S)

    try:
        for count in (1, 2):
            with pytest.raises(CallTimeout, match=r"call did not return within 0.01 s"):
                call_with_timeout(0.01, "call", wait)
            assert count_hung_calls() == count
        with pytest.raises(TooManyHungCalls, match="2 earlier calls still hang"):
            call_with_timeout(0.01, "call", wait)
        assert len(threads) == 2, "the third was not begun"
    finally:
        release.set()
    assert wait_until_ended(threads) and count_hung_calls() == 0


def test_processor_time_is_counted_on_request() -> None:
    threads: list[threading.Thread] = []
    result = call_with_timeout(
        0.05, "sleep", lambda: time.sleep(0.4) or "slept", counts_cpu_time=True
    )
    assert result == "slept"
    with pytest.raises(CallTimeout):
        call_with_timeout(0.05, "spin", spin_forever, threads, counts_cpu_time=True)
    assert wait_until_ended(threads)


def test_steps_that_spin_are_interrupted() -> None:
    threads: list[threading.Thread] = []
    with StepPool(max_concurrent=4, timeout_s=0.05) as pool:
        calls = [pool.submit_call(f"step {number}", spin_forever, threads) for number in range(12)]
        for call in calls:
            with pytest.raises(
                EnvironmentFault, match=r"has not returned within 0.05 s|was not begun"
            ):
                call.wait_for_result()
    assert len(threads) <= 12 and wait_until_ended(threads) and count_hung_calls() == 0


def test_no_step_is_begun_while_too_many_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_pool, "MAX_HUNG", 1)
    monkeypatch.setattr(time_limits, "_GRACE_S", 0.0)
    release = threading.Event()
    try:
        with StepPool(max_concurrent=4, timeout_s=0.05) as pool:
            with pytest.raises(EnvironmentFault, match="has not returned"):
                pool.submit_call("the first", release.wait, PATIENCE_S).wait_for_result()
            with pytest.raises(
                EnvironmentFault, match="the second was not begun: 1 earlier calls still hang"
            ):
                pool.submit_call("the second", release.wait, PATIENCE_S).wait_for_result()
    finally:
        release.set()
    end = time.monotonic() + PATIENCE_S
    while count_hung_calls() and time.monotonic() < end:
        time.sleep(0.01)
    assert count_hung_calls() == 0
