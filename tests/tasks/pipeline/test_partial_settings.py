"""Settings of the part of a pipeline that ends with one stage."""

from tasks.config import build_settings
from tasks.pipeline.run_options import select_settings_up_to

BEFORE = ["prepare_data", "sft"]


def build(**rewards):
    stages = {name: {} for name in (*BEFORE, "reward_model", "evaluate", "analyze", "promote")}
    stages["policy"] = {"rewards": {"task": 1.0, **rewards}}
    return build_settings(
        {"name": "t", "environment": {"name": "arithmetic"}, "stages": stages}, check_files=False
    )


def list_active(name, model=None, **rewards):
    return list(select_settings_up_to(build(**rewards), name, model).stages.active)


def test_a_training_stage_needs_earlier_stages_and_the_reward_model_it_uses():
    assert list_active("sft") == BEFORE
    assert list_active("reward_model") == [*BEFORE, "reward_model"]
    assert list_active("policy") == [*BEFORE, "policy"]
    assert list_active("policy", learned=0.5) == [*BEFORE, "reward_model", "policy"]


def test_result_stages_use_the_reward_model_as_in_a_full_run():
    """Without it the proof of `export` has another key, and `promote` compares with the champion again."""
    assert list_active("evaluate") == [*BEFORE, "policy", "evaluate"]
    for name in ("analyze", "export", "promote"):
        stages = list(build().stages.active)
        assert list_active(name) == stages[: stages.index(name) + 1]


def test_a_named_model_replaces_the_stages_that_would_train_it():
    assert list_active("policy", "org/name") == ["prepare_data", "policy"]
    assert list_active("analyze", "org/name") == ["prepare_data", "evaluate", "analyze"]
    assert select_settings_up_to(build(), "policy", "org/name").model.path == "org/name"
