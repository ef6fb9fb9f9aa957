"""The benchmark of safety's cost: it times functions that exist, and leaves out what a folder's writer computes."""

import subprocess
import sys
from pathlib import Path

import bench_safety
import pytest
from bench_safety import Timer

BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"
WATCH = """
from bench_safety import Timer, time_safety_functions
from rl_core.storage import folders
timer = Timer()
time_safety_functions(timer)
folders.publish_folder({folder!r}, lambda target: folders.write_folder_file(target / "rows", b"1"))
print(dict(timer.calls))
"""


def test_every_function_that_is_to_be_timed_exists(tmp_path):
    code = WATCH.format(folder=str(tmp_path / "published"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS
    )
    assert done.returncode == 0, done.stderr
    assert "'publishing of folders': 1" in done.stdout


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench_safety, "time", clock)
    return clock


def test_the_time_of_a_writer_is_left_out_of_publishing(clock):
    timer = Timer()

    def publish(final, write, extra=None):
        write(final)
        clock.passes(0.25)

    timer.published(publish)("folder", lambda folder: clock.passes(8.0))
    assert dict(timer.seconds) == {("publishing of folders", True): 0.25}


def test_within_a_timed_function_publishing_counts_as_a_whole_and_once(clock):
    timer = Timer()
    publish = timer.published(lambda final, write: write(final))
    timer.timed("checkpoints", lambda: publish("folder", lambda folder: clock.passes(0.5)))()
    assert dict(timer.seconds) == {("checkpoints", True): 0.5}
    assert dict(timer.calls) == {"checkpoints": 1}
