"""One interface to gymnasium's three autoreset modes; bounds of actions, faults, and replayed episodes."""

import numpy as np
import pytest
from helpers.vector_worlds import Box, Discrete, Tuple, Walker, WalkerVector, walkers

from rl_core.errors import CheckpointError, EnvironmentFault, SettingsError
from rl_core.networks.actor_critic import ActionSpace
from rl_core.networks.vector_environment import (
    VectorEnvironment,
    compute_clipped_share,
    convert_action_space,
    convert_actions,
    count_observation_values,
    flatten_observations,
)


def build_environment(vector, seeds=None):
    numbers = iter(range(100) if seeds is None else seeds)
    environment = VectorEnvironment(vector, "Walk", lambda: next(numbers))
    environment.reset()
    return environment


def play_actions(environment, actions):
    """Return steps, and (return, length) of the episodes that ended, in order."""
    steps, ended = [], []
    for action in actions:
        step = environment.step(np.asarray(action))
        steps.append(step)
        ended += list(zip(*environment.pop_ended_episodes(step), strict=True))
    return steps, ended


RIGHT = [[1, 1]] * 12


@pytest.mark.parametrize("mode", ["Disabled", "SameStep", "NextStep"])
def test_every_mode_hands_over_the_observation_before_the_reset(mode):
    steps, ended = play_actions(build_environment(walkers(2, mode)), RIGHT)
    assert ended
    for before, step in zip([None, *steps[:-1]], steps, strict=True):
        over = step.terminated_N | step.truncated_N
        assert step.terminated_N[over].all(), "walking right reaches the goal within the limit"
        assert (step.after_ND[over, 0] >= 4).all(), (
            "where the episode ended, not where the next one begins"
        )
        assert (step.observations_ND[~over] == step.after_ND[~over]).all()
        if mode == "NextStep":
            assert (step.observations_ND[over] == step.after_ND[over]).all()
            if before is not None:  # the step after an end only resets: no action, no reward
                was_over = before.terminated_N | before.truncated_N
                assert (step.is_action_N == ~was_over).all() and (
                    step.rewards_N[was_over] == 0
                ).all()
                assert (step.observations_ND[was_over, 1] == 0).all()
        else:
            assert step.is_action_N.all() and (step.observations_ND[over, 1] == 0).all()


def test_the_modes_give_the_same_episodes():
    results = {}
    for mode in ("Disabled", "SameStep", "NextStep"):
        # one walker that always starts at the same place, so that seeds do not matter
        vector = WalkerVector([Walker()], mode)
        vector.walkers[0].reset(seed=0)
        vector.walkers[0].draw = type(
            "Fixed", (), {"integers": lambda *a: 0, "random": lambda *a: 0.0}
        )()
        vector.walkers[0].reset = lambda walker=vector.walkers[0], **_: Walker.reset(walker)
        results[mode] = play_actions(build_environment(vector), [[1]] * 13)[1]
    # from 0: rewards 1 + 2 + 3 + 4 in four steps; NextStep spends every fifth step on a reset
    assert results["Disabled"] == results["SameStep"] == [(10.0, 4)] * 3
    assert results["NextStep"] == [(10.0, 4)] * 2


def test_a_limit_truncates_and_does_not_terminate():
    steps, ended = play_actions(build_environment(walkers(1, goal=99, limit=3)), [[0]] * 3)
    assert steps[-1].truncated_N.all() and not steps[-1].terminated_N.any()
    assert [length for _, length in ended] == [3]


def test_each_episode_has_a_separate_seed():
    environment = build_environment(walkers(2), seeds=[7, 8, 9, 10, 11, 12, 13, 14])
    play_actions(environment, [[1, 1]] * 4)
    state = environment.state_dict()
    assert set(state["seeds"]) & {7, 8} == set() and all(
        seed in range(9, 15) for seed in state["seeds"]
    )


def test_a_continuous_action_outside_its_bounds_is_clipped_for_the_environment_alone():
    vector = walkers(1, continuous=True)
    environment = build_environment(vector)
    actions = np.array([[2.5]], np.float32)
    environment.step(actions)
    assert vector.walkers[0].taken == [np.array([1.0], np.float32)] and actions.tolist() == [[2.5]]
    space = environment.actions
    assert compute_clipped_share(np.array([[2.5], [0.3], [-1.0], [-1.01]]), space) == 0.5
    with pytest.raises(EnvironmentFault, match="an observation is not finite"):
        environment.step(np.array([[np.nan]]))


def test_unbounded_numbers_are_left_as_they_are():
    space = convert_action_space(Box(-np.inf, np.inf, (2, 2)))
    assert space == ActionSpace(
        "continuous", 4, low=(-np.inf,) * 4, high=(np.inf,) * 4, shape=(2, 2)
    )
    converted = convert_actions(np.array([[1e6, -1e6, 0, 1]], np.float32), space)
    assert converted.tolist() == [[[1e6, -1e6], [0, 1]]]


