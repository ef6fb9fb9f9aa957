"""Tasks of a collection: order, late ones played twice, lost ones repeated. Times by hand."""

import dataclasses

import pytest

from rl_core.rollout_workers.cluster import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    HeartbeatMonitor,
)
from rl_core.rollout_workers.worker import FinishedRolloutBatch, RolloutBatch
from rl_core.rollout_workers.worker_group import TaskQueue


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def create_queue(count, clock):
    return TaskQueue([RolloutBatch([number], [], 1, None, 0, 0) for number in range(count)], clock)


def build_result(number):
    return FinishedRolloutBatch([number], [], [])


def test_a_task_that_takes_three_times_as_long_as_any_other_is_played_by_a_second_worker(clock):
    queue = create_queue(3, clock)
    assert [queue.start_next_task(), queue.start_next_task()] == [0, 1]  # one fast worker, one slow
    clock.now = 1.0
    queue.record_result(0, build_result(0))
    assert queue.start_next_task() == 2
    clock.now = 2.0
    queue.record_result(2, build_result(2))
    assert queue.start_next_task() is None  # 1 has taken 2 s, and the longest that has finished 1 s
    clock.now = 3.0
    assert queue.start_next_task() is None
    clock.now = 3.01
    assert queue.start_next_task() == 1 and queue.start_next_task() is None  # not a third time
    assert not queue.is_over
    first, second = build_result(1), dataclasses.replace(build_result(1), failed=["other"])
    queue.record_result(1, first)
    assert queue.is_over and queue.is_finished(1)
    queue.record_result(1, second)  # the slow one, later
    assert queue.results[1] is first and [result.indices for result in queue.results] == [
        [0],
        [1],
        [2],
    ]


def test_nothing_is_late_before_anything_has_finished(clock):
    queue = create_queue(1, clock)
    assert queue.start_next_task() == 0
    clock.now = 1e6
    assert queue.start_next_task() is None


def test_a_lost_task_is_played_again_unless_another_one_plays_it(clock):
    queue = create_queue(2, clock)
    assert [queue.start_next_task(), queue.start_next_task()] == [0, 1]
    clock.now = 1.0
    queue.record_result(0, build_result(0))
    clock.now = 9.0
    assert queue.start_next_task() == 1
    # one continues, and another free worker joins it
    assert not queue.record_lost_worker(1) and queue.start_next_task() == 1
    assert not queue.record_lost_worker(1) and queue.record_lost_worker(1)  # both are lost
    assert queue.start_next_task() == 1 and queue.start_next_task() is None
    queue.record_result(1, build_result(1))
    assert not queue.record_lost_worker(1) and queue.is_over


class SilentCluster:
    """A cluster on which calls of some workers never end."""

    def __init__(self):
        self.pinged, self.silent = [], set()

    def ping_worker(self, worker):
        self.pinged.append(worker)
        return worker

    def wait_for_calls(self, calls, timeout_s):
        return [call for call in calls if call not in self.silent]


def test_workers_are_pinged_and_unresponsive_ones_listed(clock):
    cluster = SilentCluster()
    beats, workers = HeartbeatMonitor(cluster, clock), [(0, "a"), (1, "b")]
    assert beats.list_unresponsive(workers) == [] and cluster.pinged == []
    clock.now = HEARTBEAT_INTERVAL_S
    cluster.silent = {"b"}
    assert beats.list_unresponsive(workers) == [] and cluster.pinged == ["a", "b"]
    clock.now += 1
    assert beats.list_unresponsive(workers) == []
    clock.now = HEARTBEAT_INTERVAL_S + HEARTBEAT_TIMEOUT_S
    assert beats.list_unresponsive(workers) == [1]
    assert cluster.pinged == ["a", "b", "a"]
    beats.forget_worker(1)
    assert beats.list_unresponsive(workers) == [], "the number belongs to another worker"
