"""reasoning-gym tasks: whitelisted, split by what they ask, scored out of process."""

from __future__ import annotations

import sys

import pytest
from helpers.adapters import stand_in

from rl_core.environments import make_environment
from rl_core.environments.environment import HELDOUT_START
from rl_core.environments.question_episodes import read_tagged_answer
from rl_core.environments.reasoning_gym_child import draw_item
from rl_core.environments.reasoning_gym_tasks import TASKS
from rl_core.errors import EnvironmentFault, SettingsError

fake = stand_in("reasoning_gym")


def begun(environment: object, seed: int, level: str = "default") -> object:
    episode = environment.episode(seed, level)
    episode.reset()
    return episode


def test_an_episode_by_hand(fake: None) -> None:
    environment = make_environment("reasoning_gym", {"tasks": ["chain_sum"], "success_at": 0.9})
    episode = environment.episode(3, "default")
    system, user = episode.reset()
    assert system["role"] == "system" and "answer X" in system["content"]
    assert (
        user == {"role": "user", "content": f"chain_sum of {episode.target} in 3?"}
        and episode.kind == "chain_sum"
    )
    step = episode.step("I do not know")
    assert step.is_error and not step.terminated and "no answer" in step.messages[0]["content"]
    step = episode.step(f"so\nanswer {episode.target}")
    assert (step.reward, step.success, step.terminated, step.answer) == (
        1.0,
        True,
        True,
        episode.target,
    )
    rewards = {
        f"<answer>\n{episode.target} \n</answer> said": 1.0,
        f"answer about {episode.target}": 0.5,
        "answer x": 0.0,
    }
    for reply, reward in rewards.items():
        step = begun(environment, 3).step(reply)
        assert (step.reward, step.success, step.is_error) == (reward, reward == 1.0, False)
    assert "reasoning_gym" not in sys.modules, "the package stays out of this process"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1\n2</answer>", "1\n2"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("<think><answer>1</answer></think>answer 3", "3"),
        ("answer 3\nor so", None),
        ("<answer>3", None),
    ],
)
def test_reading_answers(text: str, answer: str | None) -> None:
    assert read_tagged_answer(text) == answer


def test_training_and_heldout_never_share_a_question(fake: None) -> None:
    """5,000 possible questions, 400 drawn for each split: without a split by question, some would meet."""
    tasks = {"chain_sum": {}}
    train, heldout = (
        {
            draw_item(tasks, f"default/{seed}", is_heldout, 0.2)["question"]
            for seed in range(start, start + 400)
        }
        for is_heldout, start in ((False, 0), (True, HELDOUT_START))
    )
    assert len(train) > 350 and len(heldout) > 300 and not train & heldout
    share = (
        sum(
            draw_item(tasks, f"default/{seed}", False, 1e-9)["question"] in heldout
            for seed in range(2000)
        )
        / 2000
    )
    assert 0.02 < share < 0.2, "some of what is held out would have been asked"


def test_the_same_seed_is_the_same_question(fake: None) -> None:
    options = {
        "levels": {
            "easy": {"chain_sum": {"max_terms": 2}, "lcm": {}},
            "hard": {"chain_sum": {"max_terms": 9}},
        }
    }
    one, two = (
        make_environment("reasoning_gym", options),
        make_environment("reasoning_gym", options),
    )
    assert one.levels == ("easy", "hard")
    asked = [begun(one, seed, "easy").prompt for seed in range(12)]
    assert asked == [begun(two, seed, "easy").prompt for seed in range(12)]
    assert {prompt.split()[0] for prompt in asked} == {"chain_sum", "lcm"}
    assert {prompt.split()[-1] for prompt in asked if prompt.startswith("chain")} == {"2?"}
    assert begun(one, 0, "hard").prompt.endswith("in 9?")


def test_scorers_that_run_what_the_model_wrote(fake: None) -> None:
    """They may hang, end the process or raise: the answer earns 0, and the next one is scored."""
    environment = make_environment(
        "reasoning_gym", {"tasks": ["countdown"], "timeout_s": 1.0, "workers": 1}
    )
    for reply, trouble in (
        ("9**9**9**9", "scoring timed out: no answer within 1 s"),
        ("os._exit(3)", "died (exit status 3)"),
        ("1/0", "scoring failed: ZeroDivisionError"),
    ):
        step = begun(environment, 5).step(f"answer {reply}")
        assert (step.reward, step.success, step.terminated, step.is_error) == (
            0.0,
            False,
            True,
            True,
        )
        assert trouble in step.info["scoring"]
    episode = begun(environment, 5)
    step = episode.step(f"answer 1 + {episode.target} - 1")
    assert (step.reward, step.success, step.is_error, step.info) == (1.0, True, False, {})


def test_demonstrations_are_the_reference_answers(fake: None) -> None:
    environment = make_environment("reasoning_gym", {"tasks": ["chain_sum"]})
    row = environment.demonstration(2, "default")
    target = begun(environment, 2).target
    assert row.messages[-1] == {"role": "assistant", "content": f"answer {target}"} and row.success
    grid = make_environment(
        "reasoning_gym", {"tasks": ["sudoku"], "instructions": False}
    ).demonstration(2, "default")
    assert [message["role"] for message in grid.messages] == ["user", "assistant"]
    assert (
        grid.messages[-1]["content"].startswith("<answer>\n")
        and grid.messages[-1]["content"].count("\n") == 3
    )
    assert (
        make_environment("reasoning_gym", {"tasks": ["graph_color"]}).demonstration(2, "default")
        is None
    )


def test_a_task_with_too_few_questions(fake: None) -> None:
    environment = make_environment("reasoning_gym", {"tasks": ["coin_flip"]})
    splits = []
    for seed in (0, HELDOUT_START):
        try:
            splits.append(begun(environment, seed).prompt)
        except EnvironmentFault as error:
            assert "in 200 tries: it has too few distinct questions" in str(error)
    assert len(splits) == 1, "one question is of one split"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "options.tasks: name some tasks"),
        ({"tasks": ["lcm"], "levels": {"a": {"lcm": {}}}}, "options.tasks: name some tasks"),
        ({"tasks": []}, "level 'default' names no task"),
        (
            {"tasks": ["chain_sm"]},
            "'chain_sm' is not on the whitelist of tasks; did you mean 'chain_sum'?",
        ),
        ({"tasks": ["codeio"]}, "not on the whitelist"),
        ({"levels": {"easy": {"lcm": {"max_trms": 3}}}}, "options.levels.easy.lcm: TypeError"),
        ({"levels": {"easy": {"lcm": {"seed": 3}}}}, "seed and size are set by the environment"),
        ({"tasks": ["lcm"], "heldout": 0.0}, "options.heldout: 0.0"),
        ({"tasks": ["lcm"], "workers": 0}, "workers must be at least 1"),
    ],
)
def test_mistakes_are_named(fake: None, options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_environment("reasoning_gym", options)
    assert part in str(caught.value)


def test_with_the_package() -> None:
    pytest.importorskip("reasoning_gym")
    environment = make_environment(
        "reasoning_gym", {"tasks": ["chain_sum", "countdown", "mini_sudoku"]}
    )
    kinds = set()
    for seed in range(16):
        row = environment.demonstration(seed, "default")
        episode = begun(environment, seed)
        step = episode.step(row.messages[-1]["content"])
        assert (step.reward, step.success) == (1.0, True), (episode.kind, step)
        kinds.add(episode.kind)
    assert len(kinds) == 3
    from reasoning_gym.factory import DATASETS

    assert set(TASKS) <= set(DATASETS)
