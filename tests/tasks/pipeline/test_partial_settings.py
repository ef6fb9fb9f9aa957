"""Settings of the part of a pipeline that ends with one stage."""

from tasks.config import build_settings
from tasks.pipeline.run_options import select_settings_up_to

BEFORE = ["prepare_data", "sft"]


def settings(**rewards):
    stages = {name: {} for name in (*BEFORE, "reward_model", "evaluate", "analyze", "promote")}
    stages["policy"] = {"rewards": {"task": 1.0, **rewards}}
    return build_settings(
        {"name": "t", "environment": {"name": "arithmetic"}, "stages": stages}, check_files=False
    )


def active(name, model=None, **rewards):
    return list(select_settings_up_to(settings(**rewards), name, model).stages.active)


def test_a_stage_that_trains_rests_on_those_before_it_and_on_a_reward_model_that_it_asks():
    assert active("sft") == BEFORE
    assert active("reward_model") == [*BEFORE, "reward_model"]
    assert active("policy") == [*BEFORE, "policy"]
    assert active("policy", learned=0.5) == [*BEFORE, "reward_model", "policy"]


def test_results_take_the_reward_model_as_in_a_whole_run():
    """Without it the proof of `export` has another key, and `promote` compares with the champion once more."""
    assert active("evaluate") == [*BEFORE, "policy", "evaluate"]
    for name in ("analyze", "export", "promote"):
        whole = list(settings().stages.active)
        assert active(name) == whole[: whole.index(name) + 1]


def test_a_given_model_replaces_the_stages_that_would_make_it():
    assert active("policy", "org/name") == ["prepare_data", "policy"]
    assert active("analyze", "org/name") == ["prepare_data", "evaluate", "analyze"]
    assert select_settings_up_to(settings(), "policy", "org/name").model.path == "org/name"
