"""Credit by step inside the trainer: advantages of tokens, rewards before a critic, replay, resume, batches."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.letters import (
    LOW,
    FewLetters,
    Letters,
    capture_update,
    make_trainer,
    resumes_bit_for_bit,
)

from rl_core.data.tokenizer import train_tokenizer
from rl_core.distributed import SINGLE_PROCESS
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import (
    CriticSettings,
    PolicySettings,
    ReplaySettings,
    RewardSettings,
    SamplingSettings,
)
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import ReplayBuffer, TrainingSample
from rl_core.trainers.policy_gradient.token_credit import place_step_rewards

MODULE = """
def check(steps, trajectory):
    return [len(step) % 3 / 2 for step in steps]


def has_b(steps, trajectory):
    return [float("b" in step) for step in steps]
"""


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "steps.py"
    path.write_text(MODULE)
    return f"{path}:check"


def build_options(aggregate="mean", **more):
    return RewardSettings(process={"function": "a.py:f", "aggregate": aggregate, **more})


def build_sample(steps, *, reward, value, weight=1.0, mask=(True, True, True, True), **more):
    row = TrainRow([1, 2], [10, 11, 12, 13], list(mask), [0.0] * 4)
    return TrainingSample(
        row, reward, False, steps=steps, step_value=value, step_weight=weight, **more
    )


def estimate(groups, aggregate="mean", **options):
    settings = PolicySettings(
        algorithm="dr_grpo",
        rewards={"task": 1.0, "process": 1.0},
        reward_options=build_options(aggregate),
        **options,
    )
    step = SimpleNamespace(process_group=SINGLE_PROCESS)
    actor_critic = SimpleNamespace(
        teacher=None,
        device=torch.device("cpu"),
        custom_functions=SimpleNamespace(advantages=None),
        role_baselines=None,
        optimizer_step=step,
    )
    buffer = RolloutBuffer(actor_critic, settings, groups)
    return buffer, buffer.estimate_advantages()


def two_rollouts():
    """Return one that succeeds with steps 1 and 0, and one that fails with a step 0.5; the reward holds both."""
    good = build_sample([(1, 1.0), (3, 0.0)], reward=1.0 + 2 * 0.5, value=0.5, weight=2.0)
    bad = build_sample([(3, 0.5)], reward=0.0 + 2 * 0.5, value=0.5, weight=2.0)
    return [good, bad]


def test_advantages_of_tokens_by_hand():
    group = two_rollouts()
    buffer, metrics = estimate([group])
    # outcomes 1 and 0: +-1/2. Scores 1, 0, 1/2 less their mean: 1/2, -1/2, 0; the mean of the following ones of the
    # first rollout: 0, then -1/2. Twice that on top.
    assert buffer.advantages_RS.tolist() == [
        [0, 0, 0.5, 0.5, -0.5, -0.5],
        [0, 0, -0.5, -0.5, -0.5, -0.5],
    ]
    assert [sample.advantage for sample in group] == [0.5, -0.5]
    # of 0, -1/2, 0
    assert metrics["train/process_advantages_std"] == pytest.approx((0.25 / 3 - 1 / 36) ** 0.5)
    summed, _ = estimate([two_rollouts()], "sum")
    assert torch.equal(summed.advantages_RS[0], torch.tensor([0, 0, 0.5, 0.5, -0.5, -0.5]))
    lowest, _ = estimate([two_rollouts()], "min")
    assert lowest.advantages_RS[0].tolist() == [0, 0, -0.5, -0.5, -0.5, -0.5]


def test_the_outcome_is_compared_without_the_steps():
    good = build_sample([(3, 0.25)], reward=1.0 + 2 * 0.25, value=0.25, weight=2.0)
    bad = build_sample([(3, 1.0)], reward=0.0 + 2 * 1.0, value=1.0, weight=2.0)
    estimate([[good, bad]])
    assert [good.outcome_reward, bad.outcome_reward] == [1.0, 0.0]
    assert [good.advantage, bad.advantage] == [0.5, -0.5]  # though the bad one earned more in all


def test_masked_and_replayed_samples():
    good, bad = two_rollouts()
    masked = build_sample([], reward=9.0, value=0.0, is_masked=True)
    replayed = build_sample(
        [(3, 9.0)],
        reward=0.0,
        value=9.0,
        advantage=0.25,
        token_advantages=[2.0, 3.0, 0.0, 4.0],
        is_replayed=True,
    )
    buffer, _ = estimate([[good, masked, bad], [replayed]])
    assert buffer.advantages_RS.tolist() == [
        [0, 0, 0.5, 0.5, -0.5, -0.5],
        [0] * 6,
        [0, 0, -0.5, -0.5, -0.5, -0.5],
        [0, 0, 2.0, 3.0, 0, 4.0],
    ]


def test_rewards_of_steps_sum_to_the_process_reward():
    settings = PolicySettings(rewards={"process": 1.0}, reward_options=build_options("min"))
    samples = [
        build_sample([(1, 1.0), (3, 0.25)], reward=0.5, value=0.25, weight=2.0),
        build_sample([(0, 1.0), (3, 0.5)], reward=0, value=0, mask=(False, True, True, False)),
        build_sample([(3, 1.0)], reward=0, value=0, mask=(False,) * 4),
    ]
    mask = torch.tensor([[False, False, *sample.row.loss_mask] for sample in samples])
    placed = place_step_rewards(samples, mask, settings)
    # the minimum falls from 1 to 1/4; a masked end moves to the last loss token before it, else to the first
    assert placed.tolist() == [
        [0, 0, 0, 2.0, 0, -1.5],
        [0, 0, 0, 1.0, -0.5, 0],
        [0] * 6,
    ]


def build_run(tokenizer, function, environment=None, aggregate="mean", **options):
    rewards = RewardOrchestrator(
        {"task": 1.0, "process": 0.5},
        options=RewardSettings(
            process={"function": function, "delimiter": "a", "aggregate": aggregate}
        ),
        decode=lambda ids: tokenizer.decode(ids),
    )
    return make_trainer(
        tokenizer,
        environment or Letters(),
        rewards=rewards,
        reward_options=rewards.options,
        sampling=SamplingSettings(max_completion_tokens=8),
        **{"curriculum": LOW, **options},
    )


@pytest.mark.parametrize("aggregate", ["sum", "mean", "min"])
def test_returns_of_a_critic_hold_the_rewards_of_steps(tokenizer, function, monkeypatch, aggregate):
    updates = capture_update(monkeypatch)
    trainer = build_run(
        tokenizer, function, aggregate=aggregate, algorithm="ppo", gae_lambda=1.0, gamma=1.0
    )
    trainer.step()
    buffer = updates[0].buffer
    assert any(len(sample.steps) > 1 for sample in buffer.samples)
    for row, sample in enumerate(buffer.samples):
        start = len(sample.row.prompt_ids)
        returns = buffer.returns_RS[row, start : start + len(sample.row.completion_ids)]
        # With lambda = gamma = 1 the first return is the total reward, the last one what is earned at its token.
        assert float(returns[0]) == pytest.approx(sample.reward, abs=1e-5)
        scores = [score for _, score in sample.steps]
        value = {"sum": sum, "min": min, "mean": lambda row: sum(row) / len(row)}[aggregate](scores)
        assert sample.step_value == pytest.approx(value) and sample.step_weight == 0.5
        before = [score for end, score in sample.steps if end < len(sample.row.completion_ids) - 1]
        earned = {
            "sum": sum(before),
            "mean": sum(before) / len(scores),
            "min": min(before, default=0.0),
        }[aggregate]
        assert float(returns[-1]) == pytest.approx(sample.reward - 0.5 * earned, abs=1e-5)


RECIPES = {
    "grpo": dict(algorithm="grpo", epochs=2),
    "ppo": dict(algorithm="ppo", epochs=2),
    "ppo replay": dict(
        algorithm="ppo",
        importance="token",
        critic=CriticSettings(),
        replay=ReplaySettings(iterations=2, share=0.5),
    ),
    "replay": dict(
        algorithm="grpo", importance="token", replay=ReplaySettings(iterations=2, share=0.5)
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_has_the_same_bits(tokenizer, function, name):
    assert resumes_bit_for_bit(
        lambda: build_run(tokenizer, function, FewLetters(), **RECIPES[name])
    )


def test_the_replay_buffer_restores_steps():
    sample = build_sample([(1, 0.25), (3, 1 / 3)], reward=1.0, value=0.7, weight=0.3, advantage=0.0)
    plain = build_sample([], reward=1.0, value=0.0, advantage=0.0)
    buffer = ReplayBuffer(ReplaySettings(iterations=1, share=1.0))
    buffer.add_groups([[sample, plain]])
    restored = ReplayBuffer(buffer.settings)
    restored.load_state_dict(buffer.state_dict())
    for each in (buffer, restored):
        [samples] = each.draw_groups(np.random.default_rng(0), 1)
        assert list(samples[0].steps) == [(1, 0.25), (3, 1 / 3)]
        assert (samples[0].step_value, samples[0].step_weight) == (0.7, 0.3)
        assert not samples[1].steps
    assert "steps" not in ReplayBuffer(buffer.settings).state_dict()


def test_prefix_sharing_and_micro_batches_change_nothing(tokenizer, function, monkeypatch):
    updates = capture_update(monkeypatch)
    for algorithm in ("grpo", "ppo"):
        trainers = [
            build_run(tokenizer, function, algorithm=algorithm, micro_batch_tokens=tokens)
            for tokens in (1, 4096)
        ]
        for trainer in trainers:
            trainer.step()
        apart, shared = (update.buffer.advantages_RS for update in updates[-2:])
        assert torch.allclose(apart, shared, atol=1e-5) and bool(apart.any())
        for ours, theirs in zip(
            trainers[0].policy.parameters(), trainers[1].policy.parameters(), strict=True
        ):
            assert torch.allclose(ours, theirs, atol=2e-4)


def test_a_stage_of_the_curriculum_may_weigh_it_with_zero(tokenizer, function, monkeypatch):
    updates = capture_update(monkeypatch)
    stage = dataclasses.replace(LOW[0], rewards={"process": 0.0})
    trainer = build_run(tokenizer, function, curriculum=(stage,))
    trainer.step()
    for sample in updates[0].buffer.samples:
        assert (sample.step_weight, sample.outcome_reward) == (0.0, sample.reward)


@pytest.mark.slow
def test_learning_from_steps_alone(tokenizer, function):
    """Check that a policy raises the scores of its steps where nothing else rewards it."""
    rewards = RewardOrchestrator(
        {"process": 1.0},
        options=RewardSettings(
            process={"function": function.replace(":check", ":has_b"), "delimiter": "a"}
        ),
        decode=lambda ids: tokenizer.decode(ids),
    )
    trainer = make_trainer(
        tokenizer,
        Letters(),
        rewards=rewards,
        reward_options=rewards.options,
        sampling=SamplingSettings(max_completion_tokens=8),
        curriculum=LOW,
    )
    scores = [trainer.step()["reward/process/step_score"] for _ in range(25)]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.3
