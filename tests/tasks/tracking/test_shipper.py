"""Delivery: everything once, in order, through a store that is unreachable, loses runs, or refuses single records."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rl_core.errors import BackendError
from tasks.tracking.journal import DeliveryCursor, LineLog, MetricsJournal, build_events_path
from tasks.tracking.shipper import BATCH_SIZE, RunNotFound, Shipper


class FakeStore:
    """Store that keeps one copy of equal metrics, like MLflow; it may be down, lose runs or refuse names."""

    store = "fake"
    identity = ""

    def __init__(self) -> None:
        self.runs: dict[str, dict] = {}
        self.by_key: dict[str, str] = {}
        self.calls: list[int] = []
        self.down = False
        self.lose_answers = 0
        self.fail_at_call = 0  # the n-th delivery of metrics finds the store down
        self.bad_names: set[str] = set()
        self.bad_events: set[str] = set()

    def _answer(self) -> None:
        if self.down:
            raise BackendError("down")

    def create_run(self, event, *, retried):
        self._answer()
        run_id = self.by_key.get(event["key"]) if retried else None
        if run_id is None:
            run_id = f"run{len(self.runs)}"
            self.by_key[event["key"]] = run_id
            self.runs[run_id] = {"metrics": set(), "sent": 0, "events": []}
        if self.lose_answers:
            self.lose_answers -= 1
            raise BackendError("timeout")
        return run_id, "1"

    def has_run(self, run_id):
        self._answer()
        return run_id in self.runs

    def store_metrics(self, run_id, rows):
        self._answer()
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        assert 0 < len(rows) <= BATCH_SIZE
        if len(self.calls) + 1 == self.fail_at_call:
            self.fail_at_call = 0
            raise BackendError("down")
        if self.bad_names & {row[0] for row in rows}:
            raise ValueError("bad name")
        self.calls.append(len(rows))
        self.runs[run_id]["metrics"] |= set(rows)
        self.runs[run_id]["sent"] += len(rows)
        if self.lose_answers:
            self.lose_answers -= 1
            raise BackendError("timeout")

    def store_event(self, run_id, event):
        self._answer()
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        if event["op"] in self.bad_events:
            raise ValueError("refused")
        self.runs[run_id]["events"].append(event["op"])


class Run:
    """Journal, its events, and a shipper without its thread."""

    def __init__(self, folder: Path, store: FakeStore) -> None:
        self.events, self.journal = LineLog(build_events_path(folder)), MetricsJournal(folder)
        self.shipper = Shipper(folder, self.journal, self.events, lambda: store)
        if self.events.end == 0:
            self.events.append_record({"op": "start", "key": "k", "name": "n", "time": 0})

    def log(self, step: int, **metrics: float) -> None:
        self.journal.append_metrics(metrics, step)

    def kill(self) -> None:
        """Leave the state after SIGKILL: no final records, file lock released."""
        self.journal.close()
        self.events.close()


def count_stored(store: FakeStore, run_id: str = "run0") -> Counter:
    return Counter((name, step) for name, _, _, step in store.runs[run_id]["metrics"])


def test_damaged_lines_do_not_reach_the_store_and_are_counted(tmp_path):
    """Without checksums, changed digits were sent as measurements, and a damaged first record stopped all delivery."""
    store, run = FakeStore(), Run(tmp_path, FakeStore())
    for step in range(4):
        run.log(step, loss=0.125 + step)
    run.events.append_record({"op": "tag", "name": "good"})
    run.events.append_record({"op": "tag", "name": "lost"})
    run.kill()
    for path, old, new in (
        (run.journal.lines.path, b"2.125", b"7.777"),
        (build_events_path(tmp_path), b'"lost"', b'"most"'),
        (build_events_path(tmp_path), b'"start"', b'"stark"'),
    ):
        assert path.read_bytes().count(old) == 1
        path.write_bytes(path.read_bytes().replace(old, new))
    again = Run(tmp_path, store)
    again.shipper._connect = lambda: store
    store.fail_at_call = 1
    with pytest.raises(BackendError):
        again.shipper.deliver_pending()
    again.shipper.deliver_pending()
    assert sorted(value for _, value, _, _ in store.runs["run0"]["metrics"]) == [
        0.125,
        1.125,
        3.125,
    ]
    assert store.runs["run0"]["events"] == ["tag"] and again.shipper.is_drained
    assert DeliveryCursor.load(tmp_path).num_damaged == 3
    again.kill()


def test_batches_are_full_and_within_the_limit(tmp_path):
    store, run = FakeStore(), Run(tmp_path, FakeStore())
    run.shipper._connect = lambda: store
    for step in range(250):
        run.journal.append_metrics({f"m{index}": step for index in range(10)}, step)
    run.shipper.deliver_pending()
    assert store.calls == [1000, 1000, 500]
    assert run.shipper.is_drained and len(count_stored(store)) == 2500
    run.shipper.deliver_pending()
    assert store.calls == [1000, 1000, 500]  # nothing is sent twice without need
    run.kill()


def test_a_line_larger_than_a_batch_is_split(tmp_path):
    store = FakeStore()
    run = Run(tmp_path, store)
    run.journal.append_metrics({f"m{index}": 1.0 for index in range(2 * BATCH_SIZE + 1)}, 0)
    run.shipper.deliver_pending()
    assert store.calls == [1000, 1000, 1] and run.shipper.is_drained
    run.kill()


def test_a_store_that_is_down_costs_nothing_and_loses_nothing(tmp_path):
    store = FakeStore()
    store.down = True
    run = Run(tmp_path, store)
    for step in range(5):
        run.log(step, loss=step)
        with pytest.raises(BackendError):
            run.shipper.deliver_pending()
    assert run.shipper.count_waiting() == (5, 1) and not run.shipper.is_drained
    store.down = False
    run.shipper.deliver_pending()
    assert count_stored(store) == {("loss", step): 1 for step in range(5)}
    run.kill()


def test_an_outage_in_the_middle_of_a_delivery(tmp_path):
    """Acknowledged records are not sent again; the rest, including metrics, is sent later."""
    store = FakeStore()
    run = Run(tmp_path, store)
    for step in range(3):
        run.journal.append_metrics({f"m{index}": 1.0 for index in range(BATCH_SIZE)}, step)
    store.fail_at_call = 2
    with pytest.raises(BackendError):
        run.shipper.deliver_pending()
    assert (
        store.calls == [BATCH_SIZE]
        and 0 < DeliveryCursor.load(tmp_path).metrics_offset < run.journal.lines.end
    )
    run.shipper.deliver_pending()
    assert store.calls == [BATCH_SIZE] * 3 and len(count_stored(store)) == 3 * BATCH_SIZE
    run.events.append_record({"op": "tags", "time": 0})
    run.log(3, loss=1.0)
    store.down = True
    for _ in range(5):
        with pytest.raises(BackendError):
            run.shipper.deliver_pending()
    run.events.append_record({"op": "end", "time": 0})
    run.shipper._deliver_metrics = lambda sink: None  # the store is down for the records only
    with pytest.raises(BackendError):
        run.shipper.deliver_pending()
    del run.shipper._deliver_metrics
    store.down = False
    run.shipper.deliver_pending()
    assert (
        store.runs["run0"]["events"] == ["start", "tags", "end"]
        and run.shipper.state.num_failed == 0
    )
    assert count_stored(store)[("loss", 3)] == 1
    run.kill()


def test_a_lost_answer_at_creation_makes_no_second_run(tmp_path):
    store = FakeStore()
    store.lose_answers = 1
    run = Run(tmp_path, store)
    run.log(0, loss=1.0)
    with pytest.raises(BackendError):
        run.shipper.deliver_pending()
    run.kill()  # and this process never learns the id
    again = Run(tmp_path, store)
    again.shipper.deliver_pending()
    assert list(store.runs) == ["run0"] and len(count_stored(store)) == 1
    again.kill()


def test_random_kills_and_outages_deliver_each_value_once(tmp_path):
    """Every value arrives once although the process dies, answers are lost and steps are replayed."""
    rng, store, step, run, total = random.Random(3), FakeStore(), 0, None, 1000
    for _ in range(60):
        run = run or Run(tmp_path, store)
        for _ in range(rng.randrange(30)):
            run.log(step, loss=float(step), reward=-float(step))
            step += 1
        store.down = rng.random() < 0.4
        store.lose_answers = rng.random() < 0.3
        with contextlib.suppress(BackendError):
            run.shipper.deliver_pending()
        if rng.random() < 0.4:
            run.kill()
            run = None
            step = max(0, step - rng.randrange(20))  # back to the last checkpoint
    store.down, store.lose_answers = False, 0
    run = run or Run(tmp_path, store)
    while step < total:
        run.log(step, loss=float(step), reward=-float(step))
        step += 1
    run.shipper.deliver_pending()
    assert count_stored(store) == {
        (name, index): 1 for name in ("loss", "reward") for index in range(total)
    }
    assert {(row[0], row[3]): row[1] for row in store.runs["run0"]["metrics"]}[
        ("reward", 999)
    ] == -999.0
    run.kill()


def test_one_refused_value_does_not_take_its_batch_along(tmp_path, caplog):
    store = FakeStore()
    store.bad_names = {"m7"}
    run = Run(tmp_path, store)
    run.journal.append_metrics({f"m{index}": 1.0 for index in range(10)}, 0)
    run.shipper.deliver_pending()
    assert len(count_stored(store)) == 9 and run.shipper.state.num_failed == 1
    assert "m7" in caplog.text and run.shipper.is_drained
    run.kill()


def test_a_refused_record_is_counted_and_the_next_one_arrives(tmp_path):
    store = FakeStore()
    store.bad_events = {"artifact"}
    run = Run(tmp_path, store)
    for op in ("artifact", "tags"):
        run.events.append_record({"op": op, "time": 0})
    run.shipper.deliver_pending()
    assert store.runs["run0"]["events"] == ["start", "tags"] and run.shipper.state.num_failed == 1
    assert DeliveryCursor.load(tmp_path).num_failed == 1
    run.kill()


def test_a_run_that_the_store_lost_is_recorded_again(tmp_path):
    store = FakeStore()
    run = Run(tmp_path, store)
    run.log(0, loss=1.0)
    run.shipper.deliver_pending()
    store.runs.clear(), store.by_key.clear()  # someone emptied the store
    run.log(1, loss=2.0)
    with pytest.raises(BackendError):
        run.shipper.deliver_pending()
    run.shipper.deliver_pending()
    assert count_stored(store) == {("loss", 0): 1, ("loss", 1): 1}
    run.kill()


def test_another_store_receives_all_of_the_run(tmp_path):
    first, second = FakeStore(), FakeStore()
    run = Run(tmp_path, first)
    run.log(0, loss=1.0)
    run.shipper.deliver_pending()
    run.kill()
    second.store = "other"
    again = Run(tmp_path, second)
    again.shipper.deliver_pending()
    assert len(count_stored(second)) == 1 and DeliveryCursor.load(tmp_path).store == "other"
    again.kill()


def test_a_run_of_the_same_number_in_another_database_is_left_alone(tmp_path):
    """At another address the marks of the experiments decide, not whether a run of this number exists there."""
    for number, (here, there, is_same) in enumerate(
        [("a", "b", False), ("", "", False), ("", "a", False), ("a", "a", True)]
    ):
        folder = tmp_path / str(number)
        first, other = FakeStore(), FakeStore()
        first.identity, other.identity, other.store = here, there, "another address"
        run = Run(folder, first)
        run.log(0, loss=1.0)
        run.shipper.deliver_pending()
        run.kill()
        other.runs["run0"] = {"metrics": set(), "sent": 0, "events": []}
        again = Run(folder, other)
        again.log(1, loss=2.0)
        again.shipper.deliver_pending()
        again.kill()
        if is_same:
            assert set(count_stored(other)) == {("loss", 1)} and list(other.runs) == ["run0"]
        else:
            assert other.runs["run0"] == {"metrics": set(), "sent": 0, "events": []}, (here, there)
            assert set(count_stored(other, "run1")) == {("loss", 0), ("loss", 1)}, (here, there)
        state = DeliveryCursor.load(folder)
        assert (state.store, state.identity) == ("another address", there)


def test_close_is_bounded_and_the_thread_ends(tmp_path):
    store = FakeStore()
    store.down = True
    run = Run(tmp_path, store)
    run.shipper.start_thread()
    run.log(0, loss=1.0)
    assert not run.shipper.close(0.3)
    run.shipper._thread.join(10)
    assert not run.shipper._thread.is_alive()
    run.kill()


def test_close_tries_again_while_there_is_time(tmp_path):
    """The last records survive a short outage at the very end."""
    store = FakeStore()
    run = Run(tmp_path, store)
    run.shipper._interval_s = 1000.0  # it delivers only on request
    run.shipper.start_thread()
    run.shipper.wait_started(10)
    run.log(0, loss=1.0)
    store.fail_at_call = 1
    assert run.shipper.close(30) and store.fail_at_call == 0
    assert count_stored(store) == {("loss", 0): 1}
    run.kill()


def test_the_thread_delivers_during_the_run(tmp_path):
    store = FakeStore()
    run = Run(tmp_path, store)
    run.shipper._interval_s = 0.01
    run.shipper.start_thread()
    for step in range(20):
        run.log(step, loss=1.0)
        time.sleep(0.002)
    assert run.shipper.wait_drained(10)
    assert len(count_stored(store)) == 20
    assert run.shipper.close(10)
    run.kill()


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_shipper import FileStore, Run
run = Run(Path(sys.argv[1]) / "run", FileStore(Path(sys.argv[1]) / "store.jsonl"))
run.shipper._interval_s = 0.001
run.shipper.start_thread()
first = int(sys.argv[3])
for step in range(first, 100_000):
    run.log(step, loss=float(step))
    if step % 50 == 0:
        print(step, flush=True)
    time.sleep(0.0002)
"""


class FileStore(FakeStore):
    """Store that outlives the process: each delivery is a line of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def create_run(self, event, *, retried):
        return "run0", "1"

    def has_run(self, run_id):
        return True

    def store_metrics(self, run_id, rows):
        with self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def store_event(self, run_id, event):
        pass


@pytest.mark.slow
def test_exactly_once_through_sigkill(tmp_path):
    """Kill a real process five times while it logs and delivers; steps are replayed each time."""
    first, here = 0, str(Path(__file__).parent)
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), here, str(first)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= first + 200:
                first = int(line) - 120  # the last checkpoint
                break
        child.send_signal(signal.SIGKILL)
        child.wait()
    store = FileStore(tmp_path / "store.jsonl")
    run = Run(tmp_path / "run", store)
    run.shipper.deliver_pending()
    run.kill()
    rows = [tuple(json.loads(line)) for line in store.path.read_text().splitlines()]
    steps = Counter(row[3] for row in set(rows))  # the store keeps one copy of equal rows
    assert set(steps.values()) == {1}
    assert sorted(steps) == list(range(max(steps) + 1))
