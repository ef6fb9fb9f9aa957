"""verifiers task sets: prompts and rewards of single-turn tasks, computed out of process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.adapters import stand_in

from rl_core.environments import make_environment
from rl_core.environments.environment import HELDOUT_START
from rl_core.errors import EnvironmentFault, SettingsError

fake = stand_in("verifiers")


def test_an_episode_by_hand(fake: None) -> None:
    environment = make_environment("verifiers", {"taskset": "adding_tasks", "heldout": 0.3})
    train, heldout = environment.seeds("train"), environment.seeds_of("heldout", "all")
    assert (
        len(train) + len(heldout) == 20
        and train.start == 0
        and heldout.start == HELDOUT_START
        and len(heldout) > 2
    )
    prompts = []
    for seed in (*train, *heldout):
        episode = environment.episode(seed, "all")
        system, user = episode.reset()
        assert system == {"role": "system", "content": "add"}
        assert user["content"] == f"{int(episode.target) - 1}+1?" == episode.prompt
        prompts.append(user["content"])
    assert sorted(prompts) == sorted(f"{number}+1?" for number in range(20)), (
        "every task is in one split, once"
    )
    step = environment.episode(3, "all").step(environment.episode(3, "all").target)
    assert (step.reward, step.success, step.terminated, step.is_error) == (1.0, True, True, False)
    assert step.info == {
        "reward": 1.0,
        "rewards": {"right": 1.0},
        "metrics": {"length": float(len(step.answer))},
    }
    step = environment.episode(3, "all").step("many")
    assert (step.reward, step.success, step.terminated) == (0.0, False, True)
    with pytest.raises(
        SettingsError, match=f"the train set of this task set has {len(train)} tasks"
    ):
        environment.episode(len(train), "all")
    assert "verifiers" not in sys.modules, "the package stays out of this process"


def test_rewards_that_hang_or_raise_earn_nothing(
    fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("JUDGE_KEY", "y")
    options = {
        "taskset": "adding_tasks:Adding",
        "config": {"count": 40},
        "timeout_s": 1.0,
        "workers": 1,
    }
    environment = make_environment("verifiers", {**options, "pass_variables": ["JUDGE_KEY"]})
    for reply, trouble in (
        ("hang", "scoring timed out"),
        ("boom", "scoring failed: RuntimeError: boom"),
    ):
        step = environment.episode(1, "all").step(reply)
        assert (step.reward, step.success, step.is_error) == (
            0.0,
            False,
            True,
        ) and trouble in step.info["scoring"]
    assert environment.episode(1, "all").step("variable").reward == 2.0, (
        "the judge's key, and no other secret"
    )


def test_prompts_of_several_messages(fake: None) -> None:
    episode = make_environment(
        "verifiers", {"taskset": "adding_tasks:Talking", "heldout": 0.5}
    ).episode(1, "all")
    prompt = f"{int(episode.target) - 1}+1?"
    assert episode.reset() == [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": prompt},
    ]
    assert episode.step(episode.target).reward == 1.0


def test_equal_prompts_are_never_in_both_splits(fake: None) -> None:
    with pytest.raises(
        SettingsError, match="of the 20 tasks of 'adding_tasks:Repeating' none is left for"
    ):
        make_environment("verifiers", {"taskset": "adding_tasks:Repeating", "heldout": 0.5}).seeds(
            "train"
        )


def test_a_task_set_in_another_order_in_each_child_is_noticed(fake: None) -> None:
    environment = make_environment(
        "verifiers", {"taskset": "adding_tasks:Shuffled", "config": {"count": 900}, "workers": 1}
    )
    assert environment.episode(1, "all").step(environment.episode(1, "all").target).reward == 1.0
    (child,) = environment._children._live_children
    os.kill(child._process.pid, signal.SIGKILL)
    assert (
        environment.episode(1, "all")
        .step("x")
        .info["scoring"]
        .startswith("scoring failed: a child process died")
    )
    with pytest.raises(EnvironmentFault, match=r"has a different task .* each time it is loaded"):
        environment.episode(1, "all").step("x")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            {"taskset": "no_such_tasks"},
            "options.taskset: 'no_such_tasks' cannot be used: ModuleNotFoundError",
        ),
        ({"taskset": "adding_tasks:Adder2"}, "AttributeError"),
        (
            {"taskset": "adding_tasks", "config": {"size": 3}},
            "extra inputs are not permitted: ['size']",
        ),
        ({"taskset": "adding_tasks:OfContainers"}, "its tasks need a container"),
        ({"taskset": "adding_tasks:OfSetups"}, "have a setup(), which needs a runtime"),
        ({"taskset": "adding_tasks:OfRuntimes"}, "its reward 'right' needs a runtime"),
        ({"taskset": "adding_tasks:OfUsers"}, "task 0: ValueError: it has no prompt"),
        ({"taskset": "adding_tasks:Empty"}, "the task set has no tasks"),
        ({"taskset": "adding_tasks", "max_tasks": 2, "heldout": 1e-6}, "none is left for heldout"),
        ({"taskset": "adding_tasks", "heldout": 1.0}, "options.heldout: 1.0"),
        ({}, "options.taskset: environment 'verifiers' needs it"),
    ],
)
def test_what_cannot_be_played_is_refused(fake: None, options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_environment("verifiers", options).seeds("train")
    assert part in str(caught.value)


REAL = """
import verifiers.v1 as vf
__all__ = ["Doubling"]

class Data(vf.TaskData):
    answer: str = ""

class Doubler(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.messages[-1].content)

class Config(vf.TasksetConfig):
    count: int = 4

class Doubling(vf.Taskset[Doubler, Config]):
    def load(self):
        for number in range(self.config.count):
            yield Doubler(Data(prompt=f"2 * {number}?", answer=str(2 * number)), self.config.task)
"""


def test_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "doubling_tasks.py").write_text(REAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = make_environment(
        "verifiers", {"taskset": "doubling_tasks", "config": {"count": 30}, "success_at": 2.0}
    )
    episode = environment.episode(4, "all")
    number = int(episode.reset()[0]["content"].removeprefix("2 * ").removesuffix("?"))
    step = episode.step(str(2 * number))
    assert (step.reward, step.success) == (2.0, True)
    assert step.info["rewards"] == {"right": 1.0} and step.info["metrics"]["length"] == len(
        str(2 * number)
    )
    assert environment.episode(4, "all").step("x").reward == 0.0
    with pytest.raises(SettingsError, match="cannot be used"):
        make_environment("verifiers", {"taskset": "doubling_tasks", "config": {"cuont": 3}}).seeds(
            "train"
        )
