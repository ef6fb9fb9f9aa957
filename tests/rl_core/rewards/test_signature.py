"""Reward functions: columns by name, TRL's signature, asynchronous ones, and functions in files."""

import asyncio

import pytest
from helpers.reward_rollouts import group, rollout, say

from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.user_function import RewardSignature
from rl_core.settings import RewardSettings


def build_group(rows):
    rollouts = []
    for seed, row in enumerate(rows):
        played = rollout([say(f"reply {seed}")], seed=seed, mask=[True] * (seed + 1))
        played.trajectory.row = row
        played.trajectory.policy_version = 7
        rollouts.append(played)
    return group(*rollouts)


ROWS = [
    {"prompt": "a", "answer": "reply 0", "level": 2},
    {"prompt": "b", "answer": "no", "level": 3, "hint": "h"},
]


def compute_raw_rewards(function, rows=ROWS):
    group = build_group(rows)
    options = RewardSettings(max_failed_share=0.0)
    RewardOrchestrator({"own": 1.0}, functions={"own": function}, options=options).score([group])
    return [each.trajectory.rewards["own"] for each in group.rollouts]


def test_columns_are_handed_over_by_name():
    def score_correctness(trajectories, answer, level, hint, factor=10):
        assert hint == [None, "h"]  # a row without the column
        right = [t.completion == target for t, target in zip(trajectories, answer, strict=True)]
        return [factor * lvl * ok for lvl, ok in zip(level, right, strict=True)]

    assert compute_raw_rewards(score_correctness) == [20.0, 0.0]

    def count_columns(trajectories, **columns):
        return [len(columns)] * len(trajectories)

    assert compute_raw_rewards(count_columns) == [4.0, 4.0]  # prompt, answer, level, hint


def test_trl_signature_is_called_as_trl_does():
    def grade(prompts, completions, completion_ids, answer, trainer_state, log_metric, **kwargs):
        assert (prompts, completions) == (["a", "b"], ["reply 0", "reply 1"])
        assert completion_ids == [[1], [1, 2]]
        assert trainer_state.global_step == 7
        assert sorted(kwargs) == ["hint", "level", "log_extra"]  # not `prompt`
        log_metric("seen", 4)
        return [
            1.0 if done == target else None
            for done, target in zip(completions, answer, strict=True)
        ]

    of_rows = build_group(ROWS)
    metrics = RewardOrchestrator({"own": 1.0}, functions={"own": grade}).score([of_rows])
    assert [played.reward for played in of_rows.rollouts] == [
        1.0,
        0.0,
    ]  # None = the function does not apply
    assert metrics["reward/own/skipped"] == 0.5
    assert metrics["reward/own/seen"] == 4.0


def test_conversational_prompts_make_conversational_completions():
    rows = [{"prompt": [{"role": "user", "content": "a"}]}]

    def grade(prompts, completions):
        assert prompts == [[{"role": "user", "content": "a"}]]
        assert completions == [[{"role": "assistant", "content": "reply 0"}]]
        return [0.5]

    assert compute_raw_rewards(grade, rows) == [0.5]


def test_asynchronous_functions_are_awaited():
    async def score_slowly(trajectories, level):
        await asyncio.sleep(0)
        return [float(number) for number in level]

    async def score_like_trl(completions, level, **kwargs):
        return await asyncio.gather(*(asyncio.sleep(0, float(number) + 1) for number in level))

    assert compute_raw_rewards(score_slowly) == [2.0, 3.0]
    assert compute_raw_rewards(score_like_trl) == [3.0, 4.0]


def test_a_none_of_a_user_function_is_no_number():
    with pytest.raises(RewardError, match="gave None, no finite number"):
        compute_raw_rewards(lambda trajectories: [1.0, None])


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (
            lambda trajectories, anwser: [],
            ("prompt", "answer"),
            "the column 'anwser', but .* did you mean 'answer'",
        ),
        (lambda completions, solution: [], ("prompt", "answer"), "the column 'solution'"),
        (lambda completions, environments: [], ("prompt",), "which only TRL's environments have"),
        (lambda trajectories, answer: [], (), "no rows of data"),
    ],
)
def test_a_column_that_no_row_has_is_refused_before_training(function, columns, message):
    rewards = RewardOrchestrator({"own": 1.0}, functions={"own": function})
    rewards.check_columns(None)  # not known before an episode is played
    with pytest.raises(SettingsError, match=message):
        rewards.check_columns(columns)


def test_signatures_that_take_no_trajectories_are_refused():
    with pytest.raises(SettingsError, match="first argument is the list of trajectories"):
        RewardSignature(lambda *, answer: [], "own")
    with pytest.raises(SettingsError, match="TRL's signature has `completions`"):
        RewardSignature(lambda rows, prompts: [], "own")


def test_a_function_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef two(trajectories):\n    return [2.0] * len(trajectories)\n"
    )
    monkeypatch.chdir(tmp_path)
    of_rows = build_group(ROWS)
    metrics = RewardOrchestrator({"mine.py:two": 0.5}).score([of_rows])
    assert [played.reward for played in of_rows.rollouts] == [1.0, 1.0]
    assert metrics["reward/mine.py.two"] == 2.0
    with pytest.raises(SettingsError, match=r"no function 'too' there; did you mean 'two'"):
        RewardOrchestrator({"mine.py:too": 1.0})
    with pytest.raises(SettingsError, match=r"no such file: .*other.py; paths are relative"):
        RewardOrchestrator({"other.py:two": 1.0})
    with pytest.raises(SettingsError, match=r"'mine.py:calls' is a list, expected a function"):
        RewardOrchestrator({"mine.py:calls": 1.0})
