"""Model-dependent defaults in the trainers of the Python API; explicit values win."""

from helpers.library import length, small_policy

import rl_core


def build_trainer(model, settings=None):
    return rl_core.grpo(model=model, prompts=["a", "b"], reward=length, settings=settings).settings


def test_a_model_from_a_folder_gets_the_rates_of_the_field_and_a_new_one_those_of_a_preset(
    tmp_path,
):
    policy = small_policy()
    assert build_trainer(policy).learning_rate == 3e-4
    folder = policy.save(tmp_path / "model")
    assert build_trainer(str(folder)).learning_rate == 1e-6
    adapted = rl_core.ModelSettings(path=str(folder), lora=rl_core.LoraSettings(rank=2))
    assert build_trainer(adapted).learning_rate == 1e-5
    assert build_trainer((policy.model, policy.tokenizer)).learning_rate == 1e-6
    assert build_trainer(adapted, rl_core.PolicySettings(learning_rate=2e-3)).learning_rate == 2e-3


def test_completions_are_at_most_half_of_the_context(tmp_path):
    policy = small_policy()
    folder = policy.save(tmp_path / "model")
    assert build_trainer(str(folder)).sampling.max_completion_tokens == min(
        512, policy.context // 2
    )
    assert (
        build_trainer(policy).sampling.max_completion_tokens
        == rl_core.SamplingSettings().max_completion_tokens
    )
