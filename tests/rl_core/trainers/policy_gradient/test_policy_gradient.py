import copy
import dataclasses
import math

import pytest
import torch
from helpers.letters import LOW, FewLetters, capture_update, comparable, make_trainer, weights

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.models.logprobs import completion_logprobs, compute_token_outputs
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts import rollout_metrics
from rl_core.rollouts.batching import build_batches
from rl_core.rollouts.rollout_metrics import TruncationMonitor
from rl_core.settings import (
    CurriculumStage,
    ExitCondition,
    LearningRateControlSettings,
    PolicySettings,
    ReplaySettings,
    SamplingSettings,
)
from rl_core.trainers.policy_gradient import update as policy_update
from rl_core.trainers.policy_gradient.advantages import LearningSignalMonitor
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo"])
def test_learns(tokenizer, algorithm):
    trainer = make_trainer(tokenizer, algorithm=algorithm, curriculum=LOW)
    rates = [trainer.step()["train/success_rate"] for _ in range(36)]
    assert sum(rates[:3]) / 3 < 0.4
    assert sum(rates[-3:]) / 3 > 0.8


@pytest.mark.slow
def test_learns_with_epochs_and_minibatches(tokenizer):
    trainer = make_trainer(tokenizer, epochs=2, minibatches=2, learning_rate=5e-3, curriculum=LOW)
    metrics = [trainer.step() for _ in range(24)]
    assert sum(m["train/success_rate"] for m in metrics[-3:]) / 3 > 0.8
    assert trainer.optimizer_step.num_steps == 96
    assert any(m["policy/ratio_max"] > 1.1 for m in metrics[:5])
    assert all(m["policy/update_kl"] >= 0 for m in metrics if "policy/update_kl" in m)


def test_a_single_update_is_exactly_on_policy(tokenizer):
    trainer = make_trainer(tokenizer)
    for _ in range(3):
        metrics = trainer.step()
        assert (
            metrics["policy/ratio_max"] == 1
            and metrics["policy/update_kl"] == metrics["policy/clip_fraction"] == 0
        )
        assert metrics["policy/ratio_mean"] == pytest.approx(1)
        assert metrics["policy/sampler_difference_max"] < 1e-4


