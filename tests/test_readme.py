"""README's examples work: its environment and its reward run, its commands and files exist."""

import os
import re
import subprocess
import sys
import types

from helpers import ROOT

from rl_core.environments import make
from rl_core.types import Trajectory

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


def module_of(block, name, monkeypatch):
    module = types.ModuleType(name)
    exec(block, module.__dict__)
    monkeypatch.setitem(__import__("sys").modules, name, module)
    return module


def test_the_environment_is_short_and_plays(monkeypatch, tmp_path):
    """The block as a file, found by the very line of configuration that README shows."""
    import yaml

    from tasks.config import from_dict

    block = next(block for block in BLOCKS if "class Echo(" in block)
    assert len([line for line in block.splitlines() if line.strip()]) <= 13
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "echo.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = re.search(r"\(`(environment: \{name: .*?\})`\)", README)[1]
    settings = from_dict(
        {"name": "x", "model": {"path": "a/b"}, **yaml.safe_load(shown), "stages": {"policy": {}}}, check_files=False
    )
    environment = make(settings.environment.name, settings.environment.options)
    assert type(environment).__module__ == "my_package.echo"
    for action, reward in (("7", 1.0), ("8", 0.0)):
        episode = environment.episode(17, "easy")
        assert episode.reset() == [{"role": "user", "content": "say 7"}]
        step = episode.step(action)
        assert (step.reward, step.terminated, step.success) == (reward, True, reward == 1.0)


def test_the_command_finds_both_in_the_folder_that_it_is_called_from(tmp_path):
    """As files beside the config; nothing is installed, and PYTHONPATH names this checkout alone."""
    (tmp_path / "my_package").mkdir()
    for name, part in (("echo", "class Echo("), ("rewards", "def brevity")):
        (tmp_path / "my_package" / f"{name}.py").write_text(next(block for block in BLOCKS if part in block))
    rewards = next(block for block in YAML if "my_package.rewards:brevity" in block)
    shown = re.search(r"\(`(environment: \{name: .*?\})`\)", README)[1]
    (tmp_path / "mine.yaml").write_text(f"name: mine\nmodel: {{path: a/b}}\n{shown}\n{rewards}")
    command = "import sys; from flows.cli.main import main; sys.exit(main(['validate', 'mine.yaml']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_reward_is_called_as_shown(monkeypatch):
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.types import Rollout, RolloutGroup

    module_of(next(block for block in BLOCKS if "def brevity" in block), "readme_rewards", monkeypatch)
    trajectory = Trajectory(environment="e", level="l", kind="k", seed=0, prompt="p", target="t", num_action_tokens=30)
    trajectory.rewards = {"task": 1.0}
    rollout = Rollout([1], [2], [True], [0.0], trajectory)
    RewardOrchestrator({"task": 1.0, "readme_rewards:brevity": 0.1}).score([RolloutGroup([rollout])])
    assert rollout.reward == 1.0 + 0.1 * -0.3


def test_the_curriculum_is_read_as_shown():
    import yaml

    from tasks.config import from_dict

    block = next(block for block in YAML if "rollback:" in block)
    settings = from_dict({"name": "x", "model": {"path": "a/b"}, **yaml.safe_load(block)}, check_files=False)
    policy = settings.stages.policy
    assert [stage.name for stage in policy.curriculum] == ["easy", "hard"] and policy.rollback.margin == 0.2
    assert policy.curriculum[0].exit_conditions[1].statistic == "slope"


def test_every_path_and_command_that_it_names_exists():
    from flows.cli.main import COMMANDS

    for path in re.findall(r"`((?:configs|rl_core|tasks|flows|tests)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).is_file(), picture
    named = set(re.findall(r"^ {4}posttrain (\w+)|; posttrain (\w+)", README, re.MULTILINE))
    assert {a or b for a, b in named} <= set(COMMANDS)
    assert len(named) > 5
