"""Options of other training scripts are answered with the setting or option here."""

import re

import pytest

from posttrain.cli import main as cli
from posttrain.cli.parser import SETTING_OPTIONS
from tasks.config import load_settings


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--sft-model org/m", "--set model.path=FOLDER_OR_HUB_NAME"),
        ("--multi-gpu 4", "--set 'stages.policy.launch={kind: torchrun, processes: N}'"),
        ("--exp-name=first", "--set name=NAME"),
        ("--num_samples 3", "--set stages.policy.group_size=N"),
        ("--learning_rate 1e-5", "--set stages.policy.learning_rate=X"),
        ("--seed 3", "--set seed=N"),
    ],
)
def test_a_usual_option_is_answered_with_ours(words, answer, config, capsys):
    for command in ("run", "validate"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, config, *words.split()])
        assert ended.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"unrecognized arguments: {words}; here it is {answer}" in message


def test_a_command_without_settings_names_only_its_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["status", "--exp-name", "x"])
    assert "--set" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["run", "demo", "--monitr"])
    assert "did you mean '--monitor'?" in capsys.readouterr().err


def test_the_answers_name_settings_that_exist():
    values = {
        "FOLDER_OR_HUB_NAME": "org/m",
        "N": "4",
        "X": "0.5",
        "NAME": "pixel_grid",
        "FOLDER": "o",
    }
    keys = [
        (key, values.get(value, "cpu" if value == "DEVICE" else value))
        for answer in SETTING_OPTIONS.values()
        for key, value in re.findall(r"(?:--set |or )([a-z_.]+)=([A-Z_]+)", answer)
    ]
    assert len(keys) > 15
    for key, value in keys:
        if key.endswith("demonstrations"):
            continue
        load_settings("test", [f"{key}={value}"], check_files=False)
    names = [name for names in SETTING_OPTIONS for name in names]
    assert len(names) == len(set(names)) and all(re.fullmatch("[a-z-]+", name) for name in names)