def play_rows(trainer):
    return [
        (r, a)
        for group in trainer.groups
        for r, a in zip(group.rollouts, group.advantages, strict=True)
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_loss_is_normalised_by_the_whole_step(tokenizer, algorithm):
    trainer = make_trainer(tokenizer, algorithm=algorithm, micro_batch_tokens=40)
    metrics = trainer.step()
    rows = play_rows(trainer)
    assert len({sum(r.loss_mask) for r, _ in rows}) > 1, (
        "rollouts of different length are what this is about"
    )
    total = sum(a * sum(r.loss_mask) for r, a in rows)  # at ratio 1 the loss of a token is -A
    tokens = sum(sum(r.loss_mask) for r, _ in rows)
    denominator = tokens if algorithm == "grpo" else 36 * 3
    assert metrics["train/loss"] == pytest.approx(-total / denominator, abs=1e-6)
    assert metrics["train/zero_advantage_rate"] > 0


def test_micro_batches_change_nothing(tokenizer):
    full = make_trainer(tokenizer, micro_batch_tokens=100_000)
    cut = make_trainer(tokenizer, micro_batch_tokens=1)
    full_metrics, cut_metrics = full.step(), cut.step()
    for name in ("train/loss", "train/grad_norm", "policy/entropy", "policy/loss"):
        assert full_metrics[name] == pytest.approx(cut_metrics[name], rel=1e-4, abs=1e-6)
    # Adam divides by the gradient's size, so rounding shows where a gradient is almost zero
    assert (weights(full) - weights(cut)).abs().mean() < 1e-5


def test_rollouts_without_advantage_need_no_forward_pass(tokenizer, monkeypatch):
    lean, full = make_trainer(tokenizer), make_trainer(tokenizer)
    metrics = lean.step()
    monkeypatch.setattr(
        policy_update.PolicyUpdate, "_select_trained_rows", lambda self, indices: list(indices)
    )
    two = full.step()
    assert metrics["train/trained_rollouts"] < 36 and two["perf/update_seconds"] > 0
    assert metrics["train/loss"] == pytest.approx(two["train/loss"], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-4)
    assert (weights(lean) - weights(full)).abs().mean() < 1e-5


def test_equal_rewards_leave_the_weights_alone(tokenizer):
    trainer = make_trainer(tokenizer, rewards=RewardOrchestrator({"tool_use": 1.0}), epochs=2)
    before = weights(trainer)
    metrics = trainer.step()
    assert torch.equal(weights(trainer), before)
    assert metrics["train/empty_updates"] == 2 and metrics["train/zero_advantage_rate"] == 1
    assert trainer.optimizer_step.num_steps == 2  # the x axis of the metrics continues


def test_ten_iterations_without_a_signal_are_warned_of_once(tokenizer, caplog):
    trainer = make_trainer(tokenizer, rewards=RewardOrchestrator({"tool_use": 1.0}), epochs=1)

    def select_warnings():  # the environment may warn once per process that it has few questions
        return [record for record in caplog.records if record.name.endswith(".advantages")]

    for _ in range(9):
        trainer.step()
    assert not select_warnings()
    trainer.step()
    trainer.step()
    (record,) = select_warnings()
    assert (
        "nothing is learned: in the last one every rollout has the reward 0." in record.getMessage()
    )


def test_a_signal_ends_the_count_of_iterations_without_one(caplog):
    warning = LearningSignalMonitor(2)
    for rate in (1.0, 0.9, 1.0, 0.0):
        warning.observe_iteration({"train/zero_advantage_rate": rate}, [0.0, 1.0])
    assert not caplog.records
    warning.observe_iteration({}, [0.0, 1.0])  # every group was dropped
    warning.observe_iteration({"train/zero_advantage_rate": 1.0}, [0.0, 1.0])
    assert (
        "rewards lie between 0 and 1, but are the same for all rollouts of a prompt" in caplog.text
    )


def test_prompts_that_are_learned_are_not_blamed_on_the_reward(caplog):
    for success, rewards, messages, unsaid in (
        (
            0.99,
            [0.4, 1.0],
            "99% of the episodes succeed. These prompts are learned",
            "Check the reward",
        ),
        (
            0.5,
            [1.0, 1.0],
            "every rollout has the reward 1. Check the reward",
            "prompts are learned",
        ),
        (
            0.0,
            [0.0, 0.0],
            "every rollout has the reward 0. Check the reward",
            "prompts are learned",
        ),
    ):
        caplog.clear()
        LearningSignalMonitor(1).observe_iteration(
            {"train/zero_advantage_rate": 1.0, "train/success_rate": success}, rewards
        )
        assert messages in caplog.text and unsaid not in caplog.text, success


@pytest.mark.parametrize(("desired_kl", "limit"), [(1e-9, 0.25), (1e3, 4.0)])
def test_the_learning_rate_follows_the_kl_of_updates(tokenizer, desired_kl, limit):
    control = LearningRateControlSettings(desired_kl=desired_kl, factor=2, lowest=0.25, highest=4)
    trainer = make_trainer(tokenizer, learning_rate_control=control, epochs=2, curriculum=LOW)
    rates = [trainer.step()["train/learning_rate"] for _ in range(4)]
    step = limit**0.5
    assert rates == pytest.approx([1e-2, 1e-2 * step, 1e-2 * limit, 1e-2 * limit])
    resumed = make_trainer(tokenizer, learning_rate_control=control, epochs=2, curriculum=LOW)
    resumed.optimizer_step.load_state_dict(copy.deepcopy(trainer.optimizer_step.state_dict()))
    assert resumed.optimizer_step.learning_rate == pytest.approx(1e-2 * limit)


@pytest.mark.slow
def test_a_desired_kl_is_held(tokenizer):
    control = LearningRateControlSettings(desired_kl=0.002, highest=100)
    trainer = make_trainer(
        tokenizer, learning_rate_control=control, epochs=4, learning_rate=1e-4, group_size=16
    )
    kls = [trainer.step()["policy/update_kl"] for _ in range(24)]
    assert max(kls[:3]) < 0.0005
    assert 0.001 < sum(kls[-8:]) / 8 < 0.004


def test_settings_of_the_learning_rate_that_contradict():
    control = LearningRateControlSettings()
    with pytest.raises(SettingsError, match="so it is 0 with a single one; raise epochs"):
        PolicySettings(learning_rate_control=control, epochs=1, minibatches=1)
    with pytest.raises(SettingsError, match="plateau_patience: learning_rate_control sets"):
        PolicySettings(learning_rate_control=control, epochs=2, plateau_patience=2)


def test_limits_that_cut_many_rollouts_are_warned_of_once(tokenizer, caplog, monkeypatch):
    sampling = SamplingSettings(max_completion_tokens=2, max_turns=3)
    monitor = TruncationMonitor(sampling, iterations=2)
    for share in (0.5, 0.39, 0.4, 0.41, 0.7, 1.0):
        monitor.observe_iteration({"train/truncation_rate": share})
    (record,) = caplog.records
    assert record.getMessage() == (
        "limits cut at least 40% of the rollouts in each of the last 2 iterations (41% in the last): raise "
        "sampling.max_completion_tokens (2; observations count, too), sampling.max_turns (3) or the model's context"
    )
    caplog.clear()
    monkeypatch.setattr(rollout_metrics, "TRUNCATED_SHARE", 0.1)
    trainer = make_trainer(tokenizer, sampling=sampling)
    for _ in range(6):
        assert trainer.step()["train/truncation_rate"] > 0.1
    assert [r.getMessage()[:27] for r in caplog.records if r.name.endswith("rollout_metrics")] == [
        "limits cut at least 10% of "
    ]


def test_kl_and_entropy_terms_enter_the_loss(tokenizer):
    with pytest.raises(SettingsError, match=r"kl_coef: 0\.5 needs a reference"):
        make_trainer(tokenizer, kl_coef=0.5)
    reference = make_trainer(tokenizer).model
    trainer = make_trainer(tokenizer, kl_coef=0.5, entropy_coef=0.1, reference=reference)
    frozen = weights(trainer)
    metrics = trainer.step()
    assert metrics["policy/ref_kl"] == pytest.approx(
        0, abs=1e-9
    )  # the reference is the starting policy
    assert metrics["train/trained_rollouts"] == 36
    metrics = trainer.step()
    assert metrics["policy/ref_kl"] > 1e-4
    expected = (
        metrics["policy/loss"] - 0.1 * metrics["policy/entropy"] + 0.5 * metrics["policy/ref_kl"]
    )
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)
    assert torch.equal(torch.cat([p.flatten() for p in reference.parameters()]), frozen)


