"""Rewards of held-out episodes: an evaluation scores them by the rewards in its settings."""

import json

import pytest

import rl_core
from rl_core.api.evaluation import evaluate_heldout
from rl_core.environments.prompts import Prompts
from rl_core.errors import DataError, SettingsError
from rl_core.evaluation import compute_paired_differences
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


def test_success_is_none_where_nothing_tells_it(policy):
    rows = [{"prompt": f"say {n}", "target": "1"} for n in range(6)]
    settings = rl_core.EvaluationSettings(
        sampling=rl_core.SamplingSettings(max_completion_tokens=8), samples=2
    )
    size = lambda trajectories: [1.0 + t.sample for t in trajectories]  # noqa: E731
    result = rl_core.evaluate(policy, prompts=rows, reward=size, settings=settings)
    assert result.success_rate is None and result.interval is None and result.total is None
    assert result.by_level == result.by_kind == result.pass_at_k == {}
    assert {t.success for t in result.trajectories} == {None} and result.reward_mean == 1.5
    assert not [name for name in result.metrics() if "success" in name or "pass_at" in name]
    row = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert row["success_rate"] is None and row["episodes"][0]["successes"] is None
    again = rl_core.Evaluation.from_json(row)
    assert again.success_rate is None and again.episodes == result.episodes
    paired = rl_core.compare(result, again)
    assert paired.success is None and paired.reward.difference == 0 and paired.wins == 0
    with pytest.raises(DataError, match=r"success is unknown: .* by reward"):
        compute_paired_differences(result, again)
    judged = Prompts(rows, rows, verifier="exact")
    assert rl_core.evaluate(policy, judged, settings=settings).success_rate == 0.0


def test_prompts_obey_the_number_of_episodes(policy):
    rows = [{"prompt": f"say {n}", "level": "ab"[n % 2]} for n in range(9)]
    sampling = rl_core.SamplingSettings(max_completion_tokens=4)

    def count(**options):
        settings = rl_core.EvaluationSettings(sampling=sampling, **options)
        result = rl_core.evaluate(policy, prompts=rows, settings=settings)
        return [sum(e.level == level for e in result.episodes) for level in "ab"]

    assert count() == count(episodes=9) == [5, 4]
    assert count(episodes=4) == [2, 2] and count(episodes=3, levels=("b",)) == [0, 3]
