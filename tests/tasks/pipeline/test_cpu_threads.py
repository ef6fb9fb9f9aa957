"""Threads of a run: configured, torch's default, or as many as free processors; the record of a stage's threads."""

import pytest
import torch

from rl_core.cpu import openmp_spin
from tasks.pipeline import cpu_threads
from tasks.pipeline.cpu_threads import (
    THREADS_FILE,
    choose_num_threads,
    read_default_threads,
    read_recorded_threads,
    record_num_threads,
    use_torch_threads,
)


@pytest.fixture(autouse=True)
def reset_default_threads():
    """Forget torch's default, which is cached for the process, before and after these tests."""
    cpu_threads.read_default_threads.cache_clear()
    yield
    cpu_threads.read_default_threads.cache_clear()


def test_null_is_torch_s_default_whatever_an_earlier_run_set(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert (choose_num_threads(None, None), read_default_threads()) == ((None, ""), 6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # set by the run before
    assert (choose_num_threads(None, 5), read_default_threads()) == ((None, ""), 6)
    assert choose_num_threads(4, 5) == (4, "")


# user nice system idle iowait irq softirq steal: two processors over 100 ticks (one second)
BEFORE = "cpu0 100 0 0 900 0 0 0 0\ncpu1 100 0 0 900 0 0 0 0\n"
IDLE = "cpu0 105 0 0 995 0 0 0 0\ncpu1 100 0 2 998 0 0 0 0\n"
ONE_BUSY = "cpu0 195 0 5 900 0 0 0 0\ncpu1 100 0 2 998 0 0 0 0\n"
BOTH_BUSY = "cpu0 200 0 0 900 0 0 0 0\ncpu1 100 95 0 900 0 0 0 5\n"


@pytest.mark.parametrize(("after", "free"), [(IDLE, 2), (ONE_BUSY, 1), (BOTH_BUSY, 1)])
def test_auto_counts_the_processors_that_are_free_for_a_second(monkeypatch, tmp_path, after, free):
    readings, clock = iter([BEFORE, after, after]), iter([50.0, 51.0, 52.0])
    monkeypatch.setattr(openmp_spin.Path, "read_text", lambda self: next(readings))
    monkeypatch.setattr(openmp_spin.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(openmp_spin.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(openmp_spin.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(openmp_spin.time, "process_time", lambda: 7.0)
    monkeypatch.setattr(openmp_spin.time, "sleep", lambda seconds: None)
    assert choose_num_threads("auto", None) == (
        free,
        f"threads: {free}, as {free} of 2 processors are free",
    )
    assert choose_num_threads("auto", 7)[0] == 7  # a resumed run does not measure again


def test_a_stage_s_record(tmp_path):
    assert read_recorded_threads(tmp_path / THREADS_FILE) is None
    record_num_threads(tmp_path, 5)
    assert read_recorded_threads(tmp_path / THREADS_FILE) == 5
    for broken in ("", "[5]", '{"threads": "5"}', '{"threads": 0}', '{"threads": null}', "{}"):
        (tmp_path / THREADS_FILE).write_text(broken)
        assert read_recorded_threads(tmp_path / THREADS_FILE) is None


def test_torch_s_threads_are_restored_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), use_torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before