def test_the_kl_term_holds_the_policy_back(tokenizer):
    reference = make_trainer(tokenizer).model
    free, penalised = (
        make_trainer(tokenizer, kl_coef=c, reference=reference) for c in (1e-9, 10.0)
    )
    for _ in range(8):
        loose, tight = free.step(), penalised.step()
    assert tight["policy/ref_kl"] < 0.3 * loose["policy/ref_kl"]


@pytest.mark.parametrize(
    ("options", "has_separate_pass"),
    [({"minibatches": 3}, True), ({"micro_batch_tokens": 30}, False), ({"kl_max": 9.0}, True)],
)
def test_old_logprobs_are_those_before_the_first_update(
    tokenizer, monkeypatch, options, has_separate_pass
):
    """Check that a first step over all rows measures them itself."""
    trainer = make_trainer(tokenizer, epochs=2, **options)
    passes, compute = [], RolloutBuffer.compute_old_logprobs
    monkeypatch.setattr(
        RolloutBuffer, "compute_old_logprobs", lambda *args: passes.append(compute(*args))
    )
    before = copy.deepcopy(trainer.model)
    updates = capture_update(monkeypatch)
    trainer.step()
    (update,) = updates
    assert bool(passes) == has_separate_pass
    rows = [sample.row for sample in update.buffer.samples]
    for batch in build_batches(rows, 10_000, 0):
        expected = completion_logprobs(before, batch)[0]
        for b, row in enumerate(batch.rows):
            stored = update.buffer.old_logprobs_RS[row, : expected.shape[1]]
            assert torch.allclose(
                stored, expected[b] if row in update.trained_rows else torch.zeros(()), atol=1e-5
            )


def test_filtered_samples_carry_no_loss(tokenizer):
    trainer = make_trainer(tokenizer, algorithm="dr_grpo", filter_threshold=0.5)
    metrics = trainer.step()
    rows = play_rows(trainer)
    selected = [(r, a) for r, a in rows if abs(a) >= 0.5]
    assert 0 < len(selected) < len(rows)
    assert metrics["train/filtering_rate"] == pytest.approx(1 - len(selected) / len(rows))
    assert metrics["train/loss"] == pytest.approx(
        -sum(a * sum(r.loss_mask) for r, a in selected) / (36 * 3), abs=1e-6
    )


