"""Settings that were set, among all that a run has."""

import pytest
import yaml
from helpers import ROOT

from tasks.config import from_dict, load, resolve
from tasks.config.chosen import chosen, default_values
from tasks.tracking.values import flatten


def test_what_a_config_says_is_what_was_chosen():
    values = {
        "name": "mine",
        "seed": 3,
        "stages": {"prepare_data": {}, "sft": {"epochs": 2}, "policy": {"iterations": 7}},
    }
    settings = from_dict(values, check_files=False)
    assert chosen(settings) == {
        "name": "mine", "seed": 3, "stages": {"prepare_data": {}, "sft": {"epochs": 2.0}, "policy": {"iterations": 7}}
    }  # fmt: skip
    assert len(flatten(resolve(settings))) > 200


@pytest.mark.parametrize("name", ["demo", "rlhf", "thoughts"])
def test_defaults_and_what_was_chosen_make_the_whole(name):
    """Whoever reads the parameters of a run in the tracking store can tell every setting of it."""
    path = ROOT / f"configs/{name}.yaml"
    settings = load(path, check_files=False)
    given, defaults = flatten(chosen(settings)), flatten(default_values())
    for key, value in flatten(resolve(settings)).items():
        if (key.startswith("stages.") and key.count(".") > 1) or not key.startswith("stages"):
            assert given.get(key, defaults.get(key)) == value, key
    written = flatten(yaml.safe_load(path.read_text()))
    assert len(given) <= len(written) + 20


def test_a_stage_of_defaults_alone_is_named():
    settings = from_dict({"name": "a", "stages": {"prepare_data": {}, "sft": {}, "evaluate": {}}}, check_files=False)
    assert chosen(settings)["stages"] == {"prepare_data": {}, "sft": {}, "evaluate": {}}
