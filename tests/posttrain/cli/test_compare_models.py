"""`posttrain diff`: stage references, its text, and the command on evaluated episodes."""

import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers.handmade_trajectories import trajectory, zoom

import flows.single_stage as single_stage
from posttrain.cli import main as cli
from posttrain.cli.compare_models import format_diff, resolve_diffed_models
from posttrain.cli.model_references import resolve_stage_model
from rl_core.analysis import write_trajectories
from rl_core.analysis.comparison import diff_models
from rl_core.errors import SettingsError
from rl_core.types import Turn
from tasks.config import build_settings


def create_model(path):
    path.mkdir(parents=True)
    (path / "config.json").touch()
    return path


@pytest.fixture
def home(tmp_path):
    """Create two finished SFT stages, the second newer and with models of epochs, and an unfinished policy."""
    home = tmp_path / "t"
    old = create_model(home / "stages/sft/0123456789abcdef/model")
    new = create_model(home / "stages/sft/01ff456789abcdef/model")
    create_model(new.parent / "epochs/2")
    os.utime(old.parent, (1, 1))
    create_model(home / "stages/policy/aaaaaaaaaaaaaaaa.open/model")
    return home


def test_models_are_named_by_their_stage(home):
    sft = home / "stages/sft"
    assert resolve_stage_model("sft", home) == str(sft / "01ff456789abcdef/model")
    assert resolve_stage_model("sft/0123", home) == str(sft / "0123456789abcdef/model")
    assert resolve_stage_model("sft/epochs/2", home) == str(sft / "01ff456789abcdef/epochs/2")
    assert resolve_stage_model("sft/01ff/epochs/2", home) == str(sft / "01ff456789abcdef/epochs/2")
    for other in ("models:/demo@champion", "Qwen/Qwen2.5-0.5B", str(sft), "evaluate", "../sft"):
        assert resolve_stage_model(other, home) == other


def test_a_folder_goes_before_a_stage(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_model(tmp_path / "sft")
    assert resolve_stage_model("sft", home) == "sft"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("policy", "no finished model of this stage in .*; finished ones: none"),
        ("sft/01234/epochs/2", r"no model of epoch 2 \(keep_epochs\)"),
        ("sft/abcd", "abcd: no finished model"),
        ("sft/01", "invalid"),
    ],
)
def test_missing_stage_models_are_refused(home, reference, message):
    if message == "invalid":  # two digits are no key
        assert resolve_stage_model(reference, home) == reference
        return
    with pytest.raises(SettingsError, match=message):
        resolve_stage_model(reference, home)


def build_test_settings(tmp_path):
    values = {
        "name": "t",
        "output": str(tmp_path),
        "environment": {"name": "arithmetic"},
        "stages": {"sft": {}},
    }
    return build_settings(values)


def test_two_models_are_needed(home, tmp_path):
    assert list(resolve_diffed_models(build_test_settings(tmp_path), ("sft/0123", "sft"))) == [
        "sft",
        "sft'",
    ]
    assert list(resolve_diffed_models(build_test_settings(tmp_path), ("sft", "sft/epochs/2"))) == [
        "sft",
        "sft-epoch-2",
    ]
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(SettingsError, match="no model; name a folder"):
        resolve_diffed_models(build_test_settings(tmp_path), (str(tmp_path / "rows.jsonl"),) * 2)


def write_episodes(folder):
    folder.mkdir()
    first = [trajectory(seed, level="easy" if seed < 3 else "hard") for seed in range(5)]
    second = [trajectory(seed, seed < 2, level="easy" if seed < 3 else "hard") for seed in range(5)]
    second[4].turns = [zoom(7, 7, "blue"), Turn("answer blue", num_tokens=3)]
    for name, rows in (("sft", first), ("policy", second)):
        write_trajectories(folder / f"trajectories_{name}.jsonl", rows)
    return folder


def test_the_text(tmp_path):
    folder = write_episodes(tmp_path / "evaluate")
    paths = folder / "trajectories_sft.jsonl", folder / "trajectories_policy.jsonl"
    diff = diff_models(paths, ("sft", "policy"))
    lines = format_diff(diff).splitlines()
    assert lines[:2] == ["A  sft", "B  policy"]
    assert lines[3].startswith("B - A in success  -60.0 points [-100.0, -20.0], 5 episodes")
    assert (
        lines[4].strip()
        == "better on 0, worse on 3 of 5 episodes; exact p: sign-flip 0.25, sign 0.25"
    )
    assert "what got worse: hard -100.0, colour -60.0, easy -33.3 (the interval holds 0)" in lines
    index = lines.index(next(line for line in lines if line.startswith("  hard 4 (colour)")))
    assert lines[index + 1 : index + 4] == [
        "    they diverge at turn 1",
        "      A: 'zoom 1 2' -> 'red'",
        "      B: 'zoom 7 7' -> 'blue'",
    ]
    unknown = format_diff(diff, knows_success=False)
    assert (
        "success is unknown" in unknown
        and "points" not in unknown
        and "B - A in reward   -0.6000" in unknown
    )


def test_the_command_evaluates_both_and_prints_json(home, tmp_path, monkeypatch, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(
        json.dumps(
            {
                "name": "t",
                "output": str(tmp_path),
                "environment": {"name": "arithmetic"},
                "stages": {"sft": {}},
            }
        )
    )
    create_model(home / "stages/policy/bbbbbbbbbbbbbbbb/model")
    calls = []

    def evaluate_models(settings, models, quiet):
        calls.append((dict(models), settings.stages.evaluate, quiet))
        known = {name: {"knows_success": True} for name in models}
        folder = SimpleNamespace(path=tmp_path / "evaluate", summary={"models": known})
        return SimpleNamespace(results={"evaluate": folder})

    write_episodes(tmp_path / "evaluate")
    monkeypatch.setattr(single_stage, "evaluate_models", evaluate_models)
    for step in ("configure_prefect", "print_banner_and_start_prefect"):
        monkeypatch.setattr(f"posttrain.cli.run_setup.{step}", lambda *_, **__: nullcontext())
    assert cli.main(["diff", "sft", "policy", "-c", str(config), "--json"]) == 0
    diff = json.loads(capsys.readouterr().out)
    assert (diff["first"], diff["second"], diff["total"]["losses"]) == ("sft", "policy", 3)
    assert diff["knows_success"] and [row["seed"] for row in diff["lost"]] and diff["won"] == []
    assert list(calls[0][0]) == ["sft", "policy"] and calls[0][2]
    assert cli.main(["diff", "sft", "policy", "-c", str(config), "--episodes", "1"]) == 0
    assert capsys.readouterr().out.count("they diverge at turn") <= 1
    assert cli.main(["diff", "sft", "reward", "-c", str(config)]) == 2