def test_all_of_a_few_seeds_come_before_any_repeats(tokenizer):
    trainer = make_trainer(
        tokenizer, FewLetters(), prompts_per_iteration=5, group_size=2, curriculum=LOW
    )
    for _ in range(3):
        trainer.step()
        assert sorted(group.rollouts[0].trajectory.seed for group in trainer.groups) == [
            0,
            1,
            2,
            3,
            4,
        ]


def build_resumable_trainer(tokenizer):
    stages = (
        CurriculumStage(
            name="one",
            levels={"low": 1.0},
            exit_conditions=(ExitCondition(window=2, threshold=0.1),),
        ),
        CurriculumStage(name="two", levels={"low": 1.0, "high": 2.0}),
    )
    rewards = RewardOrchestrator(
        {"task": 1.0, "learned": 0.1}, scorer=lambda rows: [sum(r) % 7 for r in rows]
    )
    return make_trainer(
        tokenizer,
        FewLetters(),
        rewards=rewards,
        curriculum=stages,
        minibatches=2,
        schedule="cosine",
        iterations=6,
        reference=make_trainer(tokenizer).policy,
        kl_coef=0.1,
        kl_controller="adaptive",
        kl_target=1e-3,
        kl_horizon=36,
        entropy_coef=0.01,
        entropy_decay=0.999,
    )


