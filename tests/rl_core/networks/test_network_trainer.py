"""The trainer in the common loop: learning, bit-exact resume, saved items, options, metrics."""

import copy

import numpy as np
import pytest
import torch
from helpers.vector_worlds import Walker, WalkerVector, walkers

from rl_core.errors import CallbackError, EnvironmentFault, SettingsError
from rl_core.networks import trainer as network_evaluation
from rl_core.networks import trainer as trainer_module
from rl_core.networks import vector_environment
from rl_core.networks.actor_critic import ActionSpace
from rl_core.networks.network_update import compute_clip_eps
from rl_core.networks.trainer import ActionNoise, NetworkTrainer
from rl_core.settings import NetworkSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop

SMALL = {
    "num_environments": 4,
    "rollout_steps": 16,
    "environment_steps": 10_000,
    "epochs": 4,
    "hidden": (8,),
    "eval_episodes": 5,
    "gamma": 0.9,
}


@pytest.fixture(autouse=True)
def without_gymnasium(monkeypatch):
    """Replace gymnasium's vectors by vectors of walkers."""

    def build_vector(maker, count, vectorization="sync"):
        return WalkerVector([maker() for _ in range(count)])

    monkeypatch.setattr(trainer_module, "make_vector_environment", build_vector)
    monkeypatch.setattr(network_evaluation, "make_vector_environment", build_vector)


def build_trainer(seed=0, maker=Walker, **options):
    return NetworkTrainer(maker, NetworkSettings(**{**SMALL, **options}), seed, name="Walk")


def train_network(trainer, iterations, tracker=None, **options):
    return run_loop(
        trainer,
        trainer.settings,
        iterations=iterations,
        tracker=tracker or MemoryTracker(),
        **options,
    )


def copy_weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_it_learns_to_walk_to_the_goal():
    trainer = build_trainer(epochs=10, learning_rate=5e-3)
    before = trainer.evaluate_on_seeds(vector_environment.VALIDATION_SEEDS).compute_metrics()[
        "eval/episode_return"
    ]
    outcome = train_network(trainer, 40)
    # staying short of the goal for six steps pays most
    assert outcome.metrics["eval/episode_return"] > before + 4
    assert outcome.iterations == 40 and outcome.steps == 400


def test_it_learns_with_continuous_actions_and_normalised_observations():
    trainer = build_trainer(
        maker=lambda: Walker(continuous=True),
        normalise_observations=True,
        epochs=10,
        learning_rate=5e-3,
        initial_log_std=-0.5,
    )
    before = trainer.evaluate_on_seeds(vector_environment.VALIDATION_SEEDS).compute_metrics()[
        "eval/episode_return"
    ]
    tracker = MemoryTracker()
    outcome = train_network(trainer, 40, tracker)
    assert outcome.metrics["eval/episode_return"] > before + 4
    assert float(trainer.model.statistics.count) == 40 * 64
    last = tracker.metrics[-2][1]
    assert 0 <= last["train/clipped_action_rate"] <= 1 and last["policy/action_std"] > 0


VARIANTS = {
    "plain": {},
    "normalised": {"normalise_observations": True},
    "replayed": {"advantages": "vtrace", "replay": 2, "minibatches": 3},
    "adapted": {"desired_kl": 0.01, "ema_decay": 0.9},
    "scheduled": {"clip_schedule": "linear", "min_clip_ratio": 0.1, "schedule": "linear"},
    "scaled": {"normalise_rewards": True, "normalise_observations": True},
    "correlated": {"noise_correlation": 0.9, "normalise_rewards": True, "gamma": 0.5},
}
CONTINUOUS = {"correlated"}


