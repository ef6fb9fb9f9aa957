"""Episodes whose environment fails: left out, counted, stored, limited, and replayed."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from helpers.typed_episodes import Looking, LookThenAnswer, Renderer, Typist

from rl_core.environments.environment import Episode, Step
from rl_core.environments.failed_episodes import (
    EpisodeFailureMonitor,
    FailedEpisode,
    format_error_trace,
)
from rl_core.errors import DataError, EnvironmentFault
from rl_core.inference.sampling import RolloutSequence
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.replay import replay_episode
from rl_core.rollouts.rollout_files import (
    MAX_FAILED_EPISODES,
    EpisodeName,
    FailedEpisodeFile,
    read_failed_episodes,
)
from rl_core.settings import SamplingSettings
from rl_core.types import Message, StopReason, Trajectory, Turn

BAD = "message {'role': 'tool'} has no role, or no text as its content"


class BreakingEpisode(LookThenAnswer):
    """An episode that raises at the action 'X', after any number of looks."""

    def act(self, text: str) -> Step:
        if text == "X":
            raise KeyError("cell")
        if text == "N":
            return Step(terminated=True, reward=math.nan)
        if text == "M":
            return Step([{"role": "tool"}])  # type: ignore[typeddict-item]
        return super().act(text)


class BreakingEnvironment(Looking):
    blocking = False

    def episode(self, seed: int, level: str) -> Episode:
        if seed == 13:
            raise OSError("no such grid")
        return BreakingEpisode(seed, level)


def build_script_by_sample(*scripts: list[str]):
    """Build a script that picks one of these per sequence, in playing order."""
    order: dict[int, int] = {}

    def script(sequence: RolloutSequence, turn: int) -> str:
        number = order.setdefault(id(sequence), len(order))
        return scripts[number % len(scripts)][turn]

    return script


def play(script, requests, group_size=3, **options):
    failures = EpisodeFailureMonitor(options.pop("max_failed_share", 0.1))
    stored: list[FailedEpisode] = []
    failures.store_episode = lambda episode: stored.append(episode) or "look"
    groups = collect_rollouts(
        BreakingEnvironment(),
        Typist(script),
        Renderer(),
        requests,
        group_size=group_size,
        sampling=SamplingSettings(**options),
        seed=0,
        failures=failures,
    )
    return groups, failures, stored


@pytest.mark.parametrize(
    ("fatal", "error"), [("X", "KeyError: 'cell'"), ("M", f"ValueError: {BAD}")]
)
def test_failed_samples_are_left_out_of_their_groups_and_stored(fatal: str, error: str) -> None:
    script = build_script_by_sample(["A"], ["L", fatal], ["L", "B"])
    groups, failures, stored = play(script, [EpisodeRequest("easy", 1), EpisodeRequest("hard", 2)])
    assert [[rollout.trajectory.sample for rollout in group.rollouts] for group in groups] == [
        [0, 2],
        [0, 2],
    ]
    assert [group.rewards for group in groups] == [[1.0, -0.25]] * 2
    assert (
        failures.take_counts() == (2, 6)
        and failures.take_counts() == (0, 0)
        and failures.total == 2
    )
    assert [(e.trajectory.level, e.trajectory.seed, e.trajectory.sample) for e in stored] == [
        ("easy", 1, 1),
        ("hard", 2, 1),
    ]
    first = stored[0]
    assert (first.failed_in, first.error) == ("step 2 of the environment", error)
    assert [turn.action for turn in first.trajectory.turns] == ["L", fatal]
    assert first.trajectory.turns[0].observation == "O\nP" and first.messages[1]["content"] == "Q1"
    assert first.trajectory.stop_reason == StopReason.FAILED and not first.trajectory.success
    assert error.partition(":")[0] in first.trace
    assert FailedEpisode.from_json(first.to_json()) == first


def test_an_episode_that_cannot_start_leaves_an_empty_group() -> None:
    groups, failures, stored = play(
        build_script_by_sample(["A"]), [EpisodeRequest("easy", 13), EpisodeRequest("easy", 1)], 2
    )
    assert [len(group.rollouts) for group in groups] == [0, 2]
    assert [(episode.failed_in, episode.error) for episode in stored] == [
        ("the environment's episode()", "OSError: no such grid")
    ] * 2
    assert failures.total == 2


def test_the_share_is_of_ten_collections_and_of_fifty_episodes_at_least() -> None:
    failures = EpisodeFailureMonitor(0.1)
    assert not failures.has_too_many(0, 8) and not failures.has_too_many(5, 8)  # 5 = 0.1 of 50
    assert failures.has_too_many(6, 8) and failures.has_too_many(3, 3)  # no episode is left
    for _ in range(9):
        failures.close_collection([], 20)
    # 0.1 of 180 + 40 = 22
    assert not failures.has_too_many(20, 40) and failures.has_too_many(23, 40)
    failures.close_collection([], 20)  # the tenth, so the first one leaves the window
    restored = EpisodeFailureMonitor(0.1)
    restored.load_state_dict(failures.state_dict())
    assert [restored.has_too_many(count, 40) for count in (22, 23)] == [
        False,
        True,
    ] and restored.total == 0
    strict, never = EpisodeFailureMonitor(0.0), EpisodeFailureMonitor(1.0)
    assert strict.has_too_many(1, 10_000) and not strict.has_too_many(0, 10)
    assert not never.has_too_many(9_999, 10_000) and never.has_too_many(10, 10)
    never.is_refill = True
    assert not never.has_too_many(10, 10)


def test_too_many_failures_stop_immediately_and_say_where_to_look() -> None:
    played: list[int] = []

    def script(sequence: RolloutSequence, turn: int) -> str:
        played.append(id(sequence))
        return "X"

    with pytest.raises(EnvironmentFault) as caught:
        play(script, [EpisodeRequest("easy", seed) for seed in range(20, 120)], 2)
    assert len(played) == 21  # 0.1 of 200 may fail
    assert str(caught.value) == (
        "21 of the newest 200 episodes failed (sampling.max_failed_share allows 0.1). The first of this round: "
        "environment 'looking', level 'easy', seed 20, sample 0: step 1 of the environment: KeyError: 'cell'; look"
    )
    assert "in act" in caught.value.__notes__[0]


def test_without_a_monitor_the_setting_limits_one_call() -> None:
    script = build_script_by_sample(["A"], ["X"])
    sampling = SamplingSettings(max_failed_share=0.0)
    with pytest.raises(EnvironmentFault, match="max_failed_share allows 0"):
        collect_rollouts(
            BreakingEnvironment(),
            Typist(script),
            Renderer(),
            [EpisodeRequest("easy", 1)],
            group_size=2,
            sampling=sampling,
            seed=0,
        )


def test_addresses_are_left_out_of_traces() -> None:
    try:
        raise ValueError(object())
    except ValueError as error:
        text = format_error_trace(error)
    assert "0x..." in text and "0x7" not in text


def build_failed_episode(
    iteration: int, seed: int, error: str = "KeyError: 'cell'"
) -> FailedEpisode:
    trajectory = Trajectory(
        environment="e", level="a/b", kind="", seed=seed, prompt="p", target="", turns=[Turn("X")]
    )
    return FailedEpisode(trajectory, [], "step 1 of the environment", error, iteration=iteration)


def test_a_resumed_run_writes_the_same_file_and_keeps_the_first_ones(tmp_path: Path) -> None:
    complete = FailedEpisodeFile(tmp_path / "whole.jsonl", "policy")
    cut = FailedEpisodeFile(tmp_path / "cut.jsonl", "policy")
    for iteration in range(4):
        for file in (complete, cut):
            assert str(
                file.append_episode(build_failed_episode(iteration, 10 + iteration), str(iteration))
            ) == (f"policy/{iteration}/a/b/{10 + iteration}/0")
    resumed = FailedEpisodeFile(tmp_path / "cut.jsonl", "policy")  # resumed after iteration 1
    for iteration in (2, 3):
        resumed.append_episode(build_failed_episode(iteration, 10 + iteration), str(iteration))
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    FailedEpisodeFile(tmp_path / "cut.jsonl", "policy")(
        3, []
    )  # nothing failed in the repeated iteration
    assert [name for name, _ in read_failed_episodes(tmp_path / "cut.jsonl")] == [
        f"policy/{iteration}/a/b/{10 + iteration}/0" for iteration in range(3)
    ]
    names = [
        complete.append_episode(build_failed_episode(9, seed), "9")
        for seed in range(MAX_FAILED_EPISODES)
    ]
    assert sum(name is not None for name in names) == MAX_FAILED_EPISODES - 4
    episodes = list(read_failed_episodes(tmp_path / "whole.jsonl"))
    assert (
        len(episodes) == MAX_FAILED_EPISODES
        and episodes[0][1].iteration == 0
        and episodes[0][1].trajectory.turns[0].action == "X"
    )


def test_names_of_episodes() -> None:
    name = EpisodeName("evaluate", "sft", "a/b", 7, 2)
    assert EpisodeName.parse(str(name)) == name
    for wrong in ("", "policy", "policy/3/easy/1", "policy/3/easy/x/0"):
        with pytest.raises(DataError, match="must read STAGE/ITERATION/LEVEL/SEED/SAMPLE"):
            EpisodeName.parse(wrong)


def record_episodes(*scripts: list[str]):
    groups, _, stored = play(
        build_script_by_sample(*scripts), [EpisodeRequest("easy", 2)], len(scripts)
    )
    return [rollout.trajectory for rollout in groups[0].rollouts], stored


def test_a_failed_episode_fails_again_in_the_same_way() -> None:
    _, stored = record_episodes(["A"], ["L", "X"], ["N"], ["L", "M"])
    for episode in stored:
        outcome = replay_episode(BreakingEnvironment(), episode)
        assert outcome.differences == [] and outcome.error == episode.error
    assert [episode.error for episode in stored] == [
        "KeyError: 'cell'",
        "step returned reward nan, not a finite reward",
        f"ValueError: {BAD}",
    ]
    outcome = replay_episode(Looking(), stored[0])  # an environment without the error
    assert outcome.differences == [
        "error in step 2 of the environment: recorded KeyError: 'cell', now none"
    ]


def test_an_episode_that_ended_well_is_compared_turn_by_turn() -> None:
    (complete, cut), _ = record_episodes(["L", "LX", "A"], ["L", "B"])
    assert replay_episode(BreakingEnvironment(), complete).differences == []
    assert replay_episode(BreakingEnvironment(), cut).differences == []

    class Moody(BreakingEpisode):
        def act(self, text: str) -> Step:
            step = super().act(text)
            if text == "LX":
                step.messages, step.is_error = [Message(role="tool", content="hm")], False
            step.success = None if step.success is None else not step.success
            return step

    class Moods(BreakingEnvironment):
        def episode(self, seed: int, level: str) -> Episode:
            return Moody(seed, level)

    assert replay_episode(Moods(), complete).differences == [
        "misuse in turn 2: recorded True, now False",
        "observation of turn 2: recorded OO\\nP, now hm",
        "success: recorded True, now False",
    ]

    class Ending(BreakingEpisode):
        def act(self, text: str) -> Step:
            return Step(terminated=True, reward=0.5)

    class Ends(BreakingEnvironment):
        def episode(self, seed: int, level: str) -> Episode:
            return Ending(seed, level)

    differences = replay_episode(Ends(), complete).differences
    assert "observation of turn 1: recorded OO\\nP, now none: the episode ended" in differences
    assert "reward of the environment: recorded 0.5, now 0.5" not in differences


class OpenEpisode(LookThenAnswer):
    """A game without tools that a limit loses, and that must be closed."""

    cut_reward = -1.0
    num_closed = 0

    def act(self, text: str) -> Step:
        step = super().act(text)
        step.tool_call = None
        return step

    def close(self) -> None:
        OpenEpisode.num_closed += 1
        raise OSError("closed twice")


class OpenGame(Looking):
    blocking = False

    def episode(self, seed: int, level: str) -> Episode:
        return OpenEpisode(seed, level)


@pytest.mark.parametrize(
    ("actions", "options", "reward"),
    [
        (["L", "L"], {"max_turns": 2}, -1.5),
        (["L", [33] * 9], {"max_completion_tokens": 9}, -1.25),  # cut off: never sent
        (["L"], {"max_completion_tokens": 4}, -1.25),  # sent; its observation had no room
        (["L", "A"], {}, 0.75),
    ],
)
def test_a_replay_of_a_cut_episode_earns_the_same_and_is_closed(
    monkeypatch, actions, options, reward
) -> None:
    groups = collect_rollouts(
        OpenGame(),
        Typist(lambda sequence, turn: actions[turn]),
        Renderer(),
        [EpisodeRequest("easy", 1)],
        group_size=1,
        sampling=SamplingSettings(**options),
        seed=0,
    )
    trajectory = groups[0].rollouts[0].trajectory
    assert trajectory.reward == reward
    monkeypatch.setattr(OpenEpisode, "num_closed", 0)
    outcome = replay_episode(OpenGame(), trajectory)
    assert outcome.differences == [] and OpenEpisode.num_closed == 1
    assert outcome.lines[-1] == "  its close failed: OSError: closed twice"


def test_a_reward_function_of_chance_is_named() -> None:
    (trajectory,), _ = record_episodes(["L", "A"])
    trajectory.rewards |= {"mine:score": 0.5, "mine:other": 2.0}
    trajectory.turns[0].action = "L\x1b[2J"
    lines = replay_episode(BreakingEnvironment(), trajectory).lines
    assert "turn 1: L\\x1b[2J" in lines  # escape sequences are escaped
    trajectory.turns[0].action = "L"
    rng = random.Random(1)
    functions = {
        "mine:score": lambda trajectories: [rng.random() for _ in trajectories],
        "mine:other": lambda trajectories: [t.rewards["task"] + 1.25 for t in trajectories],
    }
    differences = replay_episode(BreakingEnvironment(), trajectory, functions).differences
    assert differences[0].startswith("reward 'mine:score' gave 0.134") and differences[0].endswith(
        "for the same trajectory"
    )
    assert differences[1].startswith("reward 'mine:score': recorded 0.5, now 0.134")
    assert differences[2:] == []  # task -0.25 + 1 = 0.75, plus 1.25 is the recorded 2.0

    def fail(trajectories: list[Trajectory]) -> list[float]:
        raise ZeroDivisionError("none")

    failed_one = FailedEpisode(
        trajectory, [], "reward 'mine:score'", "raised ZeroDivisionError: none"
    )
    assert replay_episode(BreakingEnvironment(), failed_one, {"mine:score": fail}).differences == []
    nan = FailedEpisode(trajectory, [], "reward 'mine:score'", "gave nan, no finite number")
    assert (
        replay_episode(
            BreakingEnvironment(), nan, {"mine:score": lambda ts: [math.nan]}
        ).differences
        == []
    )
    fixed = replay_episode(
        BreakingEnvironment(), nan, {"mine:score": lambda ts: [0.25]}
    ).differences
    assert fixed == [
        "error of reward 'mine:score': recorded gave nan, no finite number, now gave 0.25"
    ]
