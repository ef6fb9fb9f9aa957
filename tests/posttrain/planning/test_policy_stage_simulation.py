"""Simulated schedules checked by hand: fixed durations, and one second a token unless a test says otherwise."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.planning import policy_stage_simulation
from posttrain.planning.policy_stage_simulation import simulate_run
from posttrain.planning.simulation_inputs import ClusterLayout, RolloutSizeDistributions
from rl_core.errors import SettingsError
from rl_core.settings.planning import ClusterRates, LogNormalSpread

TEN_TOKENS = LogNormalSpread(mean=10)


def build_rates(**changes):
    """Return rates of 10 tokens of 1 s each and an update of 4 s; everything else takes no time."""
    values = dict(
        step_seconds=1,
        row_seconds=0,
        update_seconds=4,
        token_seconds=0,
        load_seconds=0,
        tokens=TEN_TOKENS,
    )
    return ClusterRates(**{**values, **changes})


class SizeTable(RolloutSizeDistributions):
    """Sizes by the number of the group; other groups have 10 tokens and tools that take no time."""

    def __init__(self, tokens, tools=None):
        object.__setattr__(self, "table", (tokens, tools or {}))

    def draw_group(self, seed, number, count):
        tokens, tools = self.table
        rows = tokens.get(number, [10.0])
        return np.array([rows] * count, float), np.array(
            [tools.get(number, [0.0] * (len(rows) - 1))] * count, float
        )


def simulate(layout, iterations, sizes=None, **changes):
    options = dict(prompts=2, group_size=2, refill=False)
    return simulate_run(
        ClusterLayout(**{**options, **layout}), build_rates(**changes), sizes, iterations=iterations
    )


def test_synchronous_phases_take_turns():
    result = simulate({}, 3)
    assert result.end_seconds == [14, 28, 42] and result.learned_groups == [[0, 1], [2, 3], [4, 5]]
    assert result.tokens_by_staleness == [{0: 40.0}] * 3
    assert result.worker_share == pytest.approx(10 / 14) and result.trainer_share == pytest.approx(
        4 / 14
    )


def test_rollouts_continue_during_updates():
    """Overlap rollouts at 0-10, 10-20 and 20-30 with updates at 10-14 and 20-24.

    4 of the 10 tokens of each of 4 rollouts are one version behind.
    """
    result = simulate({"max_staleness": 1}, 4)
    assert result.end_seconds == [14, 24, 34, 44]
    assert result.tokens_by_staleness == [
        {0: 40.0},
        *[{1: 16.0, 0: 24.0}] * 3,
    ] and result.max_staleness_seen == [0, 1, 1, 1]
    assert result.iteration_s == 10 and result.staleness == pytest.approx(0.4)


def test_the_queue_ahead_of_the_trainer_is_bounded():
    """Let updates take 25 s: rollouts of 10-20 and 35-45 wait until 35 and 60, and no other rollout begins."""
    result = simulate({"max_staleness": 1}, 3, update_seconds=25)
    assert result.end_seconds == [35, 60, 85] and result.tokens_by_staleness[1:] == [{1: 40.0}] * 2
    assert result.worker_share == pytest.approx(
        10 / 25
    )  # runs at 0, 10, 35 and 60; the last one is counted


def test_a_stale_group_is_played_again_and_finally_awaited():
    """Let group 1 take 98 s, the others 10 s and updates 5 s: iteration i learns at 15 (i + 1) from group i + 1.

    Group 1 ends at 98 during iteration 6 (it began with version 0) and at 196 during iteration 13 (version 6). It then
    goes to the other worker, after the group that this worker plays until 205, and the trainer waits for it until 303.
    """
    layout = {"prompts": 1, "group_size": 1, "workers": 2, "max_staleness": 1}
    result = simulate(layout, 15, SizeTable({1: [98.0]}), update_seconds=5)
    assert result.learned_groups == [[0], *[[number] for number in range(2, 14)], [1], [14]]
    assert result.end_seconds == [*(15 * (i + 1) for i in range(13)), 308, 313]
    assert result.stale_groups == 2 and max(result.max_staleness_seen) == 1


def test_a_larger_bound_accepts_a_group_that_a_smaller_one_plays_again():
    """Let iteration i learn from 10 (i + 1) on; group 1 arrives at 98, during the ninth iteration after the first."""
    layout = {"prompts": 1, "group_size": 1, "workers": 2, "max_staleness": 9}
    result = simulate(layout, 10, SizeTable({1: [98.0]}), update_seconds=5)
    assert result.learned_groups[9] == [1] and result.end_seconds == [
        *(15 + 10 * i for i in range(9)),
        103,
    ]
    assert result.stale_groups == 0 and result.max_staleness_seen == [0, *[1] * 8, 9]


def test_dropped_rollouts_restart_with_new_weights():
    """Restart at 14 the run that began at 10: an iteration takes as long as a synchronous one."""
    result = simulate({"max_staleness": 1, "partial": "drop"}, 3)
    assert (
        result.end_seconds == [14, 28, 42]
        and result.tokens_by_staleness == [{0: 40.0}] * 3
        and result.dropped_rollouts == 8
    )


def test_rows_slow_a_step_and_slots_bound_them():
    """Decode ten tokens of two rows at 2 s and ten of one row at 1.5 s; with one slot, 30 tokens of one row."""
    sizes = SizeTable({0: [10.0], 1: [20.0]})
    assert simulate({"group_size": 1}, 1, sizes, row_seconds=0.5).end_seconds == [20 + 15 + 4]
    assert simulate({"group_size": 1, "slots": 1}, 1, sizes, row_seconds=0.5).end_seconds == [
        30 * 1.5 + 4
    ]


def test_tools_are_waited_for_together_or_one_by_one():
    """Let group 0 answer at 15 and decode 30 more tokens, and group 1 answer at 30 and decode 10."""
    sizes = SizeTable({0: [10.0, 30.0], 1: [10.0, 10.0]}, {0: [5.0], 1: [20.0]})
    assert simulate({"group_size": 1}, 1, sizes).end_seconds == [45 + 4]
    assert simulate({"group_size": 1, "rejoin": "together"}, 1, sizes).end_seconds == [60 + 4]


def test_free_slots_wait_for_the_end_of_a_run_or_are_filled():
    """Play groups of 10 and 30 tokens: the first update learns from both at 30, or from groups 0 and 2 at 20."""
    layout, sizes = {"group_size": 1, "slots": 2, "max_staleness": 1}, SizeTable({1: [30.0]})
    assert simulate(layout, 1, sizes).learned_groups == [[0, 1]] and simulate(
        layout, 1, sizes
    ).end_seconds == [34]
    filled = simulate({**layout, "refill": True}, 1, sizes)
    assert filled.learned_groups == [[0, 2]] and filled.end_seconds == [24]


def test_groups_that_begin_together_finish_by_length_and_are_not_counted():
    """Play groups of 1 s, every eighth of 20 s, on two workers at bound 1.

    For 18 s one worker plays all groups that are learned from, and an iteration takes 3 s. The long group is stale at
    20, restarts, and is awaited until 41.
    """
    layout = {"prompts": 1, "group_size": 1, "workers": 2, "max_staleness": 1, "refill": True}
    sizes = SizeTable({number: [20.0 if number % 8 == 0 else 1.0] for number in range(80)})
    result = simulate(layout, 60, sizes, update_seconds=2)
    assert (
        result.end_seconds[:8] == [3, 6, 9, 12, 15, 18, 21, 43]
        and result.learned_groups[7] == [0]
        and result.warm_up == 6
    )
    assert result.iteration_s == (result.end_seconds[-1] - 18) / 54 > 4
    assert (
        policy_stage_simulation.count_warm_up_iterations(0) == 2
        and simulate({}, 5).warm_up == 2
        and simulate({"max_staleness": 4}, 5).warm_up == 4
    )


def test_busy_seconds_are_limited_to_the_counted_interval():
    """Count from 24, amid a rollout, to 62.

    Rollouts are at 0-10, 10-20, 20-50, 50-60 and updates at 10-14, 20-24, 50-62.
    """
    layout = {"prompts": 1, "group_size": 1, "max_staleness": 1}
    result = simulate(layout, 3, SizeTable({2: [30.0]}), update_seconds=0, token_seconds=0.4)
    assert result.end_seconds == pytest.approx(
        [14, 24, 62]
    ) and result.worker_share == pytest.approx(36 / 38)


def test_weights_that_arrive_while_a_prompt_is_read_are_taken_before_the_first_token():
    """Read a prompt at 0-3 and decode at 3-13; read the next at 13-16, while version 1 arrives at 15."""
    result = simulate(
        {"prompts": 1, "group_size": 1, "max_staleness": 1}, 2, turn_seconds=3, update_seconds=2
    )
    assert result.end_seconds == [15, 28] and result.tokens_by_staleness == [
        {0: 10.0},
        {1: 0.0, 0: 10.0},
    ]


def test_sequences_that_continue_together_cost_a_pause_and_their_turns():
    """Begin four sequences in 3 s, whose turns end at 13; two continue at 15 and pause with the other two at 18."""
    sizes = SizeTable({0: [10.0, 10.0], 1: [10.0, 10.0]}, {0: [2.0], 1: [5.0]})
    result = simulate({}, 1, sizes, join_seconds=1, turn_seconds=0.5, update_seconds=0)
    assert result.end_seconds == [18 + 1 + 2 * 0.5 + 10]


def test_workers_share_tasks_and_trainers_share_tokens():
    """Share 3 groups among two workers (20 s), 60 tokens among 3 trainers (20 s), and two switches of 1 s."""
    result = simulate(
        {"prompts": 3, "workers": 2, "trainers": 3}, 2, token_seconds=1, update_seconds=0
    )
    assert result.end_seconds == [40, 80]
    same = {"prompts": 3, "workers": 2, "trainers": 2, "shares_gpus": True}
    assert simulate(same, 2, token_seconds=1, update_seconds=0, switch_seconds=1).end_seconds == [
        51,
        103,
    ]


def test_weights_take_time_on_both_sides():
    """Add up 3 + 2 + 10 + 4 in a synchronous run.

    In an asynchronous run the worker loads weights between steps while the trainer publishes the next ones.
    """
    assert simulate({}, 2, publish_seconds=3, load_seconds=2).end_seconds == [19, 38]
    assert simulate({"max_staleness": 1}, 4, publish_seconds=3, load_seconds=2).iteration_s == 12


def test_processes_on_one_core_gain_nothing():
    result = simulate({"max_staleness": 1, "cores": 1}, 12)
    assert result.iteration_s == pytest.approx(14, rel=0.01)
    assert simulate({"max_staleness": 1, "cores": 2}, 12).iteration_s == pytest.approx(10, rel=0.01)


def test_processes_that_compute_together_slow_each_other():
    """Take 14 s in turns, where nothing runs next to a phase.

    Asynchronous: the 10 s of rollouts that run next to the update of 5 s take 5 s for every 4.
    """
    crowded = {"cores": 2, "crowding": (1.0, 1.25)}
    assert simulate(crowded, 2).end_seconds == pytest.approx([14, 28])
    assert simulate({"max_staleness": 1, **crowded}, 12).iteration_s == pytest.approx(11, rel=0.01)


def test_more_processes_than_cores_take_turns_and_lose_by_that():
    """Run four workers of 10 s on two cores: 20 s, or 30 s if four together take three times as long as one alone."""
    layout = {"prompts": 4, "workers": 4, "tasks_each": 1, "cores": 2}
    assert simulate(layout, 2).end_seconds == pytest.approx([24, 48], rel=0.01)
    assert simulate({**layout, "crowding": (1.0, 1.0, 2.0, 3.0)}, 2).end_seconds == pytest.approx(
        [34, 68], rel=0.01
    )
    # Eight together were not measured: twice as long as four, since they share the cores in the same way.
    eight = {**layout, "prompts": 8, "workers": 8, "crowding": (1.0, 1.0, 2.0, 3.0)}
    assert simulate(eight, 1).end_seconds == pytest.approx([64], rel=0.01)


def test_calls_and_checks_take_time():
    """Load weights in 2 s during a check of 5 s, then run two tasks with 1 s a call and 0.5 s a group, then 4 s."""
    costs = {"load_seconds": 2, "verify_seconds": 5, "call_seconds": 1, "group_seconds": 0.5}
    assert simulate({"workers": 2, "tasks_each": 1}, 1, **costs).end_seconds == [5 + 10 + 1.5 + 4]
    asynchronous = simulate({"max_staleness": 1}, 3, publish_seconds=1, **costs)
    # Asynchronous: groups are handed out after the check, at 6; two of them are received in 1 s.
    assert asynchronous.end_seconds[0] == 1 + 5 + 10 + 1 + 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 4), st.integers(1, 3))
def test_without_variance_the_shorter_phase_is_hidden_and_nothing_else(
    tokens, update, staleness, workers
):
    """Expect the speed-up (R + U) / max(R, U): 1 if one phase takes no time, never above 2."""
    changes = {"tokens": LogNormalSpread(mean=tokens), "update_seconds": update}
    layout = {"prompts": 6, "workers": workers, "tasks_each": 1}
    asynchronous, synchronous = (
        simulate({**layout, "max_staleness": staleness}, 12, **changes),
        simulate(layout, 4, **changes),
    )
    assert synchronous.iteration_s / asynchronous.iteration_s == pytest.approx(
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
    """Run 12 iterations of 4 groups, with bounds beyond the iterations and more workers than groups."""
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
    result = simulate_run(layout, build_rates(row_seconds=0.1), sizes, iterations=12, seed=seed)
    learned = [number for numbers in result.learned_groups for number in numbers]
    assert len(learned) == len(set(learned)) == 48 and max(learned) < 4 * (12 + staleness)
    assert (
        max(result.max_staleness_seen) <= staleness
        and max(age for ages in result.tokens_by_staleness for age in ages) <= staleness
    )
    for numbers, ages in zip(result.learned_groups, result.tokens_by_staleness, strict=True):
        played = sum(sizes.draw_group(seed, number, 2)[0].sum() for number in numbers)
        assert sum(ages.values()) == pytest.approx(played)
    assert 0 < result.trainer_share <= 1 + 1e-9 and 0 <= result.worker_share <= 1 + 1e-9
    assert all(
        after - before >= 4 - 1e-9 for before, after in pairwise([0.0, *result.end_seconds])
    )  # an update takes 4
    repeated = simulate_run(layout, build_rates(row_seconds=0.1), sizes, iterations=12, seed=seed)
    assert repeated.end_seconds == result.end_seconds


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_an_iteration_takes_as_long_as_the_slower_side(trainers, workers, slots, bound):
    """Train at 0.5 s a token over the trainers and decode rollouts of 10 tokens at 1 s a step and 0.25 s a row.

    At a bound of 3 or more neither side waits for the other; below, an iteration takes no less time.
    """
    layout = {
        "prompts": 12,
        "group_size": 1,
        "workers": workers,
        "trainers": trainers,
        "slots": slots,
        "refill": True,
    }
    result = simulate(
        {**layout, "max_staleness": bound},
        40,
        row_seconds=0.25,
        update_seconds=0,
        token_seconds=0.5,
    )
    training = 12 * 10 * 0.5 / trainers
    playing = 12 * 10 * (1 + 0.25 * slots) / (slots * workers)
    assert result.iteration_s >= max(training, playing) - 1e-6
    if bound == 3:
        assert result.iteration_s == pytest.approx(max(training, playing), rel=0.02)


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


def test_the_schedule_matches_the_rollout_workers():
    from rl_core.rollout_workers import async_worker_group, worker_group

    assert (
        policy_stage_simulation.MAX_STALE_RESTARTS == async_worker_group.MAX_STALE_PLAYS
        and ClusterLayout(prompts=1, group_size=1).tasks_each == worker_group.BATCHES_PER_WORKER
    )
    for count, workers in ((5, 1), (5, 2), (16, 3), (2, 4)):
        assert policy_stage_simulation._split_into_tasks(
            list(range(count)), workers, worker_group.BATCHES_PER_WORKER
        ) == worker_group._split_batches(count, workers)


def test_impossible_runs_are_refused(monkeypatch):
    with pytest.raises(SettingsError, match="workers: 0 must be at least 1"):
        simulate({"workers": 0}, 1)
    with pytest.raises(
        SettingsError, match="shares_gpus: rollouts next to updates need separate GPUs"
    ):
        simulate({"shares_gpus": True, "max_staleness": 1}, 1)
    with pytest.raises(SettingsError, match="rollouts have to take some time"):
        build_rates(tokens=LogNormalSpread())
    with pytest.raises(SettingsError, match="iterations: 0"):
        simulate({}, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SettingsError, match=r"needs the package simpy: python -m posttrain.install --extras plan"
    ):
        simulate({}, 1)


def test_free_slots_are_filled_up_to_the_bound():
    """Begin 4 groups together, of which two wait for the update; two more begin at 14, 4 s before version 2."""
    result = simulate({"max_staleness": 1, "refill": True}, 3)
    assert result.end_seconds == [14, 18, 28] and result.tokens_by_staleness == [
        {0: 40.0},
        {1: 40.0},
        {1: 16.0, 0: 24.0},
    ]


@pytest.mark.timeout(30)
def test_a_step_far_shorter_than_the_clock_reading_still_ends():
    """Take updates of 10,000 s: the clock rounds to 7e-12 s and more, which are tokens at 0.1 us each."""
    spread = LogNormalSpread(mean=1000, sigma=1)
    layout = {"max_staleness": 1, "prompts": 4, "refill": True}
    result = simulate(
        layout, 30, tokens=spread, step_seconds=1e-7, row_seconds=1e-8, update_seconds=1e4
    )
    assert result.end_seconds == pytest.approx([1e4 * (i + 1) for i in range(30)], abs=1)


@pytest.mark.timeout(30)
def test_slices_of_a_core_add_up_to_the_whole():
    """Decode 32,768 tokens of 10 ms, with rounding of 0.01: the remainder of the last slice is no token."""
    for tokens in (9, 1000, 20_000, 32_768):
        result = simulate({"cores": 1}, 2, tokens=LogNormalSpread(mean=tokens), step_seconds=0.01)
        assert result.end_seconds == pytest.approx([tokens * 0.01 + 4, 2 * (tokens * 0.01 + 4)])


def test_dropped_rollouts_queue_behind_those_that_the_worker_has():
    """Play three groups on one slot: group 1 has 4 of 10 tokens when version 1 arrives, and waits for group 2."""
    layout = {
        "prompts": 1,
        "group_size": 1,
        "slots": 1,
        "max_staleness": 2,
        "refill": True,
        "partial": "drop",
    }
    assert simulate(layout, 2).learned_groups == [[0], [2]] and simulate(layout, 2).end_seconds == [
        14,
        28,
    ]
