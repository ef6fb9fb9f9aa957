"""Rewards of held-out episodes: an evaluation scores them by the rewards in its settings."""

import pytest

import rl_core
from rl_core.api.evaluation import evaluate_heldout
from rl_core.environments.prompts import Prompts
from rl_core.errors import SettingsError
from rl_core.rollouts.heldout_episodes import draw_heldout_requests

REWARD = """
def size(trajectories, scale):
    return [float(t.num_action_tokens) * s for t, s in zip(trajectories, scale, strict=True)]
"""


@pytest.fixture(scope="module")
def policy():
    return rl_core.create_policy(["a b"], rl_core.ModelSettings(preset="nano", vocab_size=300))


def evaluate_policy(policy, **named):
    rows = [{"prompt": f"say {n}", "scale": n % 3 + 1} for n in range(12)]
    environment = Prompts(rows[:6], rows[6:])
    sampling = rl_core.SamplingSettings(max_completion_tokens=8)
    settings = rl_core.EvaluationSettings(episodes=6, sampling=sampling, **named)
    return evaluate_heldout(
        policy, environment, draw_heldout_requests(environment, settings, 0), settings, 0
    )


def test_a_function_of_columns_scores_both_evaluations(policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scored.py").write_text(REWARD)
    for result in evaluate_policy(policy, rewards={"scored.py:size": 0.5}):
        expected = [0.5 * t.num_action_tokens * t.row["scale"] for t in result.trajectories]
        assert [t.reward for t in result.trajectories] == pytest.approx(expected) and sum(
            expected
        ) > 0
        assert result.reward_mean == pytest.approx(sum(expected) / 6)
    assert evaluate_policy(policy)[0].reward_mean == 0.0  # rows without a verifier give no reward


def test_rewards_that_look_at_a_model_are_refused(policy):
    with pytest.raises(SettingsError, match="need a model in training"):
        evaluate_policy(policy, rewards={"coherence": 1.0})
