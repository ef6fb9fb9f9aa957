"""User-defined reward functions: typed errors that name function and sample, or masked samples."""

import math
import sys
import threading
import types

import pytest
from helpers.reward_rollouts import group, rollout, say

from rl_core.errors import RewardError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import RewardSettings

NAME = "user_function_for_test:score"


@pytest.fixture
def score(monkeypatch):
    """Return a function that scores `count` rollouts of seeds 0, 1, ... in groups of four: groups and metrics."""

    def score_rollouts(function, count=8, **options):
        module = types.ModuleType("user_function_for_test")
        module.score = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        groups = [
            group(
                *(rollout([say("a")], task=float(n % 2), seed=n) for n in range(start, start + 4))
            )
            for start in range(0, count, 4)
        ]
        metrics = RewardOrchestrator(
            {"task": 1.0, NAME: 0.5}, options=RewardSettings(**options)
        ).score(groups)
        return groups, metrics

    return score_rollouts


@pytest.fixture
def hang():
    """Return a wait that ends with the test."""
    event = threading.Event()
    yield event.wait
    event.set()


def return_seeds(trajectories):
    return [float(trajectory.seed) for trajectory in trajectories]


def build_failing_function(bad, how):
    def fail_at_seeds(trajectories):
        return [
            how() if trajectory.seed in bad else float(trajectory.seed)
            for trajectory in trajectories
        ]

    return fail_at_seeds


def test_a_hang_is_an_error_that_names_function_and_sample(score, hang):
    message = rf"level 'easy', seed 2, sample 0: reward '{NAME}' did not return within 0.05 s"
    with pytest.raises(RewardError, match=message):
        score(build_failing_function({2}, hang), timeout_s=0.05, max_failed_share=0)


def test_exits_and_generators(score):
    with pytest.raises(RewardError, match=r"seed 5, sample 0: .* raised SystemExit: 3"):
        score(build_failing_function({5}, lambda: sys.exit(3)), max_failed_share=0)
    groups, _ = score(lambda trajectories: (float(t.seed) for t in trajectories))
    assert groups[1].rewards == [2.0, 3.5, 3.0, 4.5]  # task + seed / 2

    def fail_late(trajectories):
        yield 1.0
        raise ValueError("late")

    with pytest.raises(RewardError, match="raised ValueError: late"):
        score(fail_late)


@pytest.mark.parametrize("how", ["nan", "raise", "hang"])
def test_masked_samples(score, hang, how):
    bad = {"nan": lambda: math.nan, "raise": lambda: 1 / 0, "hang": hang}[how]
    groups, metrics = score(
        build_failing_function({2, 5}, bad), timeout_s=0.1 if how == "hang" else 60
    )
    flat = [r for g in groups for r in g.rollouts]
    assert [r.is_masked for r in flat] == [n in (2, 5) for n in range(8)]
    others = [0 + 0.0, 1 + 0.5, 1 + 1.5], [0 + 2.0, 0 + 3.0, 1 + 3.5]
    assert groups[0].rewards == pytest.approx([0.0, 1.5, sum(others[0]) / 3, 2.5])
    assert groups[1].rewards == pytest.approx([2.0, sum(others[1]) / 3, 3.0, 4.5])
    assert flat[2].trajectory.rewards == {"task": 0.0}  # no uncomputed part, no weighted part
    assert flat[2].trajectory.reward == flat[2].reward
    assert metrics["reward/masked_rate"] == 0.25
    unmasked = [*others[0], *others[1]]
    assert metrics["reward/mean"] == pytest.approx(sum(unmasked) / 6)
    assert metrics["reward/user_function_for_test.score"] == pytest.approx(
        (0 + 1 + 3 + 4 + 6 + 7) / 6
    )
    assert metrics["reward/task"] == pytest.approx(0.5)  # of all eight


def test_masking_is_bounded(score):
    # 0.03 of the least number of 50: one sample may fail, two may not
    message = r"^2 of the newest 8 episodes failed \(reward_options.max_failed_share allows 0\.03\).*seed 2, sample 0: "
    for how in (lambda: math.nan, lambda: 1 / 0):
        with pytest.raises(RewardError, match=message):
            score(build_failing_function({2, 5}, how), max_failed_share=0.03)
    groups, _ = score(build_failing_function({2}, lambda: 1 / 0), max_failed_share=0.03)
    assert [r.is_masked for r in groups[0].rollouts] == [False, False, True, False]
    tried = []
    with pytest.raises(RewardError, match="seed 2"):
        score(
            build_failing_function(range(2, 80), lambda: tried.append(1) or 1 / 0),
            count=80,
            max_failed_share=0.03,
        )
    assert (
        len(tried) == 1 + 3
    )  # all together; then one at a time until the third, 0.03 of 80 being 2.4


def test_of_a_hundred_samples_so_many_may_fail(score):
    _, metrics = score(build_failing_function(range(10), lambda: math.nan), count=100)
    assert metrics["reward/masked_rate"] == 0.1
    with pytest.raises(RewardError, match=r"^11 of the newest 100 episodes failed"):
        score(build_failing_function(range(11), lambda: math.nan), count=100)


def test_a_function_that_fails_on_everything_stops_at_any_share(score):
    with pytest.raises(RewardError, match=r"nothing is left to use\).*raised ZeroDivisionError"):
        score(lambda trajectories: 1 / 0, max_failed_share=1)
    groups, _ = score(build_failing_function(range(7), lambda: math.nan), max_failed_share=1)
    assert groups[1].rewards == [4.5] * 4  # the others get the mean of the known values


@pytest.mark.parametrize("collect", [dict, set, "".join], ids=["dict", "set", "text"])
def test_a_result_without_an_order_of_values_is_refused(score, collect):
    """The keys of {0: 0.5, 1: 0.7} and the digits of "01" are numbers, one for each trajectory, but no rewards."""

    def score_by_seed(trajectories):
        seeds = [str(trajectory.seed) for trajectory in trajectories]
        return collect(zip(map(int, seeds), seeds, strict=True) if collect is dict else seeds)

    with pytest.raises(RewardError, match=r"gave (dict|set|str), expected a list of numbers"):
        score(score_by_seed)


def test_what_no_sample_is_to_blame_for_is_never_masked(score):
    with pytest.raises(RewardError, match="gave 1 values for 8 trajectories"):
        score(lambda trajectories: [1.0])

    def score_single(trajectories):
        return [1.0] if len(trajectories) == 1 else 1 / 0

    with pytest.raises(RewardError, match="though it takes each sample alone"):
        score(score_single)


def test_samples_that_pass_are_scored_together(score):
    def compute_ranks(trajectories):
        assert all(t.seed != 3 for t in trajectories)
        return [float(sum(o.seed < t.seed for o in trajectories)) for t in trajectories]

    groups, metrics = score(compute_ranks)
    assert [r.is_masked for r in groups[0].rollouts] == [False, False, False, True]
    assert groups[1].rewards == [1.5, 3.0, 2.5, 4.0]  # ranks 3, 4, 5, 6 among seven
    assert metrics["reward/masked_rate"] == 0.125


def test_without_a_limit_it_runs_where_it_is_called(score):
    threads = []

    def record_thread(trajectories):
        threads.append(threading.current_thread())
        return return_seeds(trajectories)

    score(record_thread, timeout_s=None)
    score(record_thread)
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()
