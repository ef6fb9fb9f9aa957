"""Rollback of a policy ruined by its learning rate; bit-exact resume across rollbacks; overrides of stages."""

import copy
import random

import numpy as np
import pytest
import torch
from helpers.letters import FewLetters, comparable, make_trainer, weights
from helpers.tiny import weights_digest

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import CheckpointError, SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import (
    CurriculumStage,
    ExitCondition,
    ReplaySettings,
    RollbackSettings,
)
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_stage(name, levels=("low",), **options):
    return CurriculumStage(name=name, levels=dict.fromkeys(levels, 1.0), **options)


def build_ruinous_trainer(tokenizer, rollback):
    """Build a trainer that learns while the learning rate is warmed up, and loses everything on its way to 1.0."""
    stages = (
        build_stage("one", exit_conditions=(ExitCondition(window=3, threshold=0.7),)),
        build_stage("two"),
    )
    return make_trainer(
        tokenizer,
        curriculum=stages,
        rollback=rollback,
        model_seed=1,
        iterations=60,
        learning_rate=1.0,
        warmup_steps=40,
        weight_decay=1.0,
        entropy_coef=0.05,
    )


@pytest.mark.slow
def test_a_rollback_restores_what_a_bad_learning_rate_ruined(tokenizer):
    ruined = [
        ruinous_step["train/success_rate"]
        for ruinous_step in run_steps(build_ruinous_trainer(tokenizer, None), 60)
    ]
    best = max(sum(ruined[i : i + 3]) / 3 for i in range(58))
    assert (
        best > 0.9 and min(sum(ruined[i : i + 3]) / 3 for i in range(10, 58)) < 0.1
    )  # it learns, then collapses

    rollback = RollbackSettings(
        window=3, margin=0.3, patience=2, cooldown=4, learning_rate_factor=0.02
    )
    trainer = build_ruinous_trainer(tokenizer, rollback)
    entry = None
    while not trainer.curriculum.rollback_monitor.rollbacks[1]:
        assert trainer.iteration < 60
        if trainer.curriculum.index == 1 and trainer.curriculum.stage_iterations == 0:
            entry = (
                weights(trainer),
                copy.deepcopy(trainer.optimizer_step.optimizer.state_dict()["state"]),
            )
            first = trainer.iteration
        metrics = trainer.step()
    played = [rollout.completion_ids for group in trainer.groups for rollout in group.rollouts]
    assert metrics["train/success_rate"] < 0.5 and metrics["curriculum/rollbacks"] == 1
    assert torch.equal(weights(trainer), entry[0])
    state = trainer.optimizer_step.optimizer.state_dict()["state"]
    assert all(
        torch.equal(state[i][key], value) for i in state for key, value in entry[1][i].items()
    )
    assert (
        trainer.optimizer_step.num_steps == trainer.iteration > first
    )  # the schedule and the x axis of the metrics continue
    assert trainer.optimizer_step.learning_rate == pytest.approx(
        0.02 * min(1.0, (trainer.iteration + 1) / 40)
    )
    after = run_steps(trainer, 10)
    assert [
        rollout.completion_ids for group in trainer.groups for rollout in group.rollouts
    ] != played
    assert sum(row["train/success_rate"] for row in after) / 10 > 0.7
    assert after[0]["train/learning_rate"] < 0.05
    (move,) = [move for move in trainer.curriculum.history if move["kind"] == "rollback"]
    assert move["metrics"]["success_rate"] < move["metrics"]["success_rate at entry"] - 0.3


def test_a_run_that_stops_leaves_the_weights_of_the_entry(tokenizer):
    rollback = RollbackSettings(
        window=3, margin=0.3, patience=2, max_rollbacks=0, on_exhausted="stop"
    )
    trainer, entry = build_ruinous_trainer(tokenizer, rollback), None
    while trainer.finished is None:
        assert trainer.iteration < 60
        if trainer.curriculum.index == 1 and entry is None:
            entry = weights(trainer)
        trainer.step()
    assert "stopped in stage 'two'" in trainer.finished and torch.equal(weights(trainer), entry)


