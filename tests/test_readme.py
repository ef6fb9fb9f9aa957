"""README's examples: its YAML loads, its Python fits the API, its commands, files and links exist.

Its longer examples are in docs/; `tests/docs` runs those in process, the command here finds them in its folder.
"""

import ast
import inspect
import os
import re
import subprocess
import sys

import yaml
from helpers import ROOT

import rl_core

README = (ROOT / "README.md").read_text()
DOCUMENTS = "".join(
    (ROOT / "docs" / page).read_text() for page in ("quickstart.md", "bring-your-own.md")
)


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_python_fits_the_api():
    """Bind every call of rl_core to the function's signature."""
    bound = []
    for node in (node for block in blocks("python") for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rl_core."):
            function = getattr(rl_core, ast.unparse(node.func).removeprefix("rl_core."))
            inspect.signature(function).bind(
                *node.args, **{keyword.arg: None for keyword in node.keywords}
            )
            bound.append(function.__name__)
    assert bound == ["create_policy", "grpo"]


def test_the_python_learns_in_seconds_without_a_warning(caplog):
    names = {}
    exec(blocks("python")[0], names)
    rewards = names["trainer"].metrics()["reward/mean"]
    assert rewards.iloc[0] < -100 and rewards.iloc[-1] > -20
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_the_yaml_is_a_configuration():
    from tasks.config import build_settings

    block, _ = blocks("yaml")
    settings = build_settings(yaml.safe_load(block), check_files=False)
    assert settings.stages.active == (
        "prepare_data",
        "sft",
        "policy",
        "evaluate",
        "analyze",
        "export",
        "promote",
    )
    assert settings.model.lora.rank == 16


def test_the_agent_runs_as_it_stands(tmp_path, monkeypatch):
    """Run the agent's ten lines against a stand-in of the package openai, and read its options."""
    from types import SimpleNamespace as Object

    from rl_core.environments import make_environment

    code = blocks("python")[1]
    assert len(code.splitlines()) <= 10
    sent = []

    def create(model, messages, tools):
        sent.append((model, list(messages), tools))
        calls = ["call"] if len(sent) == 1 else None
        return Object(choices=[Object(message=Object(tool_calls=calls, content="7"))])

    completions = Object(create=create)
    monkeypatch.setitem(sys.modules, "openai", Object(chat=Object(completions=completions)))
    tools = Object(TOOLS=["lookup"], run_tool=lambda call: f"result of {call}")
    monkeypatch.setitem(sys.modules, "my_tools", tools)
    monkeypatch.setenv("TASK_QUESTION", "code of a")
    printed = []
    exec(code, {"print": printed.append})
    assert printed == ["7"] and [len(messages) for _, messages, _ in sent] == [1, 3]
    assert sent[1][1][0]["content"] == "code of a" and sent[1][1][2] == "result of call"
    options = yaml.safe_load(blocks("yaml")[1])["environment"]["options"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(code)
    (tmp_path / "my_rewards.py").write_text("def score(task, calls, result):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    assert make_environment("agent", options).levels == ("all",)


def test_the_command_finds_user_code_in_the_current_folder(tmp_path):
    """Use files next to the config; nothing is installed, and PYTHONPATH names this checkout alone."""
    (tmp_path / "my_package").mkdir()
    for name, part in (("echo", "class Echo("), ("rewards", "def brevity")):
        [block] = [block for block in blocks("python", DOCUMENTS) if part in block]
        (tmp_path / "my_package" / f"{name}.py").write_text(block)
    (tmp_path / "rewards.py").write_text(
        "def correct(trajectories):\n    return [0.0 for _ in trajectories]\n"
    )
    [environment] = [
        block for block in blocks("yaml", DOCUMENTS) if "my_package.echo:Echo" in block
    ]
    [reward] = [
        block for block in blocks("yaml", DOCUMENTS) if "my_package.rewards:brevity" in block
    ]
    settings = yaml.safe_load(environment)
    settings["stages"]["policy"] |= yaml.safe_load(reward)["stages"]["policy"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    command = (
        "import sys; from posttrain.cli.main import main; sys.exit(main(['validate', 'mine.yaml']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "acts in   my_package.echo:Echo" in done.stdout


def test_it_stays_short():
    assert len(README.encode()) <= 6000


def test_every_path_link_and_command_that_it_names_exists():
    from posttrain.cli.main import COMMANDS

    for path in re.findall(
        r"`((?:configs|docs|examples|rl_core|tasks|flows|tests)/[\w./]+)`", README
    ):
        assert (ROOT / path).exists(), path
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert len(links) > 20
    for link in links:
        assert (ROOT / link).is_file(), link
    named = set(re.findall(r"^ {4}posttrain ([\w-]+)", README, re.MULTILINE)) | set(
        re.findall(r"`posttrain ([\w-]+)", README)
    )
    assert named <= set(COMMANDS) and len(named) > 5
    make_targets = set(re.findall(r"make (\w+)", README))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "docs"} <= make_targets & targets
