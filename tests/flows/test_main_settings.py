"""Form of ten settings of a deployment: its initial values, and the effect of changes in a run."""

from __future__ import annotations

import pydantic
import pytest
import yaml
from helpers import ROOT

from flows import parameters
from flows.parameters import (
    MAIN_SETTINGS,
    build_main_overrides,
    describe_run_changes,
    read_main_values,
    read_settings,
)
from flows.runtime.run_request import RunRequest, use_request
from tasks.config import load_settings

DECLARED = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())["definitions"]["main"]


def test_the_form_opens_with_the_values_of_the_config():
    assert (
        read_main_values(load_settings(ROOT / "configs/demo.yaml", check_files=False)) == DECLARED
    )
    assert set(DECLARED) == set(MAIN_SETTINGS) and len(MAIN_SETTINGS) == 10


def test_declared_values_change_nothing_and_others_are_overrides():
    assert (
        build_main_overrides(DECLARED, DECLARED) == []
        and build_main_overrides(None, DECLARED) == []
    )
    changed = {**DECLARED, "learning_rate": 1e-3, "algorithm": "rloo", "seed": None}
    assert build_main_overrides(changed, DECLARED) == [
        'stages.policy.algorithm="rloo"',
        "stages.policy.learning_rate=0.001",
    ]
    assert build_main_overrides({"iterations": 7}) == ["stages.policy.iterations=7"]


@pytest.mark.parametrize(
    "wrong", [{"group_size": 0}, {"algorithm": "magic"}, {"rate": 1}, {"iterations": "many"}]
)
def test_values_that_settings_refuse_the_form_refuses(wrong):
    with pytest.raises(pydantic.ValidationError):
        build_main_overrides({**DECLARED, **wrong}, DECLARED)


def test_another_config_keeps_its_values(monkeypatch):
    """Ignore the demo's values in a run of another config: the form opened with them."""
    monkeypatch.setattr(
        parameters, "read_declared_parameters", lambda: {"settings": "demo", "main": DECLARED}
    )
    settings = read_settings("test", ["run.wait_seconds=5"], DECLARED)
    assert (
        settings.stages.policy.iterations
        == load_settings("test").stages.policy.iterations
        != DECLARED["iterations"]
    )
    settings = read_settings("test", ["seed=9"], {**DECLARED, "iterations": 11, "seed": 8})
    assert (settings.stages.policy.iterations, settings.seed) == (11, 9)  # overrides come last


def test_a_flow_run_is_named_after_what_it_changes(monkeypatch):
    monkeypatch.setattr(
        parameters, "read_declared_parameters", lambda: {"settings": "demo", "main": DECLARED}
    )
    run = {
        "settings": "demo",
        "main": {**DECLARED, "iterations": 11},
        "overrides": ["run.wait_seconds=5", "seed=3"],
    }
    assert describe_run_changes(run) == "policy iterations=11, seed=3"
    assert describe_run_changes({"settings": "demo", "main": DECLARED}) == ""


def test_a_run_of_a_shell_is_named_after_its_overrides_but_for_secrets():
    changed = [
        "stages.policy.iterations=11",
        "output=elsewhere",
        "environment.options.api_key=sk-1",
    ]
    with use_request(RunRequest(overrides=changed)):
        assert describe_run_changes({"settings": {}}) == "policy iterations=11, api_key=***"
    assert describe_run_changes({"settings": {}}) == ""
    block = {
        "overrides": [
            "environment={name: a, options: {hf_token: x}}",
            "environment.options.skill=0.5",
        ]
    }
    assert describe_run_changes(block) == "environment=***, skill=0.5"


def test_the_form_comes_second_and_is_described():
    from prefect.utilities.callables import parameter_schema

    from flows.post_training import post_training

    schema = parameter_schema(post_training).model_dump()
    order = sorted(schema["properties"], key=lambda name: schema["properties"][name]["position"])
    assert order[:2] == ["settings", "main"]
    fields = schema["definitions"]["MainSettings"]["properties"]
    assert list(fields) == list(MAIN_SETTINGS) and all(
        field["description"] for field in fields.values()
    )


def test_a_script_passes_the_settings_that_it_loaded():
    loaded = load_settings(ROOT / "configs/test.yaml")
    assert parameters.extract_pipeline_name(loaded) == "test"
    assert read_settings(loaded) == loaded
    assert read_settings(loaded, ["seed=3"]).seed == 3 and loaded.seed == 0


def test_the_form_has_labels_for_people():
    from prefect.utilities.callables import parameter_schema

    from flows.post_training import post_training

    definitions = parameter_schema(post_training).model_dump()["definitions"]
    labels = {
        name: field["title"] for name, field in definitions["MainSettings"]["properties"].items()
    }
    assert labels["sft_learning_rate"] == "SFT: Learning rate"
    assert labels["kl_coef"] == "Policy: KL coefficient"
    assert labels["seed"] == "Seed"
    labels = {
        name: field["title"] for name, field in definitions["SFTSettings"]["properties"].items()
    }
    assert labels["max_grad_norm"] == "Maximum gradient norm"
    assert labels["min_lr_ratio"] == "Minimum learning rate ratio"
    assert labels["history_seconds"] == "History (seconds)"