def test_discrete_actions_and_observations_count_from_their_start():
    vector = walkers(2, action_start=5)
    build_environment(vector).step(np.array([0, 1]))
    assert [walker.taken[0].item() for walker in vector.walkers] == [5, 6]
    assert count_observation_values(Discrete(3)) == 3
    assert flatten_observations(np.array([6, 5]), Discrete(3, start=5)).tolist() == [
        [0, 1, 0],
        [1, 0, 0],
    ]


def test_other_spaces_are_refused_by_name():
    for space in (Tuple(), Box(0, 1, (2,), np.int64), Box(0, 1, (0,))):
        with pytest.raises(
            SettingsError,
            match=r"environment: actions are .*; a network acts in Discrete, or in Box",
        ):
            convert_action_space(space)
    with pytest.raises(
        SettingsError, match=r"environment: observations are .*; a network reads Box or Discrete"
    ):
        count_observation_values(Tuple())


def test_an_environment_that_raises_is_named_with_its_seeds():
    environment = build_environment(walkers(2, fails_at=3), seeds=range(40, 60))
    with pytest.raises(EnvironmentFault) as error_info:
        play_actions(environment, [[0, 0]] * 5)
    assert str(error_info.value) == (
        "environment 'Walk' (seeds of the episodes: [40, 41], steps: [2, 2]) raised ValueError in step: the floor gave "
        "way. This iteration is discarded; fix the environment and run the same command again"
    )


@pytest.mark.parametrize("reward", [np.nan, np.inf, -1e30])
def test_a_reward_that_is_no_number_or_too_large_is_a_fault(reward):
    environment = build_environment(walkers(1))
    environment.inner.step = lambda actions: (np.zeros((1, 2)), [reward], [False], [False], {})
    with pytest.raises(EnvironmentFault, match=r"reward \[.*\] is not finite, or beyond"):
        environment.step(np.array([0]))


def test_same_step_without_final_observations_is_a_fault():
    environment = build_environment(walkers(1, "SameStep"))
    environment.inner.step = lambda actions: (np.zeros((1, 2)), [0.0], [True], [False], {})
    with pytest.raises(EnvironmentFault, match="infos contain no 'final_obs'"):
        environment.step(np.array([0]))


@pytest.mark.parametrize("played", range(9))
def test_a_restored_environment_continues_bit_for_bit(played):
    rng = np.random.default_rng(played)
    before, after = rng.integers(0, 2, (played, 3)), rng.integers(0, 2, (8, 3))
    uninterrupted = build_environment(walkers(3), seeds=range(1000))
    play_actions(uninterrupted, before)
    state = uninterrupted.state_dict()
    resumed = VectorEnvironment(walkers(3), "Walk", lambda: 0)
    resumed.load_state_dict(state)
    assert np.array_equal(resumed.observations_ND, uninterrupted.observations_ND)
    numbers = iter(range(max(state["seeds"]) + 1, 1000))  # the remaining seeds
    resumed._next_seed = lambda: next(numbers)
    expected, ended = play_actions(uninterrupted, after)
    actual, resumed_ended = play_actions(resumed, after)
    assert ended == resumed_ended
    for expected_step, actual_step in zip(expected, actual, strict=True):
        for name in ("observations_ND", "rewards_N", "terminated_N", "truncated_N", "after_ND"):
            assert np.array_equal(getattr(expected_step, name), getattr(actual_step, name)), name


def test_an_environment_that_seeds_do_not_decide_is_not_resumed():
    environment = build_environment(walkers(2, drifts=True))
    play_actions(environment, [[0, 1]] * 3)
    other = VectorEnvironment(walkers(2, drifts=True), "Walk", lambda: 0)
    other.inner.walkers[0].calls = 50
    with pytest.raises(
        CheckpointError, match="environment 'Walk' is not deterministic: the same seeds and actions"
    ):
        other.load_state_dict(environment.state_dict())
    with pytest.raises(CheckpointError, match="environments: 2 in the checkpoint, 3 now"):
        VectorEnvironment(walkers(3), "Walk", lambda: 0).load_state_dict(environment.state_dict())


def test_modes_that_reset_by_themselves_begin_new_episodes(caplog):
    environment = build_environment(walkers(2, "NextStep"))
    play_actions(environment, [[0, 1]] * 3)
    assert not environment.can_restore
    other = VectorEnvironment(walkers(2, "NextStep"), "Walk", lambda: 5)
    other.load_state_dict(environment.state_dict())
    assert "cannot be replayed: resumed with new ones" in caplog.text
    assert other.lengths_N.tolist() == [0, 0] and (other.observations_ND[:, 1] == 0).all()


def test_it_is_closed():
    environment = build_environment(walkers(2))
    environment.close()
    assert all(walker.closed for walker in environment.inner.walkers)