@pytest.mark.parametrize("cut", [1, 3])
def test_resumes_bit_for_bit(tokenizer, cut):
    uninterrupted, first, second = (build_resumable_trainer(tokenizer) for _ in range(3))
    expected = [comparable(uninterrupted.step()) for _ in range(6)]
    actual = [comparable(first.step()) for _ in range(cut)]
    second.step()  # its earlier state is overwritten
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.optimizer_step.load_state_dict(copy.deepcopy(first.optimizer_step.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    actual += [comparable(second.step()) for _ in range(6 - cut)]
    assert actual == expected
    assert torch.equal(weights(second), weights(uninterrupted))
    assert len(uninterrupted.curriculum.history) == 1


@pytest.mark.parametrize(
    "part", ["iteration", "rollouts_played", "kl_coef", "curriculum", "rewards", "orders"]
)
def test_every_saved_item_matters(tokenizer, part):
    uninterrupted, first, second = (build_resumable_trainer(tokenizer) for _ in range(3))
    expected = [comparable(uninterrupted.step()) for _ in range(6)]
    for _ in range(3):
        first.step()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer_step.load_state_dict(copy.deepcopy(first.optimizer_step.state_dict()))
    state = copy.deepcopy(first.state_dict())
    state[part] = build_resumable_trainer(tokenizer).state_dict()[part]
    second.load_state_dict(state)
    assert [comparable(second.step()) for _ in range(3)] != expected[3:]


def test_the_same_seed_gives_the_same_run_and_another_one_another(tokenizer):
    first, second, other = make_trainer(tokenizer), make_trainer(tokenizer), make_trainer(tokenizer)
    other.seed = 8
    assert [comparable(first.step()) for _ in range(2)] == [
        comparable(second.step()) for _ in range(2)
    ]
    other.step()
    assert not torch.equal(weights(other), weights(make_trainer(tokenizer)))
    played = [[r.completion_ids for g in t.groups for r in g.rollouts] for t in (first, other)]
    assert played[0] != played[1]


def test_non_finite_logprobs_skip_the_step(tokenizer, monkeypatch):
    trainer = make_trainer(tokenizer)
    before = weights(trainer)

    def compute_nan_outputs(*args, **options):
        outputs = compute_token_outputs(*args, **options)
        outputs.logprobs_BS = outputs.logprobs_BS * math.nan
        return outputs

    monkeypatch.setattr(policy_update, "compute_token_outputs", compute_nan_outputs)
    metrics = trainer.step()
    assert metrics["train/skipped_steps"] == 1 and torch.equal(weights(trainer), before)
    monkeypatch.undo()
    assert trainer.step()["train/skipped_steps"] == 1 and not torch.equal(weights(trainer), before)


def test_metrics_finish_and_evaluation(tokenizer):
    trainer = make_trainer(tokenizer, early_stop=ExitCondition(window=2, threshold=0.0))
    metrics = trainer.step()
    for name in (
        "train/success_rate",
        "train/completion_tokens",
        "train/truncation_rate",
        "train/filtering_rate",
        "train/loss",
        "train/advantages_mean",
        "train/advantages_std",
        "train/grad_norm",
        "train/learning_rate",
        "reward/mean",
        "reward/std",
        "reward/task",
        "policy/loss",
        "policy/update_kl",
        "policy/update_kl_k1",
        "policy/entropy",
        "policy/ratio_mean",
        "policy/clip_fraction",
        "policy/clip_fraction_low",
        "policy/clip_fraction_high",
        "policy/ratio_max",
        "policy/sampler_kl",
        "perf/tokens_per_second",
        "perf/rollout_seconds",
        "perf/update_seconds",
        "curriculum/stage",
        "curriculum/average/success_rate",
    ):
        assert math.isfinite(metrics[name]), name
    rollouts = [r for g in trainer.groups for r in g.rollouts]
    assert metrics["train/success_rate"] == sum(r.success for r in rollouts) / 36
    for level in {r.trajectory.level for r in rollouts}:
        of_level = [r.success for r in rollouts if r.trajectory.level == level]
        assert metrics[f"train/success_rate_by_level/{level}"] == sum(of_level) / len(of_level)
    assert trainer.finished is None
    trainer.step()
    assert "early_stop" in trainer.finished
    assert trainer.evaluate() == {}
    trainer.evaluator = lambda: {"eval/success_rate": 0.5}
    assert trainer.evaluate() == {"eval/success_rate": 0.5}


def test_unknown_levels_are_refused_immediately(tokenizer):
    with pytest.raises(SettingsError, match="no level 'lwo'; did you mean 'low'"):
        make_trainer(tokenizer, curriculum=(CurriculumStage(name="one", levels={"lwo": 1.0}),))


def test_settings_are_left_alone(tokenizer):
    trainer = make_trainer(tokenizer)
    before = dataclasses.asdict(trainer.settings)
    trainer.step()
    assert dataclasses.asdict(trainer.settings) == before


def test_truncated_rollouts_carry_no_loss_and_count_in_their_groups(tokenizer):
    all_of_it, masked = make_trainer(tokenizer), make_trainer(tokenizer, mask_truncated=True)
    before, metrics = all_of_it.step(), masked.step()
    rows = play_rows(masked)
    assert rows == play_rows(all_of_it)  # the same rollouts with the same advantages
    selected = [(r, a) for r, a in rows if r.trajectory.stop_reason != "max_tokens"]
    cut = [(r, a) for r, a in rows if r.trajectory.stop_reason == "max_tokens"]
    assert selected and any(a < 0 for _, a in cut), (
        "cut rollouts with a say in their groups are what this is about"
    )
    assert metrics["train/masked_truncated"] == len(cut) and "train/masked_truncated" not in before
    total, tokens = (
        sum(a * sum(r.loss_mask) for r, a in selected),
        sum(sum(r.loss_mask) for r, _ in selected),
    )
    assert metrics["train/loss"] == pytest.approx(-total / tokens, abs=1e-6)
    assert metrics["train/loss"] != pytest.approx(before["train/loss"], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "reinforce", "epochs": 1},
        {"entropy_coef": 0.1},
        {"replay": ReplaySettings(), "importance": "token"},
    ],
)
def test_rollouts_that_are_all_truncated_leave_the_weights_alone(tokenizer, options):
    trainer = make_trainer(tokenizer, mask_truncated=True, **{"epochs": 2, **options})
    trainer.backend.set_end_tokens([])
    before = weights(trainer)
    metrics = trainer.step()
    assert (
        metrics["train/masked_truncated"] == 36
        and metrics["train/empty_updates"] == trainer.settings.epochs
    )
    assert torch.equal(weights(trainer), before)


def test_masking_truncated_rollouts_is_refused_with_a_critic():
    with pytest.raises(SettingsError, match=r"mask_truncated: .*critic\.bootstrap_limits"):
        PolicySettings(algorithm="ppo", mask_truncated=True)


def test_a_reference_is_frozen_and_without_dropout(tokenizer):
    reference = make_trainer(tokenizer).policy.train()
    make_trainer(tokenizer, kl_coef=0.1, reference=reference)
    assert not reference.training and not any(
        parameter.requires_grad for parameter in reference.parameters()
    )
