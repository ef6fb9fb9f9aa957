"""Tasks of a collection: order, late ones played twice, lost ones again. Times by hand."""

import dataclasses

import pytest

from rl_core.rollout_workers.heartbeats import EVERY_S, HUNG_S, Heartbeats
from rl_core.rollout_workers.task_board import TaskBoard
from rl_core.rollout_workers.worker import PlayedTask, PlayTask


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def board_of(count, clock):
    return TaskBoard([PlayTask([number], [], 1, None, 0, 0) for number in range(count)], clock)


def played(number):
    return PlayedTask([number], [], [])


def test_a_task_that_takes_three_times_as_long_as_any_other_is_played_by_a_second_worker(clock):
    board = board_of(3, clock)
    assert [board.next(), board.next()] == [0, 1]  # one fast worker, one slow
    clock.now = 1.0
    board.ended(0, played(0))
    assert board.next() == 2
    clock.now = 2.0
    board.ended(2, played(2))
    assert board.next() is None  # 1 has taken 2 s, and the longest that has finished 1 s
    clock.now = 3.0
    assert board.next() is None
    clock.now = 3.01
    assert board.next() == 1 and board.next() is None  # not a third time
    assert not board.is_over
    first, second = played(1), dataclasses.replace(played(1), failed=["other"])
    board.ended(1, first)
    assert board.is_over and board.is_played(1)
    board.ended(1, second)  # the slow one, later
    assert board.results[1] is first and [result.indices for result in board.results] == [[0], [1], [2]]


def test_nothing_is_late_before_anything_has_finished(clock):
    board = board_of(1, clock)
    assert board.next() == 0
    clock.now = 1e6
    assert board.next() is None


def test_a_lost_task_is_played_again_unless_another_one_plays_it(clock):
    board = board_of(2, clock)
    assert [board.next(), board.next()] == [0, 1]
    clock.now = 1.0
    board.ended(0, played(0))
    clock.now = 9.0
    assert board.next() == 1
    assert not board.lost(1) and board.next() == 1  # one goes on, and another free worker joins it
    assert not board.lost(1) and board.lost(1)  # both are gone
    assert board.next() == 1 and board.next() is None
    board.ended(1, played(1))
    assert not board.lost(1) and board.is_over


class Silent:
    """A cluster on which calls of some workers never end."""

    def __init__(self):
        self.asked, self.dumb = [], set()

    def ping(self, worker):
        self.asked.append(worker)
        return worker

    def wait(self, calls, timeout_s):
        return [call for call in calls if call not in self.dumb]


def test_workers_are_asked_now_and_then_and_one_that_does_not_answer_is_told(clock):
    cluster = Silent()
    beats, workers = Heartbeats(cluster, clock), [(0, "a"), (1, "b")]
    assert beats.silent(workers) == [] and cluster.asked == []
    clock.now = EVERY_S
    cluster.dumb = {"b"}
    assert beats.silent(workers) == [] and cluster.asked == ["a", "b"]
    clock.now += 1
    assert beats.silent(workers) == []
    clock.now = EVERY_S + HUNG_S
    assert beats.silent(workers) == [1]
    assert cluster.asked == ["a", "b", "a"]
    beats.forget(1)
    assert beats.silent(workers) == [], "another worker has the number"
