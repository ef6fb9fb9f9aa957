"""Defaults that depend on the model, as a config, the form and a stage's key have them."""

import json

import pytest

from rl_core.settings import OnlineSettings
from tasks.config import ConfigError, build_settings, dump_settings
from tasks.pipeline.stage_key import collect_stage_key

STAGES = {"prepare_data": {}, "sft": {}, "policy": {}, "evaluate": {}}


def build(model=None, **stages):
    values = {"name": "x", "model": model or {}, "stages": {**STAGES, **stages}}
    return build_settings(values, check_files=False)


def test_a_pretrained_model_has_the_field_s_defaults():
    loaded = build({"path": "org/name"})
    assert (loaded.stages.sft.learning_rate, loaded.stages.policy.learning_rate) == (2e-5, 1e-6)
    assert loaded.stages.evaluate.sampling.max_completion_tokens == 512
    loaded = build({"path": "org/name", "lora": {"rank": 8}})
    assert (loaded.stages.sft.learning_rate, loaded.stages.policy.learning_rate) == (2e-4, 1e-5)


def test_a_preset_keeps_its_defaults():
    loaded = build()
    assert (loaded.stages.sft.learning_rate, loaded.stages.policy.learning_rate) == (1e-3, 3e-4)
    assert loaded.stages.evaluate.sampling.max_completion_tokens == 64
    assert loaded.stages.policy.critic is None


def test_online_learning_has_the_defaults_of_its_model():
    values = {"name": "x", "model": {"path": "org/name"}, "stages": STAGES, "online": {}}
    loaded = build_settings(values, check_files=False)
    length = loaded.online.reward_options.length
    assert (length.free, length.limit) == (410, 512)
    loaded = build_settings({**values, "model": {}}, check_files=False)
    assert (loaded.online.reward_options.length.free, loaded.online) == (32, OnlineSettings())


def test_explicit_values_win_and_null_stands_for_the_default():
    policy = {"learning_rate": 3e-4, "sampling": {"max_completion_tokens": 64}}
    loaded = build({"path": "org/name"}, policy=policy, sft={"learning_rate": None})
    assert (
        loaded.stages.policy.learning_rate,
        loaded.stages.policy.sampling.max_completion_tokens,
    ) == (3e-4, 64)
    assert loaded.stages.sft.learning_rate == 2e-5


def test_resolved_settings_show_the_values_in_force_and_stay():
    loaded = build({"path": "org/name"}, policy={"algorithm": "ppo"})
    dumped = json.loads(json.dumps(dump_settings(loaded)))
    assert dumped["stages"]["policy"]["learning_rate"] == 1e-6
    assert dumped["stages"]["policy"]["critic"]["learning_rate"] == 1e-5
    assert build_settings(dumped, check_files=False) == loaded
    preset = dump_settings(build(policy={"algorithm": "ppo"}))
    moved = {**preset, "model": {**preset["model"], "path": "models:/x/3"}}  # as a retraining does
    assert dump_settings(build_settings(moved, check_files=False))["stages"] == preset["stages"]


def test_the_stage_s_key_has_the_value_in_force():
    unset, explicit = (
        build({"path": "org/name"}),
        build({"path": "org/name"}, policy={"learning_rate": 1e-6}),
    )
    keys = {
        collect_stage_key("policy", loaded.stages.policy, loaded, {}).key
        for loaded in (unset, explicit)
    }
    assert len(keys) == 1
    other = build({"path": "org/name"}, policy={"learning_rate": 3e-4})
    assert collect_stage_key("policy", other.stages.policy, other, {}).key not in keys


def test_a_default_fits_a_short_context(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    loaded = build({"path": str(tmp_path)})
    assert loaded.stages.policy.sampling.max_completion_tokens == 64


def test_a_value_that_does_not_go_with_a_default_is_named():
    options = {"reward_options": {"length": {"free": 600}}}
    with pytest.raises(ConfigError) as caught:
        build({"path": "org/name"}, policy=options)
    (problem,) = caught.value.problems
    assert ".".join(problem.key) == "stages.policy.reward_options.length.free"
    assert problem.text == "600 must be below limit 512"
    options = {"reward_options": {"length": {"free": 100}}, "overlong_buffer": 100}
    assert build({"path": "org/name"}, policy=options).stages.policy.overlong_tokens == 100


def test_a_bad_value_is_reported_with_its_defaults():
    with pytest.raises(ConfigError) as caught:
        build({"path": "org/name"}, policy={"learning_rate": "fast"})
    (problem,) = caught.value.problems
    assert (
        "expected a number greater than 0 and at most 1" in problem.text
        and "with LoRA 1e-5" in problem.text
    )
