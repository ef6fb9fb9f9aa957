"""Policy optimisation with components that use hidden states, change with the curriculum, or fail on a sample."""

import copy
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from helpers.letters import (
    LOW,
    LetterEpisode,
    Letters,
    capture_update,
    comparable,
    make_trainer,
    weights,
)

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Step
from rl_core.losses.advantages import fill_masked_rewards, group_advantages
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.rollout_log import RewardRecord
from rl_core.settings import (
    CuriositySettings,
    CurriculumStage,
    LengthSettings,
    ReplaySettings,
    RewardSettings,
    SamplingSettings,
)
from rl_core.trainers.policy_gradient.advantages import compute_advantage_metrics
from rl_core.trainers.policy_gradient.samples import ReplayBuffer, build_sample_groups
from rl_core.trainers.policy_gradient.update import PolicyUpdate

FAULTY = "faulty_reward_for_test:score"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


class TwoTurns(LetterEpisode):
    """Episode with an observation after the first action; the second one is judged."""

    heard = 0

    def act(self, text):
        self.heard += 1
        if self.heard == 1:
            return Step([{"role": "user", "content": "low" if text[:1].lower() < "n" else "high"}])
        return super().act(text)


class TwoTurnLetters(Letters):
    def episode(self, seed, level):
        self.check_level(level)
        return TwoTurns(seed, level)


@pytest.fixture
def faulty_rewards(monkeypatch):
    """Return a reward of 0 that is NaN on the second sample of every group."""
    module = types.ModuleType("faulty_reward_for_test")
    module.score = lambda trajectories: [math.nan if t.sample == 1 else 0.0 for t in trajectories]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return RewardOrchestrator(
        {"task": 1.0, FAULTY: 1.0}, options=RewardSettings(max_failed_share=0.2)
    )


def test_masked_rewards_by_hand():
    rewards = torch.tensor([[1.0, 9.0, 3.0], [5.0, 6.0, 7.0], [9.0, 9.0, 9.0]])
    masked = torch.tensor([[False, True, False], [False] * 3, [True] * 3])
    filled = torch.stack(fill_masked_rewards(rewards.unbind(), masked.unbind()))
    assert filled.tolist() == [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [pytest.approx(22 / 5)] * 3]
    untouched = fill_masked_rewards(rewards.unbind(), torch.zeros(3, 3, dtype=torch.bool).unbind())
    assert torch.equal(torch.stack(untouched), rewards)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "ppo"])
def test_masked_rollouts_carry_no_loss(tokenizer, faulty_rewards, monkeypatch, algorithm):
    updates = capture_update(monkeypatch)
    options = (
        {"overlong_buffer": 1} if algorithm == "grpo" else {}
    )  # a penalty is added after the masking
    trainer = make_trainer(
        tokenizer,
        rewards=faulty_rewards,
        algorithm=algorithm,
        entropy_coef=1e-9,
        curriculum=LOW,
        **options,
    )
    metrics = trainer.step()
    buffer = updates[0].buffer
    masked = [sample.is_masked for sample in buffer.samples]
    assert masked == [False, True, False, False, False, False] * 6
    lost = torch.tensor(masked)
    assert not buffer.mask_RS[lost].any() and not buffer.advantages_RS[lost].any()
    assert all(buffer.mask_RS[index].any() for index in range(36) if not masked[index])
    assert metrics["reward/masked_rate"] == pytest.approx(1 / 6)
    rollouts = [r for g in trainer.groups for r in g.rollouts]
    others = [r.reward for r in rollouts if not r.is_masked]
    assert metrics["reward/mean"] == pytest.approx(sum(others) / 30)
    if algorithm != "grpo":
        return
    assert all(("overlong" in r.trajectory.rewards) != r.is_masked for r in rollouts)
    for group in trainer.groups:
        known = [r.reward for r in group.rollouts if not r.is_masked]
        expected = group_advantages(torch.tensor([known], dtype=torch.float64))[0].tolist()
        expected.insert(1, 0.0)
        assert group.advantages == pytest.approx(expected, abs=1e-12) and group.advantages[1] == 0
    credit = [
        (a, sum(r.loss_mask))
        for g in trainer.groups
        for r, a in zip(g.rollouts, g.advantages, strict=True)
    ]
    tokens = sum(
        sum(r.loss_mask) for r in rollouts if not r.is_masked
    )  # a masked one counts in no denominator
    assert metrics["train/loss"] == pytest.approx(-sum(a * n for a, n in credit) / tokens, abs=1e-6)


ALGORITHMS = ("grpo", "dr_grpo", "rloo", "gspo", "reinforce", "ppo")