def run_steps(trainer, count):
    return [trainer.step() for _ in range(count)]


ALGORITHMS = {
    "grpo": {"importance": "token", "replay": ReplaySettings(iterations=2)},
    "ppo": {"algorithm": "ppo", "ema_decay": 0.9},
}


_draw = random.random  # Python's global generator, which checkpoints save


@pytest.fixture(autouse=True, scope="module")
def isolate_generator():
    """Make threads left by other tests, such as a retrying client's, draw from another generator."""
    other = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("random", "uniform"):
            patch.setattr(random, name, getattr(other, name))
        yield


def add_noise(rows):
    """Return scores that draw from all global generators."""
    return [sum(row) % 7 + _draw() + np.random.random() + float(torch.rand(())) for row in rows]


def build_eventful_trainer(tokenizer, algorithm):
    """Build a trainer that rolls back at the slightest loss, three times, with everything that can be rolled back."""
    always = (ExitCondition(window=1, threshold=0.0),)
    rollback = RollbackSettings(
        metric="completion_tokens",
        window=1,
        level="before",
        margin=1e-3,
        patience=1,
        to="previous",
        max_rollbacks=3,
        cooldown=0,
    )
    unwatched = RollbackSettings(max_rollbacks=0)
    stages = (
        build_stage("zero", exit_conditions=always, rollback=unwatched),
        build_stage("one", exit_conditions=always, rollback=unwatched),
        build_stage(
            "two", ("low", "high"), group_size=4, temperature=0.9, rewards={"learned": 0.3}
        ),
    )
    random.seed(0), np.random.seed(0)
    rewards = RewardOrchestrator({"task": 1.0, "learned": 0.1}, scorer=add_noise)
    return make_trainer(
        tokenizer,
        FewLetters(),
        rewards=rewards,
        curriculum=stages,
        rollback=rollback,
        iterations=12,
        schedule="cosine",
        minibatches=2,
        prompts_per_iteration=3,
        reference=make_trainer(tokenizer).policy,
        kl_coef=0.1,
        kl_controller="adaptive",
        kl_target=1e-3,
        kl_horizon=36,
        checkpoint_every=100,
        **ALGORITHMS[algorithm],
    )


def run_in_loop(trainer, folder, iterations):
    tracker = MemoryTracker()
    run_loop(
        trainer,
        trainer.settings,
        iterations=iterations,
        tracker=tracker,
        checkpoints=CheckpointStore(folder),
    )
    return [(step, values) for step, row in tracker.metrics if (values := comparable(row))]


@pytest.fixture(scope="module", params=ALGORITHMS)
def uninterrupted(request, tokenizer, tmp_path_factory):
    trainer = build_eventful_trainer(tokenizer, request.param)
    rows = run_in_loop(trainer, tmp_path_factory.mktemp("whole"), 12)
    kinds = [move["kind"] for move in trainer.curriculum.history]
    assert kinds.count("rollback") >= 2 and kinds.count("advance") >= 2
    return request.param, rows, trainer


@pytest.mark.parametrize("cut", [1, 4, 7, 9])
def test_resumes_bit_for_bit_across_rollbacks(tokenizer, uninterrupted, tmp_path, cut):
    algorithm, expected, unbroken = uninterrupted
    actual = run_in_loop(build_eventful_trainer(tokenizer, algorithm), tmp_path, cut)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # as in another process
    resumed = build_eventful_trainer(tokenizer, algorithm)
    actual += run_in_loop(resumed, tmp_path, 12)
    assert actual == expected
    assert torch.equal(weights(resumed), weights(unbroken))
    assert resumed.curriculum.history == unbroken.curriculum.history


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_everything_goes_back_together_each_time(tokenizer, algorithm):
    trainer = build_eventful_trainer(tokenizer, algorithm)
    entered, times = {}, 0
    for _ in range(12):
        index, moves = trainer.curriculum.index, list(trainer.curriculum.history)
        if not moves or (
            trainer.curriculum.stage_iterations == 0 and moves[-1]["kind"] == "advance"
        ):
            entered[index] = copy_learned_state(trainer)
        trainer.step()
        now, new = copy_learned_state(trainer), trainer.curriculum.history[len(moves) :]
        if new and new[0]["kind"] == "rollback":
            assert (index, trainer.curriculum.index) == (2, 1)
            times += 1
            assert now == entered[1]
        else:
            assert all(now[part] != entered[index][part] for part in now)
    assert times >= 2  # the second time from a snapshot after which training has continued