def make_continuous_walker():
    return Walker(continuous=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_cut_anywhere_it_is_the_run_in_one_piece(tmp_path, name):
    options = {**VARIANTS[name], "checkpoint_every": 1, "eval_every": 3, "patience": 50}
    options["maker"] = make_continuous_walker if name in CONTINUOUS else Walker
    uninterrupted = build_trainer(**options)
    expected = MemoryTracker()
    train_network(uninterrupted, 7, expected)
    for cut in (1, 3, 6):
        with CheckpointStore(tmp_path / str(cut)) as store:
            actual = MemoryTracker()
            first = build_trainer(**options)
            with pytest.raises(CallbackError, match="as kill -9 would"):
                train_network(
                    first, 7, actual, checkpoints=store, callbacks=[build_killer(cut + 1)]
                )
            resumed = build_trainer(**options)
            train_network(resumed, 7, actual, checkpoints=store)
            assert copy_weights(resumed).keys() == copy_weights(uninterrupted).keys()
            for key, value in copy_weights(uninterrupted).items():
                assert torch.equal(value, copy_weights(resumed)[key]), (cut, key)
            assert select_comparable(actual) == select_comparable(expected), cut


def build_killer(iteration):
    """Build a callback that ends the run after an iteration, before its checkpoint."""

    def kill_run(event):
        if event.kind == "iteration" and event.iteration == iteration:
            raise RuntimeError("as kill -9 would")

    return kill_run


def select_comparable(tracker):
    """Select metrics by step without times; the later of two that were computed twice."""
    return {
        (step, name): value
        for step, row in tracker.metrics
        for name, value in row.items()
        if not name.startswith("perf/")
    }


SAVED_ITEMS = ["environment", "rng", "recent", "environment_steps", "episodes", "buffers"]


@pytest.mark.parametrize("lost", [*SAVED_ITEMS, "reward_statistics", "noise"])
def test_each_saved_item_is_missed(lost):
    options = {
        "advantages": "vtrace",
        "replay": 1,
        "normalise_observations": True,
        "normalise_rewards": True,
        "noise_correlation": 0.9,
        "maker": make_continuous_walker,
    }
    trainer = build_trainer(**options)
    for _ in range(3):
        trainer.step()
    fresh = build_trainer(**options)
    state, model, step = (
        trainer.state_dict(),
        copy.deepcopy(trainer.model.state_dict()),
        copy.deepcopy(trainer.optimizer_step.state_dict()),
    )
    stored = copy.deepcopy(state)

    def compute_outcome(changed):
        other = build_trainer(**options)
        other.model.load_state_dict(model)
        other.optimizer_step.load_state_dict(copy.deepcopy(step))
        other.load_state_dict(copy.deepcopy(changed))
        metrics = [
            {k: v for k, v in other.step().items() if not k.startswith("perf/")} for _ in range(2)
        ]
        return metrics, other.state_dict()["rng"]

    expected = compute_outcome(stored)
    assert compute_outcome({**stored, lost: fresh.state_dict()[lost]}) != expected
    with pytest.raises(KeyError, match=lost):
        compute_outcome({key: value for key, value in stored.items() if key != lost})


def test_statistics_of_observations_are_in_the_checkpoint(tmp_path):
    trainer = build_trainer(normalise_observations=True, checkpoint_every=1)
    with CheckpointStore(tmp_path) as store:
        train_network(trainer, 3, checkpoints=store)
        state = store.load_latest()
    assert float(state["model"]["statistics.count"]) == 3 * 64
    rows = trainer._buffers[0].read_real_steps("observations").double()
    assert not torch.equal(
        state["model"]["statistics.mean_D"], rows.mean(0)
    )  # over all three iterations, not only the last


def test_the_best_weights_come_back_with_their_statistics():
    trainer = build_trainer(normalise_observations=True, eval_every=1, patience=50)
    observed = []

    def record_evaluation(event):
        if event.kind == "evaluation":
            observed.append((event.metrics["eval/episode_return"], copy_weights(event.trainer)))

    outcome = train_network(
        trainer, 6, best_metric="eval/episode_return", callbacks=[record_evaluation]
    )
    best, selected = max(observed, key=lambda entry: entry[0])
    assert outcome.best_metric == best
    assert all(torch.equal(value, copy_weights(trainer)[name]) for name, value in selected.items())


def test_seeds_of_training_validation_and_test_never_meet():
    used = []

    class Noting(Walker):
        def reset(self, *, seed=None, options=None):
            used.append(seed)
            return super().reset(seed=seed)

    trainer = build_trainer(maker=Noting)
    trainer.step()
    training, used[:] = set(used), []
    trainer.evaluate()
    validation, used[:] = set(used), []
    test = trainer.evaluate_on_test_seeds()
    assert max(training) < 2**30 <= min(validation) and max(validation) < 2**30 + 2**29 <= min(
        test.seeds
    )
    assert trainer.evaluate_on_test_seeds().returns == test.returns and len(test.returns) == 5
    assert set(test.seeds) <= set(used)


def test_a_validation_changes_nothing_that_training_depends_on():
    first, second = build_trainer(), build_trainer()
    for trainer in (first, second):
        for _ in range(3):
            trainer.step()
            if trainer is second:
                trainer.evaluate()
    assert all(
        torch.equal(value, copy_weights(second)[name])
        for name, value in copy_weights(first).items()
    )


def test_sampled_and_greedy_evaluation_differ():
    trainer = build_trainer(eval_episodes=30)
    greedy = trainer.evaluate()
    sampled = build_trainer(eval_episodes=30, eval_greedy=False).evaluate()
    assert greedy["eval/episodes"] == sampled["eval/episodes"] == 30 and greedy != sampled
    assert (
        greedy["eval/episode_return_low"]
        <= greedy["eval/episode_return"]
        <= greedy["eval/episode_return_high"]
    )


def test_episodes_of_an_evaluation_do_not_depend_on_how_many_are_played_side_by_side(monkeypatch):
    trainer = build_trainer(eval_episodes=13)
    wide = trainer.evaluate_on_test_seeds()
    monkeypatch.setattr(network_evaluation, "MAX_PARALLEL_ENVIRONMENTS", 3)
    assert trainer.evaluate_on_test_seeds() == wide


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_vectors_that_reset_by_themselves_are_learned_from(mode):
    settings = NetworkSettings(**{**SMALL, "epochs": 10, "learning_rate": 5e-3})
    trainer = NetworkTrainer(None, settings, 0, name="Walk", vector=walkers(4, mode))
    returns = [trainer.step()["train/episode_return"] for _ in range(40)]
    assert returns[-1] > returns[0] + 2
    assert trainer.evaluate() == {}
    assert (trainer.environment_steps < 40 * 64) == (
        mode == "NextStep"
    )  # steps that only reset are not counted
    with pytest.raises(SettingsError, match="a VectorEnv has no held-out episodes"):
        trainer.evaluate_on_test_seeds()


def test_an_environment_that_raises_in_the_middle_leaves_the_weights_alone():
    trainer = build_trainer(maker=lambda: Walker(fails_at=20))
    trainer.step()
    before = copy_weights(trainer)
    with pytest.raises(EnvironmentFault, match="raised ValueError in step: the floor gave way"):
        trainer.step()
    assert all(torch.equal(value, before[name]) for name, value in copy_weights(trainer).items())


def test_a_vector_of_another_size_is_refused():
    with pytest.raises(SettingsError, match="num_environments: 4, but the VectorEnv has 3"):
        NetworkTrainer(None, NetworkSettings(**SMALL), 0, name="Walk", vector=walkers(3))
    with pytest.raises(
        SettingsError,
        match="rollout_steps: a VectorEnv that resets at the next step needs at least 2",
    ):
        settings = NetworkSettings(**{**SMALL, "rollout_steps": 1})
        NetworkTrainer(None, settings, 0, name="Walk", vector=walkers(4, "NextStep"))
    with pytest.raises(SettingsError, match="needs a function that makes one, or a VectorEnv"):
        NetworkTrainer(None, NetworkSettings(**SMALL), 0, name="Walk")


def test_replay_keeps_so_many_iterations():
    trainer = build_trainer(advantages="vtrace", replay=2, minibatches=2)
    counts = [trainer.step().get("train/replayed_steps", 0) for _ in range(5)]
    assert counts == [0, 64, 128, 128, 128]
    assert len(trainer.state_dict()["buffers"]) == 2
    memories = {buffer.observations.ctypes.data for buffer in trainer._buffers}
    trainer.step()
    assert {buffer.observations.ctypes.data for buffer in trainer._buffers} == memories


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"environment": "package.module:World"},
            "names code; use environment_class for an import path",
        ),
        (
            {"rollout_steps": 2**20, "num_environments": 64},
            "67,108,864 steps in one iteration, more than 16,777,216",
        ),
        (
            {"environment_steps": 63},
            "environment_steps: 63 is less than one iteration, 4 environments x 16 steps",
        ),
        ({"minibatches": 1000}, "minibatches: 1000 is more than the steps of one iteration"),
        ({"minibatches": 60}, "normalise_advantages: a minibatch of one step has no variance"),
        ({"autocast": "bfloat16"}, "autocast: applies only to language models; leave it none"),
        ({"dropout": True}, "dropout: applies only to language models; leave it false"),
        (
            {"replay": 1},
            "replay: steps of older policies need a correction; set advantages to vtrace",
        ),
        ({"vtrace_rho": 0.5}, "vtrace_c: 1.0 is above vtrace_rho 0.5"),
        ({"desired_kl": 0.01, "schedule": "linear"}, "desired_kl: adapts the learning rate"),
        (
            {"desired_kl": 0.01, "epochs": 1},
            "desired_kl: the KL is measured before each optimizer step",
        ),
        (
            {"desired_kl": 0.01, "learning_rate": 0.5},
            "learning_rate: 0.5 must lie between learning_rate_low",
        ),
        ({"hidden": (0,)}, "hidden: 0 must be at least 1"),
        ({"min_clip_ratio": 0.5}, "min_clip_ratio: ends a falling clip range; set clip_schedule"),
        ({"noise_correlation": 1.0}, "noise_correlation: 1.0 must be less than 1"),
        ({"clip_schedule": "cosine"}, "clip_schedule: 'cosine'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        NetworkSettings(**{**SMALL, **options})


def test_lengths():
    settings = NetworkSettings(
        environment_steps=1000, num_environments=8, rollout_steps=32, epochs=3, minibatches=2
    )
    assert (settings.steps_per_iteration, settings.iterations, settings.updates_per_iteration) == (
        256,
        3,
        6,
    )
    assert np.isfinite(build_trainer().step()["train/loss"])


def test_the_clip_range_by_hand():
    settings = NetworkSettings(clip_eps=0.3, clip_schedule="linear", min_clip_ratio=0.2)
    # from 0.3 towards 0.06 at step 100: halfway 0.18, at a quarter 0.24
    ranges = [compute_clip_eps(settings, step, 100) for step in (0, 25, 50, 100, 120)]
    assert ranges == pytest.approx([0.3, 0.24, 0.18, 0.06, 0.06])
    assert compute_clip_eps(NetworkSettings(clip_eps=0.3), 50, 100) == 0.3
    to_zero = NetworkSettings(clip_schedule="linear")
    assert 0 < compute_clip_eps(to_zero, 100, 100) < 1e-5  # a loss needs a range above 0


def test_a_run_with_a_falling_clip_range_uses_it():
    # five iterations of 8 optimizer steps: the clip range of each is that of its first step
    options = {"environment_steps": 5 * 64, "minibatches": 2, "learning_rate": 0.02}
    falling = build_trainer(clip_schedule="linear", **options)
    metrics = [falling.step() for _ in range(5)]
    assert [row["train/clip_eps"] for row in metrics] == pytest.approx(
        [0.2, 0.16, 0.12, 0.08, 0.04]
    )
    constant = build_trainer(**options)
    others = [constant.step() for _ in range(5)]
    assert "train/clip_eps" not in others[0]
    assert others[0]["train/loss"] == metrics[0]["train/loss"]
    assert others[1]["train/loss"] != metrics[1]["train/loss"]


def test_correlated_noise_by_hand():
    space = ActionSpace("continuous", 1, (-1.0,), (1.0,), shape=(1,))
    noise = ActionNoise(np.random.default_rng(0), 2, space, 0.6)
    draws = [np.array([[1.0], [2.0]], np.float32), np.array([[0.5], [-1.0]], np.float32)]
    assert noise.correlate(draws[0]).tolist() == [[1.0], [2.0]]  # the first of an episode
    noise.end_episodes(np.array([False, True]))
    # 0.6 x 1 + 0.8 x 0.5 = 1; a new episode: -1
    assert noise.correlate(draws[1])[:, 0].tolist() == pytest.approx([1.0, -1.0])
    assert noise.draw_steps(3).shape == (3, 2, 1)


def test_correlated_noise_is_standard_normal_at_every_step():
    space = ActionSpace("continuous", 1, (-1.0,), (1.0,), shape=(1,))
    noise = ActionNoise(np.random.default_rng(0), 20_000, space, 0.9)
    steps = [noise.correlate(independent).copy() for independent in noise.draw_steps(6)]
    for step in steps:
        assert float(step.std()) == pytest.approx(1.0, abs=0.02)  # four standard errors
    correlation = np.corrcoef(steps[4][:, 0], steps[5][:, 0])[0, 1]
    assert correlation == pytest.approx(0.9, abs=0.01)


def test_correlated_noise_needs_numbers():
    with pytest.raises(SettingsError, match="noise_correlation: needs continuous actions"):
        build_trainer(noise_correlation=0.5)


def test_rewards_are_normalised_for_learning_alone():
    plain, scaled = build_trainer(), build_trainer(normalise_rewards=True)
    first, second = plain.step(), scaled.step()
    assert first["train/step_reward"] == second["train/step_reward"]
    assert first["train/episode_return"] == second["train/episode_return"]
    assert second["value/loss"] < first["value/loss"]
    # a thousand times the rewards give the same first iteration, up to rounding
    third = build_trainer(normalise_rewards=True, maker=HugeRewards).step()
    assert third["train/step_reward"] == pytest.approx(1000 * second["train/step_reward"])
    for name in ("policy/update_kl", "value/loss", "train/grad_norm"):
        assert third[name] == pytest.approx(second[name], rel=1e-3), name


class HugeRewards(Walker):
    """A walker that earns a thousand times as much."""

    def step(self, action):
        seen, reward, *rest = super().step(action)
        return seen, 1000 * reward, *rest


class Blink(Walker):
    """An environment whose every step truncates."""

    def step(self, action):
        seen, reward, *_ = super().step(action)
        return seen, reward, False, True, {}


@pytest.mark.parametrize(
    "options", [{}, {"normalise_rewards": True, "normalise_observations": True}]
)
def test_episodes_of_one_step(options):
    trainer = build_trainer(maker=Blink, **options)
    metrics = [trainer.step() for _ in range(3)][-1]
    assert metrics["train/episode_length"] == 1.0 and metrics["train/episodes"] == 3 * 64
    assert np.isfinite(metrics["train/loss"])
    assert trainer.evaluate()["eval/truncated_rate"] == 1.0


class NoReward(Walker):
    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, float("nan") if self.calls > 20 else 0.0, *rest


def test_nan_rewards_end_the_run_before_they_reach_weights_or_statistics():
    trainer = build_trainer(maker=NoReward, normalise_rewards=True, normalise_observations=True)
    trainer.step()  # 16 steps of each environment, all rewards 0
    weights, state = copy_weights(trainer), trainer._reward_statistics.state_dict()
    assert state["squares"] == 0.0 and all(bool(w.isfinite().all()) for w in weights.values())
    with pytest.raises(EnvironmentFault, match=r"reward .*nan.* is not finite"):
        trainer.step()
    assert all(torch.equal(value, weights[name]) for name, value in copy_weights(trainer).items())
    assert trainer._reward_statistics.state_dict()["count"] == state["count"]
