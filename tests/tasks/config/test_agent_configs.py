"""Pipelines whose environment is the user's agent: what is checked and refused before anything runs."""

import json

import pytest

from rl_core.settings import PolicySettings
from tasks.config import ConfigError, build_settings
from tasks.pipeline.stage_key import collect_stage_key

REWARD = "def score(task, calls, result):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = [{"question": f"{n}?", "answer": str(n)} for n in range(30)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "my_agent.py").write_text("print('hello')\n")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return tmp_path


def build(folder, stages=None, **options):
    options = {
        "command": "python my_agent.py",
        "tasks": "tasks.jsonl",
        "reward": "my_rewards.py:score",
        **options,
    }
    return {
        "name": "mine",
        "environment": {"name": "agent", "options": options},
        "output": str(folder / "outputs"),
        "stages": stages or {"policy": {}},
        "model": {"preset": "nano"},
    }


def read_problems(values, **options):
    with pytest.raises(ConfigError) as error:
        build_settings(values, **options)
    return str(error.value)


def test_an_agent_is_accepted(folder):
    settings = build_settings(build(folder))
    assert settings.environment.name == "agent"


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"command": "no-such-program"}, "environment.options.command", "no program"),
        ({"command": "python other.py"}, "environment.options.command", "no such file"),
        ({"tasks": "other.jsonl"}, "environment.options.tasks", "other.jsonl"),
        ({"reward": "my_rewards.py:scor"}, "environment.options.reward", "score"),
        ({"timeout": 3}, "environment.options.timeout", "no such option"),
    ],
)
def test_options(folder, options, key, words):
    problems = read_problems(build(folder, **options))
    assert key in problems and words in problems


def test_all_but_the_reward_is_checked_without_its_import(folder):
    (folder / "my_rewards.py").write_text("raise SystemExit('imported')\n")
    build_settings(build(folder), import_code=False)
    problems = read_problems(build(folder, command="python other.py"), import_code=False)
    assert "environment.options.command" in problems


@pytest.mark.parametrize(
    ("stages", "key"),
    [
        (
            {"policy": {"rollouts": {"workers": "server", "address": "localhost:8000"}}},
            "stages.policy.rollouts.workers",
        ),
        (
            {
                "policy": {
                    "importance": "token",
                    "rollouts": {"workers": "ray", "max_staleness": 1},
                }
            },
            "stages.policy.rollouts.max_staleness",
        ),
        ({"sft": {}, "thoughts": {}}, "stages.thoughts"),
        (
            {"policy": {}, "evaluate": {"sampling": {"repetition_penalty": 1.2}}},
            "stages.evaluate.sampling.repetition_penalty",
        ),
    ],
)
def test_what_agents_cannot_be_combined_with_is_refused_by_name(folder, stages, key):
    problems = read_problems(build(folder, stages), check_servers=False)
    assert key in problems and "environment 'agent'" in problems


def test_the_stage_key_covers_tasks_reward_and_the_agents_script(folder):
    def read_content():
        settings = build_settings(build(folder))
        return collect_stage_key("policy", PolicySettings(), settings, {}).key

    keys = [read_content()]
    for name, text in (
        ("my_agent.py", "print('changed')\n"),
        ("tasks.jsonl", '{"question": "a"}\n{"question": "b"}\n{"question": "c"}\n'),
    ):
        (folder / name).write_text(text)
        keys.append(read_content())
    assert keys[0] != keys[1] != keys[2] != keys[0]
