"""Settings that were set, among all that a run has."""

import pytest
import yaml
from helpers import ROOT

from tasks.config import build_settings, dump_settings, load_settings
from tasks.config.displayed_settings import collect_default_values, non_default_settings
from tasks.tracking.values import flatten_settings


def test_what_a_config_says_is_what_was_chosen():
    values = {
        "name": "mine",
        "seed": 3,
        "stages": {"prepare_data": {}, "sft": {"epochs": 2}, "policy": {"iterations": 7}},
    }
    settings = build_settings(values, check_files=False)
    assert non_default_settings(settings) == {
        "name": "mine",
        "seed": 3,
        "stages": {"prepare_data": {}, "sft": {"epochs": 2.0}, "policy": {"iterations": 7}},
    }
    assert len(flatten_settings(dump_settings(settings))) > 200


@pytest.mark.parametrize("name", ["demo", "rlhf", "thoughts"])
def test_defaults_and_changed_settings_give_all_settings(name):
    """The parameters of a run in the tracking store determine every setting of it."""
    path = ROOT / f"configs/{name}.yaml"
    settings = load_settings(path, check_files=False)
    changed, defaults = (
        flatten_settings(non_default_settings(settings)),
        flatten_settings(collect_default_values()),
    )
    for key, value in flatten_settings(dump_settings(settings)).items():
        if (key.startswith("stages.") and key.count(".") > 1) or not key.startswith("stages"):
            assert changed.get(key, defaults.get(key)) == value, key
    written = flatten_settings(yaml.safe_load(path.read_text()))
    assert len(changed) <= len(written) + 20


def test_a_stage_of_defaults_alone_is_named():
    settings = build_settings(
        {"name": "a", "stages": {"prepare_data": {}, "sft": {}, "evaluate": {}}}, check_files=False
    )
    assert non_default_settings(settings)["stages"] == {
        "prepare_data": {},
        "sft": {},
        "evaluate": {},
    }
