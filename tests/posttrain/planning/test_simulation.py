"""Simulated schedules, worked by hand: deterministic durations, one second a token where nothing else is said."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.planning import simulation
from posttrain.planning.simulation import simulate_run
from posttrain.planning.simulation_inputs import ClusterLayout, RolloutSizeDistributions
from rl_core.errors import SettingsError
from rl_core.settings.planning import ClusterRates, LogNormalSpread

TEN = LogNormalSpread(mean=10)


def rates(**changes):
    """10 tokens of a second each, an update of 4 s, everything else in no time."""
    values = dict(
        step_seconds=1, row_seconds=0, update_seconds=4, token_seconds=0, load_seconds=0, tokens=TEN
    )
    return ClusterRates(**{**values, **changes})


class Table(RolloutSizeDistributions):
    """Sizes by the number of the group; 10 tokens, and tools of no time, elsewhere."""

    def __init__(self, tokens, tools=None):
        object.__setattr__(self, "table", (tokens, tools or {}))

    def draw_group(self, seed, number, count):
        tokens, tools = self.table
        rows = tokens.get(number, [10.0])
        return np.array([rows] * count, float), np.array(
            [tools.get(number, [0.0] * (len(rows) - 1))] * count, float
        )


def run(layout, iterations, sizes=None, **changes):
    options = dict(prompts=2, group_size=2, refill=False)
    return simulate_run(
        ClusterLayout(**{**options, **layout}), rates(**changes), sizes, iterations=iterations
    )


def test_synchronous_phases_take_turns():
    found = run({}, 3)
    assert found.end_seconds == [14, 28, 42] and found.learned_groups == [[0, 1], [2, 3], [4, 5]]
    assert found.tokens_by_staleness == [{0: 40.0}] * 3
    assert found.worker_share == pytest.approx(10 / 14) and found.trainer_share == pytest.approx(
        4 / 14
    )


def test_rollouts_go_on_during_updates():
    """Played 0-10, 10-20, 20-30; updates 10-14, 20-24: 4 of 10 tokens of each of 4 rollouts are a version behind."""
    found = run({"max_staleness": 1}, 4)
    assert found.end_seconds == [14, 24, 34, 44]
    assert found.tokens_by_staleness == [
        {0: 40.0},
        *[{1: 16.0, 0: 24.0}] * 3,
    ] and found.max_staleness_seen == [0, 1, 1, 1]
    assert found.iteration_s == 10 and found.staleness == pytest.approx(0.4)


def test_the_queue_ahead_of_the_trainer_is_bounded():
    """Updates of 25 s: what was played at 10-20 and 35-45 waits for 35 and 60, and nothing else is begun."""
    found = run({"max_staleness": 1}, 3, update_seconds=25)
    assert found.end_seconds == [35, 60, 85] and found.tokens_by_staleness[1:] == [{1: 40.0}] * 2
    assert found.worker_share == pytest.approx(
        10 / 25
    )  # runs at 0, 10, 35 and 60, of which the last is counted


def test_a_group_that_became_too_old_is_played_again_and_in_the_end_awaited():
    """Group 1 takes 98 s, the others 10, updates 5: iteration i learns at 15 (i + 1) from group i + 1.

    Group 1 ends at 98 under iteration 6 (begun with version 0), and at 196 under 13 (version 6); then it goes to the
    other worker, behind what that one plays until 205, and is awaited until 303.
    """
    layout = {"prompts": 1, "group_size": 1, "workers": 2, "max_staleness": 1}
    found = run(layout, 15, Table({1: [98.0]}), update_seconds=5)
    assert found.learned_groups == [[0], *[[number] for number in range(2, 14)], [1], [14]]
    assert found.end_seconds == [*(15 * (i + 1) for i in range(13)), 308, 313]
    assert found.stale_groups == 2 and max(found.max_staleness_seen) == 1


def test_a_larger_bound_takes_what_a_smaller_one_plays_again():
    """Iteration i learns from 10 (i + 1) on; group 1 arrives at 98, in the ninth after the first."""
    layout = {"prompts": 1, "group_size": 1, "workers": 2, "max_staleness": 9}
    found = run(layout, 10, Table({1: [98.0]}), update_seconds=5)
    assert found.learned_groups[9] == [1] and found.end_seconds == [
        *(15 + 10 * i for i in range(9)),
        103,
    ]
    assert found.stale_groups == 0 and found.max_staleness_seen == [0, *[1] * 8, 9]


def test_dropped_rollouts_begin_anew_with_new_weights():
    """The run that began at 10 is begun again at 14: an iteration takes as long as a synchronous one."""
    found = run({"max_staleness": 1, "partial": "drop"}, 3)
    assert (
        found.end_seconds == [14, 28, 42]
        and found.tokens_by_staleness == [{0: 40.0}] * 3
        and found.dropped_rollouts == 8
    )


def test_rows_slow_a_step_and_slots_bound_them():
    """Ten tokens of two rows at 2 s, ten of one row at 1.5 s; with one slot 30 tokens of one row."""
    sizes = Table({0: [10.0], 1: [20.0]})
    assert run({"group_size": 1}, 1, sizes, row_seconds=0.5).end_seconds == [20 + 15 + 4]
    assert run({"group_size": 1, "slots": 1}, 1, sizes, row_seconds=0.5).end_seconds == [
        30 * 1.5 + 4
    ]


def test_tools_are_waited_for_together_or_one_by_one():
    """Group 0 answers at 15 and decodes 30 tokens more; group 1 answers at 30 and decodes 10."""
    sizes = Table({0: [10.0, 30.0], 1: [10.0, 10.0]}, {0: [5.0], 1: [20.0]})
    assert run({"group_size": 1}, 1, sizes).end_seconds == [45 + 4]
    assert run({"group_size": 1, "rejoin": "together"}, 1, sizes).end_seconds == [60 + 4]


def test_free_slots_wait_for_the_end_of_a_run_or_are_filled():
    """Groups of 10 and 30 tokens: the first update learns from both at 30, or from groups 0 and 2 at 20."""
    layout, sizes = {"group_size": 1, "slots": 2, "max_staleness": 1}, Table({1: [30.0]})
    assert run(layout, 1, sizes).learned_groups == [[0, 1]] and run(
        layout, 1, sizes
    ).end_seconds == [34]
    filled = run({**layout, "refill": True}, 1, sizes)
    assert filled.learned_groups == [[0, 2]] and filled.end_seconds == [24]


def test_what_begins_at_once_ends_in_order_of_its_length_and_is_not_counted():
    """Bound 1, two workers, groups of 1 s and every eighth of 20 s: for 18 s one worker plays what is learned from.

    An iteration of that time takes 3 s; the long group is too old at 20, is begun again and waited for until 41.
    """
    layout = {"prompts": 1, "group_size": 1, "workers": 2, "max_staleness": 1, "refill": True}
    sizes = Table({number: [20.0 if number % 8 == 0 else 1.0] for number in range(80)})
    found = run(layout, 60, sizes, update_seconds=2)
    assert (
        found.end_seconds[:8] == [3, 6, 9, 12, 15, 18, 21, 43]
        and found.learned_groups[7] == [0]
        and found.warm_up == 6
    )
    assert found.iteration_s == (found.end_seconds[-1] - 18) / 54 > 4
    assert (
        simulation.count_warm_up_iterations(0) == 2
        and run({}, 5).warm_up == 2
        and run({"max_staleness": 4}, 5).warm_up == 4
    )


def test_busy_seconds_are_counted_up_to_the_ends_of_what_is_counted():
    """Played 0-10, 10-20, 20-50, 50-60; learned from 10-14, 20-24, 50-62. Counted from 24, amid a rollout, to 62."""
    layout = {"prompts": 1, "group_size": 1, "max_staleness": 1}
    found = run(layout, 3, Table({2: [30.0]}), update_seconds=0, token_seconds=0.4)
    assert found.end_seconds == pytest.approx([14, 24, 62]) and found.worker_share == pytest.approx(
        36 / 38
    )


def test_weights_that_arrive_while_a_prompt_is_read_are_taken_before_the_first_token():
    """Read 0-3, decoded 3-13; the next is read 13-16, and version 1 arrives at 15."""
    found = run(
        {"prompts": 1, "group_size": 1, "max_staleness": 1}, 2, turn_seconds=3, update_seconds=2
    )
    assert found.end_seconds == [15, 28] and found.tokens_by_staleness == [
        {0: 10.0},
        {1: 0.0, 0: 10.0},
    ]


def test_sequences_that_go_on_at_once_cost_a_pause_and_their_turns():
    """Four begin in 3 s and end their turns at 13; two go on at 15, and pause with the other two at 18; these end."""
    sizes = Table({0: [10.0, 10.0], 1: [10.0, 10.0]}, {0: [2.0], 1: [5.0]})
    found = run({}, 1, sizes, join_seconds=1, turn_seconds=0.5, update_seconds=0)
    assert found.end_seconds == [18 + 1 + 2 * 0.5 + 10]


def test_workers_share_tasks_and_trainers_share_tokens():
    """Two workers, tasks of one group each: 3 groups take 20 s; 60 tokens on 3 trainers 20 s; a change of 1 s twice."""
    found = run({"prompts": 3, "workers": 2, "trainers": 3}, 2, token_seconds=1, update_seconds=0)
    assert found.end_seconds == [40, 80]
    same = {"prompts": 3, "workers": 2, "trainers": 2, "shares_gpus": True}
    assert run(same, 2, token_seconds=1, update_seconds=0, switch_seconds=1).end_seconds == [
        51,
        103,
    ]


def test_weights_take_time_on_both_sides():
    """Synchronous: 3 + 2 + 10 + 4. Asynchronous: the worker loads between steps, the trainer publishes meanwhile."""
    assert run({}, 2, publish_seconds=3, load_seconds=2).end_seconds == [19, 38]
    assert run({"max_staleness": 1}, 4, publish_seconds=3, load_seconds=2).iteration_s == 12


def test_processes_on_one_core_gain_nothing():
    found = run({"max_staleness": 1, "cores": 1}, 12)
    assert found.iteration_s == pytest.approx(14, rel=0.01)
    assert run({"max_staleness": 1, "cores": 2}, 12).iteration_s == pytest.approx(10, rel=0.01)


def test_processes_that_compute_at_once_slow_each_other():
    """In turns nobody is beside: 14. Asynchronous: of 10 s of rollouts those beside the update of 5 s take 5 for 4."""
    crowded = {"cores": 2, "crowding": (1.0, 1.25)}
    assert run(crowded, 2).end_seconds == pytest.approx([14, 28])
    assert run({"max_staleness": 1, **crowded}, 12).iteration_s == pytest.approx(11, rel=0.01)


def test_more_processes_than_cores_take_turns_and_lose_by_that():
    """Four workers of 10 s on two cores: 20 s; 30 where four at once take three times as long as one alone."""
    layout = {"prompts": 4, "workers": 4, "tasks_each": 1, "cores": 2}
    assert run(layout, 2).end_seconds == pytest.approx([24, 48], rel=0.01)
    assert run({**layout, "crowding": (1.0, 1.0, 2.0, 3.0)}, 2).end_seconds == pytest.approx(
        [34, 68], rel=0.01
    )
    # of eight at once nothing was measured: as four, twice as long, since they share the cores in the same way
    eight = {**layout, "prompts": 8, "workers": 8, "crowding": (1.0, 1.0, 2.0, 3.0)}
    assert run(eight, 1).end_seconds == pytest.approx([64], rel=0.01)


def test_calls_and_checks_take_time():
    """Synchronous: weights of 2 s beside a check of 5, then two tasks with 1 s a call and 0.5 s a group, then 4."""
    more = {"load_seconds": 2, "verify_seconds": 5, "call_seconds": 1, "group_seconds": 0.5}
    assert run({"workers": 2, "tasks_each": 1}, 1, **more).end_seconds == [5 + 10 + 1.5 + 4]
    late = run({"max_staleness": 1}, 3, publish_seconds=1, **more)
    # asynchronous: groups are handed out after the check, at 6; two of them are taken in 1 s
    assert late.end_seconds[0] == 1 + 5 + 10 + 1 + 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 4), st.integers(1, 3))
def test_without_variance_the_shorter_phase_is_hidden_and_nothing_else(
    tokens, update, staleness, workers
):
    """Speed-up (R + U) / max(R, U): 1 where one phase takes no time, never above 2."""
    changes = {"tokens": LogNormalSpread(mean=tokens), "update_seconds": update}
    layout = {"prompts": 6, "workers": workers, "tasks_each": 1}
    late, turns = (
        run({**layout, "max_staleness": staleness}, 12, **changes),
        run(layout, 4, **changes),
    )
    assert turns.iteration_s / late.iteration_s == pytest.approx(
        (tokens + update) / max(tokens, update)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 2, 3, 13]),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["keep", "drop"]),
    st.sampled_from([0, 1.5]),
)
def test_every_group_is_learned_from_once_and_none_beyond_the_bound(
    seed, staleness, workers, refill, partial, sigma
):
    """12 iterations of 4 groups, so that there are bounds beyond the iterations and workers beyond the groups."""
    tokens, tools = LogNormalSpread(mean=10, sigma=sigma), LogNormalSpread(mean=9, sigma=sigma)
    sizes = RolloutSizeDistributions(turns=2, tokens=tokens, tools=tools)
    layout = ClusterLayout(
        prompts=4,
        group_size=2,
        workers=workers,
        slots=3,
        max_staleness=staleness,
        refill=refill,
        partial=partial,
    )
    found = simulate_run(layout, rates(row_seconds=0.1), sizes, iterations=12, seed=seed)
    learned = [number for numbers in found.learned_groups for number in numbers]
    assert len(learned) == len(set(learned)) == 48 and max(learned) < 4 * (12 + staleness)
    assert (
        max(found.max_staleness_seen) <= staleness
        and max(age for ages in found.tokens_by_staleness for age in ages) <= staleness
    )
    for numbers, ages in zip(found.learned_groups, found.tokens_by_staleness, strict=True):
        played = sum(sizes.draw_group(seed, number, 2)[0].sum() for number in numbers)
        assert sum(ages.values()) == pytest.approx(played)
    assert 0 < found.trainer_share <= 1 + 1e-9 and 0 <= found.worker_share <= 1 + 1e-9
    assert all(
        after - before >= 4 - 1e-9 for before, after in pairwise([0.0, *found.end_seconds])
    )  # an update takes 4
    again = simulate_run(layout, rates(row_seconds=0.1), sizes, iterations=12, seed=seed)
    assert again.end_seconds == found.end_seconds


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_iterations_are_those_of_the_slower_side(trainers, workers, slots, bound):
    """Equal rollouts of 10 tokens: training takes 0.5 s a token over the trainers, a step 1 s and 0.25 s a row.

    At a bound of 3 or more neither side waits for the other; below, an iteration takes no less.
    """
    layout = {
        "prompts": 12,
        "group_size": 1,
        "workers": workers,
        "trainers": trainers,
        "slots": slots,
        "refill": True,
    }
    found = run(
        {**layout, "max_staleness": bound},
        40,
        row_seconds=0.25,
        update_seconds=0,
        token_seconds=0.5,
    )
    training = 12 * 10 * 0.5 / trainers
    playing = 12 * 10 * (1 + 0.25 * slots) / (slots * workers)
    assert found.iteration_s >= max(training, playing) - 1e-6
    if bound == 3:
        assert found.iteration_s == pytest.approx(max(training, playing), rel=0.02)


def test_spreads_have_their_mean_and_their_limit():
    drawn = LogNormalSpread(mean=50, sigma=1).draw_values(np.random.default_rng(0), (100_000,))
    assert drawn.mean() == pytest.approx(50, rel=0.02) and np.log(drawn).std() == pytest.approx(
        1, rel=0.02
    )
    assert (
        LogNormalSpread(mean=50, sigma=1, most=60)
        .draw_values(np.random.default_rng(0), (1000,))
        .max()
        == 60
    )
    assert (
        LogNormalSpread().draw_values(np.random.default_rng(0), (2, 3)).tolist() == [[0.0] * 3] * 2
    )


def test_the_schedule_is_that_of_the_workers():
    from rl_core.rollout_workers import async_worker_group, worker_group

    assert (
        simulation.MAX_STALE_RESTARTS == async_worker_group.MAX_STALE_PLAYS
        and ClusterLayout(prompts=1, group_size=1).tasks_each == worker_group.BATCHES_PER_WORKER
    )
    for count, workers in ((5, 1), (5, 2), (16, 3), (2, 4)):
        assert simulation._split_into_tasks(
            list(range(count)), workers, worker_group.BATCHES_PER_WORKER
        ) == worker_group._split_batches(count, workers)


def test_runs_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(SettingsError, match="workers: 0 must be at least 1"):
        run({"workers": 0}, 1)
    with pytest.raises(
        SettingsError, match="shares_gpus: rollouts beside updates need GPUs of their own"
    ):
        run({"shares_gpus": True, "max_staleness": 1}, 1)
    with pytest.raises(SettingsError, match="rollouts have to take some time"):
        rates(tokens=LogNormalSpread())
    with pytest.raises(SettingsError, match="iterations: 0"):
        run({}, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SettingsError, match=r"needs the package simpy: pip install 'posttrain\[plan\]'"
    ):
        run({}, 1)


def test_free_slots_are_filled_up_to_the_bound():
    """4 groups begin at once, two of them wait for the update; at 14 two more begin, 4 s before version 2."""
    found = run({"max_staleness": 1, "refill": True}, 3)
    assert found.end_seconds == [14, 18, 28] and found.tokens_by_staleness == [
        {0: 40.0},
        {1: 40.0},
        {1: 16.0, 0: 24.0},
    ]


@pytest.mark.timeout(30)
def test_a_step_that_is_short_beside_the_clock_comes_to_its_end():
    """Updates of 10,000 s: the clock rounds to 7e-12 s and more, which are tokens at 0.1 us each."""
    spread = LogNormalSpread(mean=1000, sigma=1)
    layout = {"max_staleness": 1, "prompts": 4, "refill": True}
    found = run(layout, 30, tokens=spread, step_seconds=1e-7, row_seconds=1e-8, update_seconds=1e4)
    assert found.end_seconds == pytest.approx([1e4 * (i + 1) for i in range(30)], abs=1)


@pytest.mark.timeout(30)
def test_slices_of_a_core_add_up_to_the_whole():
    """32,768 tokens of 10 ms, and rounding of 0.01: what is left of the last slice is no token."""
    for tokens in (9, 1000, 20_000, 32_768):
        found = run({"cores": 1}, 2, tokens=LogNormalSpread(mean=tokens), step_seconds=0.01)
        assert found.end_seconds == pytest.approx([tokens * 0.01 + 4, 2 * (tokens * 0.01 + 4)])


def test_dropped_rollouts_queue_behind_those_that_the_worker_has():
    """One slot, three groups: group 1 has 4 of 10 tokens when version 1 arrives, and waits for group 2."""
    layout = {
        "prompts": 1,
        "group_size": 1,
        "slots": 1,
        "max_staleness": 2,
        "refill": True,
        "partial": "drop",
    }
    assert run(layout, 2).learned_groups == [[0], [2]] and run(layout, 2).end_seconds == [14, 28]
