"""Every file in configs/ loads and starts with a description."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import ROOT

from tasks.config import ConfigError, build_settings, dump_settings, load_settings
from tasks.config.cross_checks import find_waste
from tasks.shipped import ONLINE_CONFIG, SERVICE_CONFIG

CONFIGS = sorted(
    path
    for path in (ROOT / "configs").glob("*.yaml")
    if path.stem not in (SERVICE_CONFIG, ONLINE_CONFIG)
)
NEEDS = {  # a package that is an extra
    "cartpole": "gymnasium",
    "acrobot": "gymnasium",
    "pendulum": "gymnasium",
    "mountain-car": "gymnasium",
    "lunar-lander": "Box2D",
}
LOADABLE = [
    pytest.param(
        path,
        marks=pytest.mark.skipif(
            find_spec(NEEDS.get(path.stem, "json")) is None, reason="an extra"
        ),
    )
    for path in CONFIGS
]


def test_there_are_some():
    assert {"cartpole", "demo", "dpo", "gsm8k", "preferences", "test"} <= {
        path.stem for path in CONFIGS
    }


@pytest.mark.parametrize("path", LOADABLE, ids=[path.stem for path in CONFIGS])
def test_config_loads(path):
    settings = load_settings(path, check_files=False)  # the project carries no data
    assert settings.name == path.stem
    assert settings.stages.active
    assert path.read_text().startswith("# ")
    assert build_settings(dump_settings(settings), check_files=False) == settings
    assert find_waste(settings) == []


def test_demo_has_the_whole_pipeline_and_a_curriculum():
    settings = load_settings(CONFIGS[[path.stem for path in CONFIGS].index("demo")])
    assert len(settings.stages.active) == 8
    assert settings.model.path is None  # no download
    assert settings.stages.policy.rewards["task"] > settings.stages.policy.rewards["learned"] > 0
    curriculum = settings.stages.policy.curriculum
    assert len([stage for stage in curriculum if stage.exit_conditions]) >= 2
    assert all(
        condition.metric == "success_rate"
        for stage in curriculum
        for condition in stage.exit_conditions
    )


def iter_paths(value):
    """Yield every text of plain settings that reads like a path."""
    if isinstance(value, dict):
        return [path for item in value.values() for path in iter_paths(item)]
    if isinstance(value, list):
        return [path for item in value for path in iter_paths(item)]
    return [value] if isinstance(value, str) and ("/" in value or value.startswith(".")) else []


@pytest.mark.parametrize("path", LOADABLE, ids=[path.stem for path in CONFIGS])
def test_config_names_nothing_outside_the_project(path):
    for name in iter_paths(dump_settings(load_settings(path, check_files=False))):
        assert not Path(name).is_absolute() and ".." not in Path(name).parts, name


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        (
            "gsm8k",
            "environment.options.path",
            ["data/gsm8k_train.jsonl", "openai/grade-school-math", "question, answer"],
        ),
        (
            "preferences",
            "stages.prepare_data.preferences",
            ["data/preferences.jsonl", "prompt, chosen, rejected"],
        ),
    ],
)
def test_missing_data_is_explained(name, key, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / f"{name}.yaml"
    config.write_text((CONFIGS[0].parent / f"{name}.yaml").read_text())
    with pytest.raises(ConfigError) as caught:
        load_settings(config)
    (problem,) = caught.value.problems
    assert ".".join(problem.key) == key
    assert all(word in problem.text for word in [*words, f"--set {key}=FILE"])
    (tmp_path / "data").mkdir()
    row = (
        {"question": "q", "answer": "#### 1"}
        if name == "gsm8k"
        else {"prompt": "p", "chosen": "c", "rejected": "r"}
    )
    (tmp_path / words[0]).write_text(json.dumps(row) + "\n")
    assert load_settings(config).name == name
    elsewhere = tmp_path / "mine.jsonl"
    (tmp_path / words[0]).rename(elsewhere)
    assert load_settings(config, [f"{key}={elsewhere}"]).name == name
