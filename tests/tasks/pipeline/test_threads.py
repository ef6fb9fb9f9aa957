"""Threads of a run: as set, as torch has them, or as many as processors are free; the record of a stage's."""

import pytest
import torch

from rl_core.cpu import waiting
from tasks.pipeline import threads
from tasks.pipeline.threads import (
    THREADS,
    choose_threads,
    note_threads,
    own_threads,
    recorded_threads,
    torch_threads,
)


@pytest.fixture(autouse=True)
def unchanged():
    """The number that torch began with is remembered for the whole process: not that of these tests."""
    threads.own_threads.cache_clear()
    yield
    threads.own_threads.cache_clear()


def test_null_is_torch_s_own_number_whatever_an_earlier_run_had_set(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert (choose_threads(None, None), own_threads()) == ((None, ""), 6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as the run before left it
    assert (choose_threads(None, 5), own_threads()) == ((None, ""), 6)
    assert choose_threads(4, 5) == (4, "")


# user nice system idle iowait irq softirq steal: two processors over 100 ticks (one second)
BEFORE = "cpu0 100 0 0 900 0 0 0 0\ncpu1 100 0 0 900 0 0 0 0\n"
IDLE = "cpu0 105 0 0 995 0 0 0 0\ncpu1 100 0 2 998 0 0 0 0\n"
ONE_BUSY = "cpu0 195 0 5 900 0 0 0 0\ncpu1 100 0 2 998 0 0 0 0\n"
BOTH_BUSY = "cpu0 200 0 0 900 0 0 0 0\ncpu1 100 95 0 900 0 0 0 5\n"


@pytest.mark.parametrize(("after", "free"), [(IDLE, 2), (ONE_BUSY, 1), (BOTH_BUSY, 1)])
def test_auto_is_what_others_leave_in_a_second(monkeypatch, tmp_path, after, free):
    looks, clock = iter([BEFORE, after, after]), iter([50.0, 51.0, 52.0])
    monkeypatch.setattr(waiting.Path, "read_text", lambda self: next(looks))
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(waiting.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(waiting.time, "process_time", lambda: 7.0)
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: None)
    assert choose_threads("auto", None) == (free, f"threads: {free}, as {free} of 2 processors are free")
    assert choose_threads("auto", 7)[0] == 7  # a run that goes on: no further look


def test_a_stage_s_record(tmp_path):
    assert recorded_threads(tmp_path / THREADS) is None
    note_threads(tmp_path, 5)
    assert recorded_threads(tmp_path / THREADS) == 5
    for broken in ("", "[5]", '{"threads": "5"}', '{"threads": 0}', '{"threads": null}', "{}"):
        (tmp_path / THREADS).write_text(broken)
        assert recorded_threads(tmp_path / THREADS) is None


def test_torch_s_threads_are_as_before_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before
