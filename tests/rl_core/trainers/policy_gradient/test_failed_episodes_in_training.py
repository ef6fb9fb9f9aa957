"""Policy optimisation with an environment that sometimes fails: an update without these episodes, and exact resume."""

import pytest
import torch
from helpers.letters import LOW, LetterEpisode, Letters, comparable, make_trainer, weights

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Step
from rl_core.errors import EnvironmentFault, RewardError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import RewardSettings, SamplingSettings
from rl_core.types import RolloutGroup, StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def is_bad(text):
    return sum(map(ord, text)) % 5 == 0


class BreakingEpisode(LetterEpisode):
    def act(self, text):
        if is_bad(text):
            raise RuntimeError("server is gone")
        return super().act(text)


class BreakingLetters(Letters):
    blocking = False

    def episode(self, seed, level):
        self.check_level(level)
        return BreakingEpisode(seed, level)


class EndingEpisode(LetterEpisode):
    """Episode that ends where the other one breaks."""

    def act(self, text):
        return Step(terminated=True, success=False) if is_bad(text) else super().act(text)


class EndingLetters(BreakingLetters):
    def episode(self, seed, level):
        return EndingEpisode(seed, level)


SAMPLING = SamplingSettings(max_completion_tokens=3, max_failed_share=0.9)


def is_failing_episode(trajectory):
    """Return whether the environment failed; an action that was cut off is not shown to it."""
    return trajectory.stop_reason == StopReason.TERMINATED and is_bad(trajectory.turns[0].action)


def drop_bad_ones(trainer):
    """Make the trainer learn only from the rollouts that would not have failed."""
    play = trainer._play_groups

    def play_without_failures(*args, **options):
        groups = [
            [r for r in g.rollouts if not is_failing_episode(r.trajectory)]
            for g in play(*args, **options)
        ]
        return [RolloutGroup(rollouts) for rollouts in groups if rollouts]

    trainer._play_groups = play_without_failures


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce", "ppo"])
def test_the_update_is_that_of_the_other_episodes(tokenizer, algorithm):
    options = {"algorithm": algorithm, "curriculum": LOW, "sampling": SAMPLING}
    trainer = make_trainer(tokenizer, BreakingLetters(), **options)
    expected = make_trainer(tokenizer, EndingLetters(), **options)
    drop_bad_ones(expected)
    for _ in range(2):
        metrics, other = trainer.step(), expected.step()
        num_rollouts = sum(len(group.rollouts) for group in trainer.groups)
        assert 0 < num_rollouts < 36
        assert metrics.pop("train/failed_rate") == pytest.approx(1 - num_rollouts / 36)
        assert other.pop("train/failed_rate") == 0.0 == other.pop("train/failed_episodes")
        assert metrics.pop("train/failed_episodes") >= 36 - num_rollouts
        assert comparable(metrics) == comparable(other)
    assert torch.equal(weights(trainer), weights(expected))


def test_training_resumes_exactly_over_failures(tokenizer):
    options = {"curriculum": LOW, "sampling": SAMPLING}
    uninterrupted = make_trainer(tokenizer, BreakingLetters(), **options)
    metrics = [comparable(uninterrupted.step()) for _ in range(4)]
    first = make_trainer(tokenizer, BreakingLetters(), **options)
    for _ in range(2):
        first.step()
    second = make_trainer(tokenizer, BreakingLetters(), model_seed=5, **options)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer_step.load_state_dict(first.optimizer_step.state_dict())
    second.load_state_dict(first.state_dict())
    assert [comparable(second.step()) for _ in range(2)] == metrics[2:]
    assert second.failures.total == uninterrupted.failures.total > 0
    assert torch.equal(weights(second), weights(uninterrupted))
    assert second.failures.state_dict() == uninterrupted.failures.state_dict()