def run_update(trainer, groups):
    """Run one update on these samples; return it with its metrics."""
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, groups)
    return update, update.run_optimizer_steps(np.random.default_rng(0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_masked_samples_count_as_if_they_had_not_been_played(tokenizer, algorithm):
    trainers = [
        make_trainer(tokenizer, algorithm=algorithm, group_size=8, curriculum=LOW) for _ in range(2)
    ]
    trainers[0].groups = trainers[0]._play_and_score(np.random.default_rng(3))[1]
    with_masked, known_only = (build_sample_groups(trainers[0].groups) for _ in range(2))
    for number, group in enumerate(with_masked):
        for index, sample in enumerate(group):
            sample.is_masked = number == 0 or index >= 2  # a whole group, and 6 of 8 of the others
            sample.reward = 7.5 if sample.is_masked else float(index == 0)
    known_only = [group[:2] for group in known_only[1:]]
    for group in known_only:
        group[0].reward, group[1].reward = 1.0, 0.0
    masked_update, masked_metrics = run_update(trainers[0], with_masked)
    known_update, known_metrics = run_update(trainers[1], known_only)
    first, second = (
        # Adam's first moments: the gradients.
        torch.cat(
            [state["exp_avg"].flatten() for state in t.optimizer_step.optimizer.state.values()]
        )
        for t in trainers
    )
    assert first.abs().max() > 0 and torch.allclose(first, second, rtol=1e-4, atol=1e-7)
    learned = [s for s in masked_update.buffer.samples if not s.is_masked]
    expected = [sample.advantage for sample in known_update.buffer.samples]
    assert [sample.advantage for sample in learned] == pytest.approx(expected)
    assert masked_metrics == pytest.approx(known_metrics, rel=1e-4, abs=1e-7)
    statistics = [
        compute_advantage_metrics(
            update.buffer.samples,
            update.buffer.advantages_RS,
            update.buffer.mask_RS,
            filter_threshold=0,
        )
        for update in (masked_update, known_update)
    ]
    assert statistics[0] == pytest.approx(statistics[1], abs=1e-6)
    if algorithm == "grpo":  # 0.5 / (std of 0 and 1, 0.7071, + 1e-4); filled up to 8 it was 1.870
        assert expected[:2] == pytest.approx([0.70701, -0.70701], abs=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_iteration_of_masked_samples_alone_changes_nothing(tokenizer, algorithm):
    trainer = make_trainer(tokenizer, algorithm=algorithm, curriculum=LOW)
    trainer.groups = trainer._play_and_score(np.random.default_rng(3))[1]
    for group in trainer.groups:
        for rollout in group.rollouts:
            rollout.is_masked = True
    before = weights(trainer)
    metrics = trainer._update_policy(np.random.default_rng(0))
    assert torch.equal(weights(trainer), before)
    assert metrics["train/empty_updates"] == 1 and "train/loss" not in metrics
    assert not {"train/advantages_mean", "value/returns_mean"} & metrics.keys()


def test_an_estimator_of_the_user_sees_unmasked_rewards_only(tokenizer, faulty_rewards):
    seen = []

    def center(rewards_R, groups_R, lengths_R):
        seen.append((groups_R.tolist(), len(lengths_R)))
        return rewards_R - rewards_R.mean(), {}

    trainer = make_trainer(
        tokenizer,
        rewards=faulty_rewards,
        curriculum=LOW,
        advantages="test:center",
        custom={"advantages": center},
    )
    trainer.step()
    assert seen[-1] == ([number for number in range(6) for _ in range(5)], 30)
    assert all(group.advantages[1] == 0 for group in trainer.groups)


def test_a_refill_whose_rewards_all_fail_keeps_the_first_round(tokenizer, monkeypatch):
    module = types.ModuleType("faulty_reward_for_test")
    rounds = []

    def score(trajectories):
        if len(trajectories) > 1:
            rounds.append(len(trajectories))
        failing = len(rounds) > 1
        equal = {t.seed for t in trajectories[:18]}  # groups without a signal: they are refilled
        return [
            math.nan if failing else 5.0 * (t.seed not in equal) * t.sample for t in trajectories
        ]

    module.score = score
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rewards = RewardOrchestrator({FAULTY: 1.0}, options=RewardSettings(max_failed_share=1))
    trainer = make_trainer(tokenizer, rewards=rewards, curriculum=LOW, dynamic_sampling_tries=1)
    metrics = trainer.step()
    assert rounds[0] == 36 and len(rounds) > 1 and metrics["train/dropped_group_rate"] > 0
    assert metrics["train/trained_rollouts"] > 0 and math.isfinite(metrics["reward/mean"])
    assert 0 < metrics["reward/masked_rate"] < 1


def test_a_masked_rollout_has_the_mean_of_the_others_after_the_length_penalty(
    tokenizer, faulty_rewards
):
    trainer = make_trainer(tokenizer, rewards=faulty_rewards, overlong_buffer=2, curriculum=LOW)
    trainer.step()
    assert any(r.trajectory.rewards.get("overlong") for g in trainer.groups for r in g.rollouts)
    for group in trainer.groups:
        parts = [r.trajectory.rewards for r in group.rollouts if not r.is_masked]
        others = [rewards["task"] + rewards["overlong"] for rewards in parts]
        (masked,) = [r for r in group.rollouts if r.is_masked]
        assert masked.reward == masked.trajectory.reward == pytest.approx(sum(others) / 5)


def test_replayed_samples_stay_masked(tokenizer, faulty_rewards):
    trainer = make_trainer(tokenizer, rewards=faulty_rewards, curriculum=LOW)
    trainer.step()
    groups = build_sample_groups(trainer.groups)
    buffer, resumed = ReplayBuffer(ReplaySettings()), ReplayBuffer(ReplaySettings())
    buffer.add_groups(groups)
    resumed.load_state_dict(buffer.state_dict())
    for actual, group in zip(resumed._past_iterations[0], groups, strict=True):
        assert [s.is_masked for s in actual] == [s.is_masked for s in group] and any(
            s.is_masked for s in actual
        )
        assert all(s.is_replayed for s in actual)


def test_weights_follow_the_curriculum(tokenizer):
    stages = (
        CurriculumStage(name="plain", levels={"low": 1.0}, max_iterations=1),
        CurriculumStage(name="short", levels={"low": 1.0}, rewards={"length": 0.5}),
    )
    options = RewardSettings(length=LengthSettings(free=1, limit=3))
    rewards = RewardOrchestrator({"task": 1.0, "length": 0.0}, options=options)
    trainer = make_trainer(tokenizer, rewards=rewards, curriculum=stages)
    first, second = trainer.step(), trainer.step()
    assert first["reward/length"] < 0 == first["reward/weighted/length"]
    assert second["reward/weighted/length"] == pytest.approx(0.5 * second["reward/length"])
    assert second["reward/mean"] == pytest.approx(
        second["reward/task"] + 0.5 * second["reward/length"]
    )
    assert second["reward/alarm"] == 0 and second["reward/correlation/task"] == pytest.approx(1.0)


def build_resumable_trainer(tokenizer, record=None):
    options = RewardSettings(
        normalise=("length", "task"),
        clip=4.0,
        window=3,
        length=LengthSettings(free=1, limit=6),
        curiosity=CuriositySettings(hidden=8),
    )
    parts = {
        "task": 1.0,
        "curiosity": 0.5,
        "coherence": 0.2,
        "tool_use": 0.1,
        "format": 0.1,
        "length": 0.1,
    }
    trainer = make_trainer(
        tokenizer,
        TwoTurnLetters(),
        rewards=RewardOrchestrator(parts, options=options, seed=3),
        curriculum=LOW,
        iterations=6,
        sampling=SamplingSettings(max_completion_tokens=24, max_turns=2),
        replay=ReplaySettings(),
        importance="token",
    )
    trainer.record = record
    return trainer


def test_resumes_bit_for_bit_with_every_component(tokenizer, tmp_path):
    uninterrupted, first, second = (
        build_resumable_trainer(tokenizer, RewardRecord(tmp_path / name))
        for name in ("whole", "resumed", "resumed")
    )
    expected = [comparable(uninterrupted.step()) for _ in range(6)]
    assert float.fromhex(expected[0]["reward/curiosity/transitions"]) > 0
    assert (
        "reward/coherence/similarity" in expected[0]
        and "reward/correlation/curiosity" in expected[-1]
    )
    actual = [comparable(first.step()) for _ in range(3)]
    saved = copy.deepcopy(
        (first.model.state_dict(), first.optimizer_step.state_dict(), first.state_dict())
    )
    first.step()  # lost in the crash
    second.model.load_state_dict(saved[0])
    second.optimizer_step.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    actual += [comparable(second.step()) for _ in range(3)]
    assert actual == expected
    assert torch.equal(weights(second), weights(uninterrupted))
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "whole").read_text().splitlines()]
    assert len(rows) == 6 * 36
    for row in rows:
        added = [value for name, value in row["rewards"].items() if name.startswith("weighted/")]
        assert len(added) == 6 and row["reward"] == math.fsum(added)


@pytest.mark.parametrize("part", ["components", "norms", "watch"])
def test_every_saved_part_of_the_rewards_matters(tokenizer, part):
    uninterrupted, second = build_resumable_trainer(tokenizer), build_resumable_trainer(tokenizer)
    for _ in range(3):
        uninterrupted.step()
    second.model.load_state_dict(copy.deepcopy(uninterrupted.model.state_dict()))
    second.optimizer_step.load_state_dict(copy.deepcopy(uninterrupted.optimizer_step.state_dict()))
    state = copy.deepcopy(uninterrupted.state_dict())
    state["rewards"][part] = build_resumable_trainer(tokenizer).state_dict()["rewards"][part]
    second.load_state_dict(state)
    assert comparable(second.step()) != comparable(uninterrupted.step())
