"""`posttrain validate`: what it checks, shows, and does not run."""

import json
import sys

import pytest
from helpers.adapters import fakes

from posttrain.cli import main as cli
from tasks.config import load_settings


def test_validate(config, capsys):
    assert cli.main(["validate", config]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config}: OK\n") and "sft -> policy" in out


def test_the_summary_of_validate_fits_into_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        cli.main(["init", "first_task"]) == 0
        and cli.main(["validate", "first_task/config.yaml"]) == 0
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert all(
        len(line) <= 80 for line in lines if " " in line.strip().removeprefix("writes to ")
    ), out
    assert "first_task.reward:brevity (found, not imported: --import-code)" in " ".join(out.split())
    monkeypatch.delenv("COLUMNS")
    assert cli.main(["validate", "first_task/config.yaml"]) == 0
    assert any(
        len(line) > 80 for line in capsys.readouterr().out.splitlines()
    )  # unwrapped in a pipe


def test_validate_warns_of_a_reward_model_that_no_reward_uses(config, capsys):
    with open(config, "a") as file:
        file.write("  reward_model: {}\n")
    assert cli.main(["validate", config]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(
        f"posttrain: warning: {config}:5: stages.reward_model: is trained, but no reward"
    )
    assert (
        "set stages.policy.rewards.learned to a weight" in captured.err
        and captured.out.startswith(config)
    )
    assert (
        cli.main(["validate", config, "-s", "stages.policy.rewards={task: 1.0, learned: 0.1}"]) == 0
    )
    assert capsys.readouterr().err == ""


CUSTOM_DATA = """
name: custom
model: {path: no_such_folder}
stages:
  prepare_data: {demonstrations: rows.jsonl}
  sft: {}
"""


def test_validate_reads_rows_and_says_what_it_did_not_check(tmp_path, monkeypatch, capsys):
    """Check data files without an environment: rows are read, and the model is taken for a hub name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom.yaml").write_text(CUSTOM_DATA)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    assert cli.main(["validate", "custom.yaml"]) == 0
    out = capsys.readouterr().out
    assert f"data      {tmp_path / 'rows.jsonl'} (demonstrations, all 2 rows checked)" in out
    assert (
        "model     no_such_folder (no folder here, so a Hugging Face name; looked up when it runs)"
        in out
    )
    assert "acts in" not in out
    assert cli.main(["validate", "custom.yaml", "-s", "stages.evaluate={}"]) == 0
    assert "acts in   pixel_grid" in capsys.readouterr().out


CUSTOM_CODE = """
import pathlib
pathlib.Path("ran").touch()
from rl_core.environments.arithmetic import Arithmetic
def brief(trajectories): return [0.0] * len(trajectories)
"""


@pytest.mark.parametrize(
    ("environment", "rewards", "path"),
    [
        ("{name: 'custom_code:Arithmetic'}", "{task: 1.0}", "custom_code:Arithmetic"),
        ("{name: arithmetic}", "{'custom_code:brief': 1.0}", "custom_code:brief"),
    ],
)
def test_validate_imports_code_only_on_request(
    tmp_path, monkeypatch, capsys, environment, rewards, path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "custom_code", raising=False)
    (tmp_path / "custom_code.py").write_text(CUSTOM_CODE)
    text = f"name: custom\nenvironment: {environment}\nstages: {{sft: {{}}, policy: {{rewards: {rewards}}}}}\n"
    (tmp_path / "custom.yaml").write_text(text)
    assert cli.main(["validate", "custom.yaml"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("custom.yaml: OK, but for code that was not imported\n")
        and f"code      {path} (" in out
    )
    assert not (tmp_path / "ran").exists()
    missing = text.replace("custom_code:", "no_code:")
    (tmp_path / "custom.yaml").write_text(missing)
    assert cli.main(["validate", "custom.yaml"]) == 2
    assert "needs the module 'no_code', which cannot be found" in capsys.readouterr().err
    (tmp_path / "custom.yaml").write_text(text)
    assert cli.main(["validate", "custom.yaml", "--import-code"]) == 0
    assert f"code      {path} (imported)" in capsys.readouterr().out and (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", [[], ["--import-code"]])
def test_validate_runs_no_command_that_stands_for_an_environment(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    with fakes("gymnasium"):
        options = {"id": "os:system", "options": {"command": "touch ran"}}
        values = {
            "name": "x",
            "environment": {"name": "gymnasium", "options": options},
            "stages": {"sft": {}},
        }
        (tmp_path / "x.yaml").write_text(json.dumps(values))
        assert cli.main(["validate", "x.yaml", *command]) == (2 if command else 0)
    assert not (tmp_path / "ran").exists()
    assert (
        not command or "'os:system' is not a subclass of gymnasium.Env" in capsys.readouterr().err
    )


def test_validate_refuses_a_bad_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom.yaml").write_text(CUSTOM_DATA)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    assert cli.main(["validate", "custom.yaml"]) == 2
    captured = capsys.readouterr()
    assert (
        f"{tmp_path / 'rows.jsonl'}:2: completion: is missing" in captured.err
        and captured.out == ""
    )
    monkeypatch.setattr("tasks.config.machine_checks.NUM_CHECKED_ROWS", 1)
    assert cli.main(["validate", "custom.yaml"]) == 0
    assert "first 1 rows checked" in capsys.readouterr().out


def test_validate_show_prints_a_config_that_loads(config, capsys, tmp_path):
    assert cli.main(["validate", config, "--show", "-s", "seed=5"]) == 0
    shown = tmp_path / "shcustom.yaml"
    shown.write_text(capsys.readouterr().out)
    from tasks.config import load_settings

    assert load_settings(shown) == load_settings(config, ["seed=5"])


BLOCKS = ("online: {}", "serving: {}", "prefer: {}", "online: {update: {batch_size: 4}}")


@pytest.mark.parametrize("block", BLOCKS)
def test_show_prints_yaml_that_is_the_same_configuration(block, tmp_path, config, capsys):
    with open(config, "a") as file:
        file.write(f"\n{block}\n")
    assert cli.main(["validate", config, "--show"]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert load_settings(shown) == load_settings(config)
    assert cli.main(["validate", str(shown), "--show"]) == 0
    assert capsys.readouterr().out == shown.read_text()
