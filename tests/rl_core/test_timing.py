"""Spans: sums, nesting, and work on other threads."""

import threading
import time

import pytest

from rl_core import timing
from rl_core.timing import add_to_total, collect_seconds, span


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that advances by 1 at every reading."""
    monkeypatch.setattr(time, "perf_counter", iter(range(1000)).__next__)


def test_spans_of_a_name_add_up_and_outer_spans_include_inner_ones(clock):
    with collect_seconds() as seconds:
        with span("rollout"):  # 0 .. 5
            for _ in range(2):
                with span("environment"):  # 1 .. 2, 3 .. 4
                    pass
        with span("update"):  # 6 .. 7
            pass
        add_to_total("tokens", 3)
        add_to_total("tokens", 4)
    assert seconds == {"rollout": 5, "environment": 2, "update": 1, "tokens": 7}


def test_nothing_is_counted_outside_or_on_other_threads():
    with collect_seconds() as seconds:
        thread = threading.Thread(target=add_to_total, args=("tokens", 1))
        thread.start()
        thread.join()
    add_to_total("tokens", 1)
    with span("rollout"):
        pass
    assert seconds == {}


def test_a_nested_collection_is_separate():
    with collect_seconds() as outer:
        with collect_seconds() as inner:
            add_to_total("tokens", 1)
        add_to_total("tokens", 10)
    assert (outer, inner) == ({"tokens": 10}, {"tokens": 1})


def test_a_span_counts_if_its_block_raises(clock):
    with (
        collect_seconds() as seconds,
        pytest.raises(ValueError, match="on purpose"),
        span("reward"),
    ):
        raise ValueError("on purpose")
    assert seconds == {"reward": 1}


def test_spans_are_nested_at_most_two_deep():
    # the profile subtracts one level
    assert not set(timing.ENCLOSING_SPANS) & set(timing.ENCLOSING_SPANS.values())