def test_failures_of_several_iterations_are_counted_together(tokenizer):
    """Check that failures add up: no single iteration has too many, but 0.12 of 50 episodes are 6."""
    trainer = make_trainer(
        tokenizer,
        BreakingLetters(),
        curriculum=LOW,
        prompts_per_iteration=2,
        group_size=6,
        sampling=SamplingSettings(max_completion_tokens=3, max_failed_share=0.12),
        learning_rate=1e-6,
    )
    stored = []
    trainer.set_failure_recorder(
        lambda episode: stored.append(episode.iteration) or f"look at {len(stored)}"
    )
    with pytest.raises(
        EnvironmentFault, match=r"allows 0.12\).*RuntimeError: server is gone; look at"
    ):
        for _ in range(10):
            trainer.step()
    assert max(stored.count(iteration) for iteration in set(stored)) <= 6 < len(stored)
    assert trainer.iteration > 0 and stored == sorted(stored)


def test_an_iteration_in_which_every_episode_fails_stops(tokenizer):
    class FailingEpisode(LetterEpisode):
        def act(self, text):
            raise OSError("no server")

    class Dead(BreakingLetters):
        def episode(self, seed, level):
            return FailingEpisode(seed, level)

    trainer = make_trainer(tokenizer, Dead(), sampling=SamplingSettings(max_failed_share=1.0))
    with pytest.raises(
        EnvironmentFault, match=r"36 of the newest 36 episodes failed .*OSError: no server"
    ):
        trainer.step()


def test_a_refill_whose_episodes_all_fail_continues(tokenizer):
    """Check dynamic sampling with an environment that is broken when groups of equal rewards are replayed."""
    created = []

    class Going(LetterEpisode):
        def act(self, text):
            created.append(text)
            if len(created) > 36:
                raise OSError("no server")
            return super().act(text)

    class Leaving(BreakingLetters):
        def episode(self, seed, level):
            return Going(seed, level)

    trainer = make_trainer(
        tokenizer,
        Leaving(),
        algorithm="dapo",
        curriculum=LOW,
        dynamic_sampling_tries=2,
        overlong_buffer=0,
        rewards=RewardOrchestrator({"task": 0.0}),
        sampling=SamplingSettings(max_completion_tokens=20, max_failed_share=1),
    )
    metrics = trainer.step()
    assert metrics["train/failed_rate"] == pytest.approx(
        72 / 108
    )  # 36 were played, and twice 36 failed
    assert metrics["train/dropped_group_rate"] == 1.0


def test_episodes_that_no_reward_function_could_score_remain(tokenizer, monkeypatch):
    def score_by_sample(trajectories):
        return [1 / (trajectory.sample - 1) for trajectory in trajectories]

    rewards = RewardOrchestrator(
        {"task": 1.0, "mine": 1.0},
        functions={"mine": score_by_sample},
        options=RewardSettings(max_failed_share=0.1),
    )
    trainer = make_trainer(tokenizer, rewards=rewards, curriculum=LOW)
    stored = []
    trainer.set_failure_recorder(lambda episode: stored.append(episode) or "")
    with pytest.raises(RewardError, match=r"allows 0.1\).*reward 'mine' raised ZeroDivisionError"):
        trainer.step()
    assert len(stored) == 6 and {episode.trajectory.sample for episode in stored} == {
        1
    }  # one in each group; 5 may fail
    assert (
        stored[0].failed_in == "reward 'mine'"
        and stored[0].iteration == 0
        and "ZeroDivisionError" in stored[0].trace
    )


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_one_reward_beyond_the_limit_does_not_silence_the_iteration(tokenizer, algorithm):
    def score_letters(trajectories):
        return [1e30 if number == 0 else float(number % 2) for number, _ in enumerate(trajectories)]

    rewards = RewardOrchestrator({"letters": 1.0}, functions={"letters": score_letters})
    trainer = make_trainer(tokenizer, rewards=rewards, algorithm=algorithm)
    before = weights(trainer).clone()
    metrics = trainer.step()
    assert metrics["train/skipped_steps"] == 0 and metrics["train/failed_episodes"] == 1
    assert not torch.equal(weights(trainer), before)
    assert abs(metrics["reward/mean"] - 18 / 35) < 1e-12  # 36 samples, the first is left out