def copy_learned_state(trainer):
    """Return digests and values of everything that a rollback must restore."""
    state, optimizer_step = trainer.state_dict(), trainer.optimizer_step.state_dict()
    parts = {
        "weights": weights_digest(trainer.model),
        "optimizer": collect_tensors(optimizer_step["optimizer"]["state"]),
        "kl_coef": state["kl_coef"],
        "rewards": str(state["rewards"]),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
    }
    if state["replay"] is not None:
        parts["replay"] = collect_tensors(state["replay"])
    if state["critic_optimizer_step"] is not None:
        parts["critic"] = collect_tensors(state["critic_optimizer_step"]["optimizer"]["state"])
        parts["ema"] = collect_tensors(optimizer_step["ema"])
    return parts


def collect_tensors(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: collect_tensors(item) for key, item in value.items()}
    return value


def test_a_checkpoint_without_the_entry_is_refused(tokenizer):
    trainer = build_eventful_trainer(tokenizer, "grpo")
    trainer.step()
    with pytest.raises(CheckpointError, match="stage 7 cannot be restored: there is no snapshot"):
        trainer._snapshots.restore_stage(7)


def test_no_state_is_copied_without_a_rollback(tokenizer):
    trainer = make_trainer(tokenizer)
    trainer.step()
    assert trainer.state_dict()["entries"] == {}
    assert "curriculum/rollbacks" not in trainer.curriculum.collect_metrics()


# What a stage overrides


def test_group_size_temperature_and_rewards_of_a_stage(tokenizer):
    rewards = RewardOrchestrator({"task": 1.0, "tool_use": 0.0})
    first_stage = build_stage(
        "one",
        exit_conditions=(ExitCondition(window=1, threshold=0.0),),
        group_size=3,
        rewards={"task": 2.0},
    )
    trainer = make_trainer(
        tokenizer, rewards=rewards, curriculum=(first_stage, build_stage("two", temperature=0.01))
    )
    trainer.step()
    assert [len(group.rollouts) for group in trainer.groups] == [3] * 6
    assert rewards.weights == {"task": 2.0, "tool_use": 0.0}
    assert {reward for group in trainer.groups for reward in group.rewards} == {0.0, 2.0}
    trainer.step()
    assert [len(group.rollouts) for group in trainer.groups] == [6] * 6
    assert rewards.weights == {"task": 1.0, "tool_use": 0.0}
    for group in trainer.groups:  # almost greedy: the rollouts of a prompt are equal
        assert len({tuple(rollout.completion_ids) for rollout in group.rollouts}) <= 2
    assert trainer.settings.group_size == 6 and trainer.settings.sampling.temperature == 1.0


def test_without_overrides_the_settings_are_the_very_same(tokenizer):
    trainer = make_trainer(tokenizer, curriculum=(build_stage("one"),))
    assert trainer.stage_settings is trainer.settings


def test_overrides_that_cannot_work_are_refused_immediately(tokenizer):
    with pytest.raises(
        SettingsError, match="curriculum: stage 'one': group_size: 1 leaves grpo without a baseline"
    ):
        make_trainer(tokenizer, curriculum=(build_stage("one", group_size=1),))
    with pytest.raises(SettingsError, match="stage 'one': minibatches: 30 is more"):
        make_trainer(tokenizer, minibatches=30, curriculum=(build_stage("one", group_size=2),))
    with pytest.raises(SettingsError, match=r"curriculum\.0\.rewards\.tsk: .*did you mean 'task'"):
        make_trainer(tokenizer, curriculum=(build_stage("one", rewards={"tsk": 1.0}),))
    make_trainer(tokenizer, algorithm="reinforce", curriculum=(build_stage("one", group_size=1),))
