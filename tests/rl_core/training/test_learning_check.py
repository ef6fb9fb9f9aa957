"""Iterations and runs in which no weight moves: both say so, and the run is an error."""

import pytest
import torch
from helpers.letters import LOW, Letters, make_trainer, weights
from helpers.loop_trainers import NoisyTrainer, ScriptedTrainer
from torch import nn

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import NothingLearned
from rl_core.models.trainable_weights import digest_trainable_weights
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import LoopSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop

NEVER_EVALUATE = LoopSettings(eval_every=0, checkpoint_every=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


class UnluckyTrainer(NoisyTrainer):
    """Trainer whose loss is not finite in the iterations of `bad`, counted from 1."""

    def __init__(self, bad):
        super().__init__()
        self.bad, self.done = bad, 0
        run_step = self.optimizer_step.run_step

        def run_spoiled(batches, loss_fn):
            self.done += 1
            factor = float("nan") if self.done in self.bad else 1.0

            def compute_loss(batch):
                loss, metrics = loss_fn(batch)
                return loss * factor, metrics

            return run_step(batches, compute_loss)

        self.optimizer_step.run_step = run_spoiled


def test_the_digest_changes_with_any_bit_and_opposite_steps():
    model = nn.Linear(2, 1, bias=False)
    digests = []
    for values in ([1.5, 1.5], [1.5, 1.5], [1.5 + 2**-23, 1.5], [1.5 + 2**-23, 1.5 - 2**-23]):
        model.weight.data = torch.tensor([values])
        digests.append(digest_trainable_weights(model))
    assert digests[0] == digests[1] and len(set(digests)) == 3
    model.weight.requires_grad_(False)
    assert digest_trainable_weights(model) == 0  # frozen weights do not count


def test_an_iteration_whose_step_is_skipped_says_so():
    tracker = MemoryTracker()
    messages = []
    tracker.progress = lambda done, total, message="": messages.append(message)
    outcome = run_loop(UnluckyTrainer({2}), NEVER_EVALUATE, iterations=3, tracker=tracker)
    counts = [row.get("train/unmoved_iterations") for _, row in tracker.metrics]
    assert counts[:3] == [None, 1.0, 1.0]
    assert [message.startswith("no weight moved") for message in messages] == [False, True, False]
    assert outcome.unmoved_iterations == 1 and "of which 1 changed no weight" in outcome.ended


def test_a_run_whose_every_step_was_skipped_is_an_error_also_when_resumed(tmp_path):
    for _ in range(2):  # the second time from the checkpoint of the last iteration
        with pytest.raises(NothingLearned, match=r"in 3 iterations.*3 optimizer steps were skip"):
            run_loop(
                UnluckyTrainer({1, 2, 3}),
                NEVER_EVALUATE,
                iterations=3,
                checkpoints=CheckpointStore(tmp_path),
            )


def test_a_run_that_learned_before_a_resume_is_none(tmp_path):
    def run_part(iterations, bad):
        trainer = UnluckyTrainer(bad)
        return run_loop(
            trainer, NEVER_EVALUATE, iterations=iterations, checkpoints=CheckpointStore(tmp_path)
        )

    assert run_part(2, {2}).unmoved_iterations == 1
    assert run_part(4, {1, 2}).unmoved_iterations == 3  # the other two, after the resume


def test_checkpoints_of_earlier_releases_resume_unchecked(tmp_path, monkeypatch):
    trainer = UnluckyTrainer({1, 2})
    save = CheckpointStore.save_version

    def save_older(store, state):
        loop = {k: v for k, v in state["loop"].items() if "digest" not in k and "unmoved" not in k}
        return save(store, {**state, "loop": loop})

    monkeypatch.setattr(CheckpointStore, "save_version", save_older)
    with pytest.raises(NothingLearned):
        run_loop(trainer, NEVER_EVALUATE, iterations=1, checkpoints=CheckpointStore(tmp_path))
    outcome = run_loop(
        UnluckyTrainer({1}), NEVER_EVALUATE, iterations=2, checkpoints=CheckpointStore(tmp_path)
    )
    assert outcome.iterations == 2


def test_steps_too_small_for_the_weights_are_an_error():
    class TinySteps(ScriptedTrainer):
        def step(self):
            self.optimizer_step.num_steps += 1
            return {"train/loss": 1.0}

    with pytest.raises(NothingLearned, match="too small for the weights' precision"):
        run_loop(TinySteps([0.0] * 9), LoopSettings(eval_every=0), iterations=2)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_policy_without_any_difference_in_reward(tokenizer, algorithm):
    """Check GRPO, which cannot learn from equal rewards, and PPO, whose critic can."""
    rewards = RewardOrchestrator(
        {"equal": 1.0}, functions={"equal": lambda rows: [1.0] * len(rows)}
    )
    trainer = make_trainer(
        tokenizer, Letters(), rewards=rewards, algorithm=algorithm, curriculum=LOW
    )
    before = weights(trainer).clone()
    if algorithm == "grpo":
        with pytest.raises(NothingLearned, match="all rewards of each prompt were equal"):
            run_loop(trainer, NEVER_EVALUATE, iterations=2)
        assert torch.equal(weights(trainer), before)
    else:
        assert run_loop(trainer, NEVER_EVALUATE, iterations=2).unmoved_iterations == 0


def test_every_step_beyond_the_kl_limit_is_an_error(tokenizer):
    trainer = make_trainer(tokenizer, kl_max=1e-12, learning_rate=1.0)
    with pytest.raises(NothingLearned, match="exceeded its KL limit"):
        run_loop(trainer, NEVER_EVALUATE, iterations=2)
