"""Options of policy optimisation: limits, importance weights, replay, refills, KL and entropy schedules."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers.letters import LOW, make_trainer, weights
from helpers.policy_recipes import build_recipe

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.models import causal_lm
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import (
    CriticSettings,
    KLBandSettings,
    LoraSettings,
    ModelSettings,
    PolicySettings,
    ReplaySettings,
    SamplingSettings,
)
from rl_core.trainers.policy_gradient.losses import (
    compute_next_kl_coef,
)
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import (
    ReplayBuffer,
    TrainingSample,
    build_sample_groups,
)
from rl_core.trainers.policy_gradient.update import PolicyUpdate
from rl_core.types import StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def play_groups(trainer):
    return [rollout for group in trainer.groups for rollout in group.rollouts]


def test_a_step_beyond_the_kl_limit_is_rolled_back(tokenizer):
    trainer = make_trainer(tokenizer, kl_max=1e-6, epochs=3, curriculum=LOW)
    before, state = weights(trainer), copy.deepcopy(trainer.optimizer_step.optimizer.state_dict())
    metrics = trainer.step()
    assert metrics["policy/refused_steps"] == 1 and metrics["policy/kl_after_max"] > 1e-6
    assert torch.equal(weights(trainer), before)
    assert str(trainer.optimizer_step.optimizer.state_dict()) == str(state)
    assert trainer.optimizer_step.num_steps == 3  # the x axis continues
    free = make_trainer(tokenizer, kl_max=100.0, epochs=3, curriculum=LOW)
    baseline = make_trainer(tokenizer, epochs=3, curriculum=LOW)
    free_metrics, baseline_metrics = free.step(), baseline.step()
    assert free_metrics["policy/refused_steps"] == 0
    assert torch.equal(weights(free), weights(baseline))  # a limit that is not met changes nothing
    assert free_metrics["train/loss"] == baseline_metrics["train/loss"]


def test_the_limit_ends_the_epochs_but_keeps_what_was_within_it(tokenizer):
    trainer = make_trainer(tokenizer, kl_max=0.01, epochs=8, learning_rate=1e-3, curriculum=LOW)
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["policy/refused_steps"] == 1 and 0 < metrics["train/empty_updates"] < 8
    assert not torch.equal(weights(trainer), before)


def test_a_trust_region_holds_the_policy_near_the_old_one(tokenizer):
    moved = {}
    for coef in (0.0, 10.0):
        trainer = make_trainer(tokenizer, trust_region_coef=coef, epochs=4, curriculum=LOW)
        moved[coef] = [trainer.step()["policy/update_kl"] for _ in range(3)]
    assert sum(moved[10.0]) < 0.7 * sum(moved[0.0])


def test_importance_weights_follow_from_stale_samples(tokenizer):
    trainer = make_trainer(tokenizer, importance="token", importance_cap=2.0, kl_max=None)
    metrics = trainer.step()
    assert metrics["policy/importance_mean"] == pytest.approx(1, abs=1e-4)  # fresh rollouts
    assert metrics["policy/effective_sample_share"] == pytest.approx(1, abs=1e-4)
    group = [
        TrainingSample(TrainRow([5], [6, 7], [True, True], [-60.0, 0.0]), 1.0, False),
        TrainingSample(TrainRow([5], [6, 7], [True, True], [-60.0, 0.0]), 0.0, False),
    ] * 3
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, [group] * 6)
    metrics = update.run_optimizer_steps(np.random.default_rng(0))
    # the first token was almost impossible for the sampler (weight 2, the cap), the second certain (weight pi)
    share = metrics["policy/importance_mean"]
    assert 1.0 < share < 1.5 and metrics["policy/effective_sample_share"] < 0.9


def test_replayed_samples_keep_their_advantage_and_are_drawn_once(tokenizer):
    trainer = build_recipe(tokenizer, "replay")
    trainer.step()
    first = {id(s.row) for s in trainer._replay._past_iterations[0][0]}
    metrics = trainer.step()
    assert metrics["train/replayed_rollouts"] == 18 and metrics["train/trained_rollouts"] <= 54
    assert first and all(
        s.advantage is not None for g in trainer._replay._past_iterations[0] for s in g
    )
    drawn = [s for group in trainer._replay.draw_groups(np.random.default_rng(0), 6) for s in group]
    assert (
        len(drawn) == 18
        and len({id(s.row) for s in drawn}) == 18
        and all(s.is_replayed for s in drawn)
    )
    copied = ReplayBuffer(trainer.settings.replay)
    copied.load_state_dict(trainer._replay.state_dict())
    assert copied.state_dict().keys() == trainer._replay.state_dict().keys()
    redrawn = [s for group in copied.draw_groups(np.random.default_rng(0), 6) for s in group]
    assert redrawn == [
        TrainingSample(
            TrainRow(
                list(s.row.prompt_ids),
                list(s.row.completion_ids),
                list(s.row.loss_mask),
                list(s.row.sampler_logprobs),
            ),
            s.reward,
            s.is_truncated,
            s.advantage,
            True,
        )
        for s in drawn
    ]
    for _ in range(3):
        trainer.step()
    assert len(trainer._replay._past_iterations) == 2


@pytest.mark.parametrize(
    ("stop_reason", "bootstrap_limits", "expected"),
    [
        (StopReason.TERMINATED, True, False),
        (StopReason.ENVIRONMENT, False, True),  # the environment would have continued
        (
            StopReason.MAX_TOKENS,
            False,
            False,
        ),  # otherwise a policy earns the critic's value by never ending
        (StopReason.MAX_TURNS, False, False),
        (StopReason.MAX_TOKENS, True, True),
        (StopReason.MAX_TURNS, True, True),
    ],
)
def test_what_a_cut_rollout_is_worth_afterwards(tokenizer, stop_reason, bootstrap_limits, expected):
    trainer = make_trainer(
        tokenizer, algorithm="ppo", critic=CriticSettings(bootstrap_limits=bootstrap_limits)
    )
    trainer.step()
    for rollout in (rollout for group in trainer.groups for rollout in group.rollouts):
        rollout.trajectory.stop_reason = stop_reason
        rollout.is_truncated = stop_reason is not StopReason.TERMINATED
    groups = build_sample_groups(trainer.groups, bootstrap_limits=bootstrap_limits)
    assert [len(group) for group in groups] == [6] * 6
    assert all(sample.is_truncated is expected for group in groups for sample in group)


def test_dynamic_sampling_refills_groups_without_a_difference(tokenizer):
    baseline = make_trainer(tokenizer, algorithm="grpo", group_size=2)
    baseline.step()
    flat = sum(len(set(group.rewards)) == 1 for group in baseline.groups)
    assert flat > 0
    trainer = make_trainer(
        tokenizer, algorithm="dapo", group_size=2, overlong_buffer=0, dynamic_sampling_tries=4
    )
    metrics = trainer.step()
    assert all(len(set(group.rewards)) == 2 for group in trainer.groups)
    assert metrics["train/dropped_group_rate"] > 0 and metrics["train/zero_advantage_rate"] == 0
    assert trainer.rollouts_played > 12
    bounded = make_trainer(
        tokenizer,
        algorithm="dapo",
        rewards=RewardOrchestrator({"tool_use": 1.0}),
        overlong_buffer=0,
    )
    before = weights(bounded)
    metrics = bounded.step()
    assert bounded.rollouts_played == 3 * 36 and not bounded.groups  # once, and refilled twice
    assert metrics["train/empty_updates"] == 1 and torch.equal(weights(bounded), before)


def test_the_overlong_penalty_is_part_of_the_reward(tokenizer):
    trainer = make_trainer(tokenizer, algorithm="dapo", overlong_buffer=2, dynamic_sampling_tries=0)
    metrics = trainer.step()
    penalties = []
    for rollout in play_groups(trainer):
        expected = {1: 0.0, 2: -0.5, 3: -1.0}[len(rollout.completion_ids)]
        penalties.append(expected)
        assert rollout.reward == pytest.approx(rollout.trajectory.rewards["task"] + expected)
    assert len(set(penalties)) > 1
    assert metrics["reward/overlong"] == pytest.approx(sum(penalties) / 36)
    assert metrics["reward/mean"] == pytest.approx(sum(r.reward for r in play_groups(trainer)) / 36)


def test_a_kl_reward_changes_the_comparison(tokenizer):
    trainer = build_recipe(tokenizer, "kl_reward", kl_coef=0.5, algorithm="dr_grpo")
    for _ in range(4):
        metrics = trainer.step()
    kl = metrics["policy/ref_kl"]
    assert abs(kl) > 1e-4
    rewards = torch.tensor([group.rewards for group in trainer.groups])
    baseline = (rewards - rewards.mean(1, keepdim=True)).flatten()
    arguments = torch.tensor([a for group in trainer.groups for a in group.advantages])
    assert not torch.allclose(baseline, arguments, atol=1e-3)
    assert arguments.view(6, 6).sum(1).abs().max() < 1e-4  # still compared within the group


@pytest.mark.parametrize(
    ("options", "is_measured"),
    [
        ({}, False),  # a single step on fresh rollouts: the sampler's log-probs suffice
        ({"epochs": 2}, True),
        ({"kl_max": 100.0}, True),
        ({"importance": "token"}, True),
        ({"autocast": "bfloat16"}, True),
    ],
)
def test_a_kl_reward_takes_the_samplers_log_probs_where_they_are_the_policys(
    tokenizer, monkeypatch, options, is_measured
):
    calls = []
    compute = RolloutBuffer.compute_old_logprobs

    def count_calls(buffer, plan):
        calls.append(1)
        compute(buffer, plan)

    monkeypatch.setattr(RolloutBuffer, "compute_old_logprobs", count_calls)
    results = []
    for forced in (False, True):
        trainer = build_recipe(tokenizer, "kl_reward", kl_coef=0.5, algorithm="dr_grpo", **options)
        if forced:
            monkeypatch.setattr(PolicyUpdate, "_is_sampler_policy", lambda update: False)
        for _ in range(3):
            metrics = trainer.step()
        results.append((metrics["policy/ref_kl"], metrics["policy/loss"], weights(trainer)))
        assert bool(calls) == (is_measured or forced)
        if not options:  # each update uses its log-probs: the ratio of a single step is exactly 1
            assert metrics["policy/ratio_mean"] == 1.0
    (kl, loss, after), (kl_measured, loss_measured, after_measured) = results
    assert kl == pytest.approx(kl_measured, abs=1e-5) and abs(kl) > 1e-4
    assert loss == pytest.approx(loss_measured, abs=1e-4) and torch.allclose(
        after, after_measured, atol=1e-4
    )


def test_kl_controllers_move_towards_the_target(tokenizer):
    low = build_recipe(
        tokenizer, "kl_reward", kl_controller="adaptive", kl_target=1e9, kl_horizon=36
    )
    low.step()
    assert low.kl_coef == pytest.approx(0.01 * 0.8)  # far below the target: the full 20% down
    banded = build_recipe(tokenizer, "kl_reward", kl_controller="banded", kl_target=1e9)
    banded.step()
    assert banded.kl_coef == pytest.approx(0.01 / 1.2)
    band = KLBandSettings(width=0.5, increase=3.0, decrease=2.0, minimum=0.006, maximum=0.02)
    settings = PolicySettings(kl_controller="banded", kl_coef=0.01, kl_target=0.1, kl_band=band)
    assert (
        compute_next_kl_coef(settings, 0.01, 0.16) == 0.02
    )  # above 0.1 * 1.5: times 3, at most 0.02
    assert compute_next_kl_coef(settings, 0.005, 0.16) == pytest.approx(0.015)
    assert (
        compute_next_kl_coef(settings, 0.01, 0.14)
        == compute_next_kl_coef(settings, 0.01, 0.06)
        == 0.01
    )
    assert (
        compute_next_kl_coef(settings, 0.01, 0.04) == 0.006
    )  # below 0.1 * 0.5: half, at least 0.006
    assert compute_next_kl_coef(settings, 0.016, 0.04) == pytest.approx(0.008)
    fixed = build_recipe(tokenizer, "kl_reward")
    fixed.step()
    assert fixed.kl_coef == 0.01


def test_the_entropy_coefficient_falls_to_its_floor(tokenizer):
    trainer = make_trainer(tokenizer, entropy_coef=0.01, entropy_decay=0.99, entropy_floor=0.006)
    assert trainer.step()["policy/entropy_coef"] == pytest.approx(0.01 * 0.99**36)
    assert trainer.step()["policy/entropy_coef"] == 0.006


def test_each_algorithm_has_a_separate_clip():
    assert PolicySettings().clip == (0.2, 0.2)
    assert PolicySettings(clip_eps=0.1).clip == (0.1, 0.1)
    assert PolicySettings(algorithm="dapo").clip == (0.2, 0.28)
    assert PolicySettings(algorithm="dapo", clip_eps=0.1).clip == (0.1, 0.28)
    assert PolicySettings(algorithm="gspo").clip == (3e-4, 4e-4)
    assert PolicySettings(clip_eps_high=0.3).clip == (0.2, 0.3)


@pytest.mark.parametrize(
    "options", [dict(algorithm="reinforce", epochs=2), dict(replay=ReplaySettings())]
)
def test_a_refusal_without_weights_names_those_that_are_taken(options):
    with pytest.raises(SettingsError, match="token, sequence or geometric"):
        PolicySettings(**options)
    for importance in ("token", "sequence", "geometric"):
        assert PolicySettings(**options, importance=importance).corrects_sampler
    assert PolicySettings(**options | dict(algorithm="ppo"), importance="vtrace").corrects_sampler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(group_size=1, algorithm="gspo"), "without a baseline"),
        (dict(critic=CriticSettings()), "critic: not used by grpo"),
        (dict(algorithm="reinforce", epochs=2), "importance: reinforce has no ratio"),
        (dict(replay=ReplaySettings()), "importance: replay"),
        (
            dict(
                algorithm="ppo",
                replay=ReplaySettings(),
                importance="token",
                critic=CriticSettings(kind="shared"),
            ),
            "replay: needs a separate critic",
        ),
        (dict(kl_controller="adaptive"), "kl_controller: needs an initial kl_coef"),
        (dict(entropy_floor=0.1), "entropy_floor: 0.1 is above"),
        (
            dict(algorithm="ppo", dynamic_sampling_tries=1),
            "dynamic_sampling_tries: not used by ppo",
        ),
        (
            dict(overlong_buffer=9, sampling=SamplingSettings(max_completion_tokens=8)),
            "overlong_buffer: 9 is more",
        ),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(SettingsError, match=message):
        PolicySettings(**options)
    with pytest.raises(SettingsError, match="warmup_iterations"):
        CriticSettings(kind="shared", warmup_iterations=1)


def test_ppo_may_have_groups_of_one(tokenizer):
    trainer = make_trainer(tokenizer, algorithm="ppo", group_size=1, prompts_per_iteration=12)
    metrics = trainer.step()
    assert math.isfinite(metrics["train/loss"]) and metrics["train/trained_rollouts"] == 12
    for name in (
        "value/loss",
        "value/explained_variance",
        "value/returns_mean",
        "value/grad_norm",
        "policy/entropy_coef",
        "policy/kl_coef",
        "policy/clip_fraction_low",
        "policy/clip_fraction_high",
        "policy/update_kl_k1",
    ):
        assert math.isfinite(metrics[name]), name


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_ppo_trains_adapters_and_the_critic_alone(tokenizer, kind):
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=32, device="cpu", lora=LoraSettings(rank=2)),
        tokenizer,
        0,
    )
    trainer = make_trainer(
        tokenizer, model=model, algorithm="ppo", critic=CriticSettings(kind=kind), epochs=2
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(3):
        metrics = trainer.step()
    assert math.isfinite(metrics["value/loss"]) and metrics["policy/sampler_difference_max"] < 1e-4
    changed = {
        name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed and all("lora" in name or ".head." in name for name in changed)
    assert any("lora" in name and name.startswith("policy.") for name in changed)
    assert any(".head." in name for name in changed)


def test_ppo_under_autocast_stays_near_float32(tokenizer):
    baseline = make_trainer(tokenizer, algorithm="ppo", epochs=2, curriculum=LOW)
    cast = make_trainer(tokenizer, algorithm="ppo", epochs=2, curriculum=LOW, autocast="bfloat16")
    baseline_metrics, cast_metrics = baseline.step(), cast.step()
    assert cast_metrics["policy/loss"] == pytest.approx(baseline_metrics["policy/loss"], abs=0.02)
    assert (
        cast_metrics["value/loss"] == pytest.approx(baseline_metrics["value/loss"], abs=0.02)
        and cast_metrics["value/loss"] != baseline_metrics["value/loss"]
    )
    assert all(p.dtype == torch.float32 for p in cast.model.parameters())
