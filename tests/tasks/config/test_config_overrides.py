"""`--set key.path=value`."""

import pytest

from tasks.config import ConfigError, load_settings

TEXT = """\
name: demo
stages:
  sft: {}
  policy:
    group_size: 4
    curriculum:
      - {name: a, levels: {easy: 1}, max_iterations: 5}
      - {name: b, levels: {hard: 1}}
"""


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


def test_values_are_yaml(config_path):
    settings = load_settings(
        config_path,
        [
            "stages.policy.learning_rate=3e-4",
            "stages.policy.rewards={task: 2}",
            "stages.evaluate.levels=[easy, hard]",
            "model.lora=null",
            "name='7'",
            "tracking.experiment=a=b",
        ],
    )
    assert settings.stages.policy.learning_rate == 3e-4
    assert settings.stages.policy.rewards == {"task": 2.0}
    assert settings.stages.evaluate.levels == (
        "easy",
        "hard",
    )  # makes the block that the file leaves out
    assert settings.name == "7" and settings.tracking.experiment == "a=b"


def test_a_stage_comes_and_goes(config_path):
    assert load_settings(config_path, ["stages.sft=null"]).stages.active == ("policy",)
    assert load_settings(config_path, ["stages.reward_model={}"]).stages.active == (
        "sft",
        "reward_model",
        "policy",
    )


def test_items_of_a_list(config_path):
    settings = load_settings(
        config_path,
        ["stages.policy.curriculum.0.name=first", "stages.policy.curriculum.1.levels.easy=2"],
    )
    assert [stage.name for stage in settings.stages.policy.curriculum] == ["first", "b"]
    assert settings.stages.policy.curriculum[1].levels == {"hard": 1.0, "easy": 2.0}


def test_the_last_one_wins(config_path):
    assert load_settings(config_path, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "--set seed: must be key.path=value"),
        ("=3", "--set =3: must be key.path=value"),
        ("a..b=3", "must be key.path=value"),
        (
            "stages.policy.group_siz=2",
            "stages.policy.group_siz: unknown key; did you mean 'group_size'?",
        ),
        ("stages.polcy.group_size=2", "stages.polcy: unknown key; did you mean 'policy'?"),
        (
            "stages.policy.learning_rate=fast",
            "--set stages.policy.learning_rate=fast: stages.policy.learning_rate: found 'fast'",
        ),
        (
            "stages.policy.group_size=1",
            "--set stages.policy.group_size=1: stages.policy.group_size: 1 leaves grpo",
        ),
        (
            "stages.policy.curriculum.2.name=c",
            "stages.policy.curriculum has 2 items, so 1 is the largest index",
        ),
        ("stages.policy.curriculum.last.name=c", "name an item by its index from 0, not 'last'"),
        ("stages.policy.curriculum.-1.name=c", "name an item by its index from 0"),
        ("stages.policy.group_size.x=1", "stages.policy.group_size is a single value"),
        ("seed=!!python/object:x {}", "the value contains the tag"),
        ("seed=[1", "the value is not valid YAML"),
        ("stages.policy.kl_coef=.nan", "finite"),
        ("name=../x", "--set name=../x: name: '../x' must be"),
        (
            "stages.policy.curriculum=[{name: 1, levels: {easy: 1}}]",
            "stages.policy.curriculum.0.name: found 1",
        ),
        ("stages.policy.curriculum.0.levels={}", "must name at least one level"),
    ],
)
def test_bad_overrides(config_path, override, expected):
    with pytest.raises(ConfigError) as caught:
        load_settings(config_path, [override])
    assert len(caught.value.problems) == 1
    assert expected in str(caught.value) and str(caught.value).startswith(f"--set {override}: ")


def test_an_override_mends_what_the_file_has_wrong(config_path):
    config_path.write_text(TEXT.replace("group_size: 4", "group_size: 1"))
    with pytest.raises(ConfigError):
        load_settings(config_path)
    assert load_settings(config_path, ["stages.policy.group_size=2"]).stages.policy.group_size == 2
