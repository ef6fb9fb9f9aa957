"""Online rewards follow the policy stage's unless the section `online` sets its own."""

import logging

import pytest

from rl_core.online.learning_folder import build_pipeline_settings, follow_policy_rewards
from rl_core.settings import (
    EnvironmentSettings,
    ModelSettings,
    OnlineSettings,
    PolicySettings,
    RewardSettings,
)

WEIGHTS = {"task": 1.0, "length": 0.2}


def test_the_policy_stages_weights_and_options_are_followed(tmp_path):
    options = RewardSettings(clip=3.0, normalise=("length",))
    policy = PolicySettings(rewards=WEIGHTS, reward_options=options)
    settings = build_pipeline_settings(
        OnlineSettings(), EnvironmentSettings(name="arithmetic"), ModelSettings(), tmp_path, policy
    )
    assert settings.rewards == WEIGHTS and settings.reward_options == options
    assert settings.rewards is not policy.rewards


@pytest.mark.parametrize("weights", [{"task": 1.0}, {"format": 0.5}])
def test_what_the_section_sets_stays(weights):
    policy = PolicySettings(rewards=WEIGHTS, reward_options=RewardSettings(clip=3.0))
    online = OnlineSettings(rewards=weights)
    assert follow_policy_rewards(online, policy) == online
    options = OnlineSettings(reward_options=RewardSettings(clip=1.0))
    followed = follow_policy_rewards(options, policy)
    assert followed.rewards == WEIGHTS and followed.reward_options == options.reward_options


def test_without_a_policy_stage_it_is_the_task():
    assert follow_policy_rewards(OnlineSettings(), None).rewards == {"task": 1.0}


def test_a_learned_component_needs_its_model(caplog):
    options = RewardSettings(normalise=("learned", "length"))
    policy = PolicySettings(rewards={**WEIGHTS, "learned": 0.1}, reward_options=options)
    with caplog.at_level(logging.WARNING):
        without = follow_policy_rewards(OnlineSettings(), policy)
    assert without.rewards == WEIGHTS and without.reward_options.normalise == ("length",)
    assert "set online.reward_model" in caplog.text
    with_model = follow_policy_rewards(OnlineSettings(reward_model="models/judge"), policy)
    assert with_model.rewards == policy.rewards and with_model.reward_options == options
    only = PolicySettings(rewards={"learned": 1.0})
    assert follow_policy_rewards(OnlineSettings(), only).rewards == {"task": 1.0}
