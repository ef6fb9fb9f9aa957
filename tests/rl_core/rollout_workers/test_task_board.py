"""Tasks of a collection: order, late ones played twice, lost ones again. Times by hand."""

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


def board_of(count, clock):
    return TaskQueue([RolloutBatch([number], [], 1, None, 0, 0) for number in range(count)], clock)


def played(number):
    return FinishedRolloutBatch([number], [], [])


def test_a_task_that_takes_three_times_as_long_as_any_other_is_played_by_a_second_worker(clock):
    board = board_of(3, clock)
    assert [board.start_next_task(), board.start_next_task()] == [0, 1]  # one fast worker, one slow
    clock.now = 1.0
    board.record_result(0, played(0))
    assert board.start_next_task() == 2
    clock.now = 2.0
    board.record_result(2, played(2))
    assert board.start_next_task() is None  # 1 has taken 2 s, and the longest that has finished 1 s
    clock.now = 3.0
    assert board.start_next_task() is None
    clock.now = 3.01
    assert board.start_next_task() == 1 and board.start_next_task() is None  # not a third time
    assert not board.is_over
    first, second = played(1), dataclasses.replace(played(1), failed=["other"])
    board.record_result(1, first)
    assert board.is_over and board.is_finished(1)
    board.record_result(1, second)  # the slow one, later
    assert board.results[1] is first and [result.indices for result in board.results] == [
        [0],
        [1],
        [2],
    ]


def test_nothing_is_late_before_anything_has_finished(clock):
    board = board_of(1, clock)
    assert board.start_next_task() == 0
    clock.now = 1e6
    assert board.start_next_task() is None


def test_a_lost_task_is_played_again_unless_another_one_plays_it(clock):
    board = board_of(2, clock)
    assert [board.start_next_task(), board.start_next_task()] == [0, 1]
    clock.now = 1.0
    board.record_result(0, played(0))
    clock.now = 9.0
    assert board.start_next_task() == 1
    assert (
        not board.record_lost_worker(1) and board.start_next_task() == 1
    )  # one goes on, and another free worker joins it
    assert not board.record_lost_worker(1) and board.record_lost_worker(1)  # both are gone
    assert board.start_next_task() == 1 and board.start_next_task() is None
    board.record_result(1, played(1))
    assert not board.record_lost_worker(1) and board.is_over


class Silent:
    """A cluster on which calls of some workers never end."""

    def __init__(self):
        self.asked, self.dumb = [], set()

    def ping_worker(self, worker):
        self.asked.append(worker)
        return worker

    def wait(self, calls, timeout_s):
        return [call for call in calls if call not in self.dumb]


def test_workers_are_asked_now_and_then_and_one_that_does_not_answer_is_told(clock):
    cluster = Silent()
    beats, workers = HeartbeatMonitor(cluster, clock), [(0, "a"), (1, "b")]
    assert beats.list_unresponsive(workers) == [] and cluster.asked == []
    clock.now = HEARTBEAT_INTERVAL_S
    cluster.dumb = {"b"}
    assert beats.list_unresponsive(workers) == [] and cluster.asked == ["a", "b"]
    clock.now += 1
    assert beats.list_unresponsive(workers) == []
    clock.now = HEARTBEAT_INTERVAL_S + HEARTBEAT_TIMEOUT_S
    assert beats.list_unresponsive(workers) == [1]
    assert cluster.asked == ["a", "b", "a"]
    beats.forget_worker(1)
    assert beats.list_unresponsive(workers) == [], "another worker has the number"
