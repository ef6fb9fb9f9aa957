"""The stage `network` on gymnasium's environments: files, metrics, resume after a kill, refusals; and the entry
point of the Python API."""

import importlib.util
import json
import threading

import numpy as np
import pytest
import torch

import rl_core
from rl_core.errors import EnvironmentFault, ResumeRefused, SettingsError
from rl_core.tracking import MemoryTracker
from tasks.config import ConfigError, build_settings
from tasks.pipeline.stage import StageContext
from tasks.stages import network

SMALL = {
    "num_environments": 2,
    "rollout_steps": 16,
    "environment_steps": 160,
    "epochs": 2,
    "hidden": [8],
    "eval_episodes": 4,
    "checkpoint_every": 1,
}
WORLD = """
import gymnasium, numpy as np
class World(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)
    def __init__(self, length=3): self.length = length
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed); self.time = 0
        return self.np_random.uniform(-1, 1, 1), {}
    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float64)); self.time += 1
        return self.np_random.uniform(-1, 1, 1), float(-abs(action[0])), False, self.time >= self.length, {}
"""
needs_gymnasium = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None, reason="package gymnasium"
)


class Tracker(MemoryTracker):
    """Keeps the names of artifacts, too."""

    def __init__(self):
        super().__init__()
        self.artifacts = []

    def log_artifact(self, path, folder=""):
        self.artifacts.append(path.name)


def build_context(folder, **settings):
    folder.mkdir(exist_ok=True)
    pipeline = build_settings({"name": "t", "stages": {"network": {**SMALL, **settings}}})
    return StageContext(
        name="network",
        pipeline_run=None,
        settings=pipeline.stages.network,
        inputs={},
        pipeline=pipeline,
        seed=1,
        tracker=Tracker(),
        folder=folder,
        fingerprint={},
        stop=threading.Event(),
    )


def list_problems(*, import_code=True, **settings):
    try:
        build_settings(
            {"name": "x", "stages": {"network": settings}},
            check_files=False,
            import_code=import_code,
        )
    except ConfigError as error:
        return {".".join(map(str, problem.key)): problem.text for problem in error.problems}
    return {}


@needs_gymnasium
def test_the_stage_leaves_a_network_its_episodes_and_their_metrics(tmp_path):
    context = build_context(tmp_path / "a", eval_every=2, patience=9)
    summary = network._run_network_training(context)
    episodes = json.loads((context.folder / "episodes.json").read_text())
    assert len(episodes) == 4 and all(episode["seed"] >= 2**30 + 2**29 for episode in episodes)
    mean = float(np.mean([episode["return"] for episode in episodes]))
    assert summary["episode_return"] == summary["metrics"]["eval/test/episode_return"] == mean
    assert (
        summary["environment_steps"] == 160
        and "4 held-out episodes of CartPole-v1, played greedily" in summary["note"]
    )
    assert context.tracker.artifacts == ["network", "episodes.json"]
    assert context.tracker.metrics[-1][1]["eval/test/episode_return"] == mean
    model = rl_core.load_network(context.folder / "network")
    import gymnasium

    world, total = gymnasium.make("CartPole-v1"), 0.0
    seen, _ = world.reset(seed=episodes[0]["seed"])
    over = False
    while not over:
        seen, reward, terminated, truncated, _ = world.step(
            int(model.act(torch.from_numpy(seen[None]))[0])
        )
        total, over = total + reward, terminated or truncated
    assert total == episodes[0]["return"]


@needs_gymnasium
@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_that_was_cut_gives_the_same_bits(tmp_path, environment, monkeypatch):
    whole = build_context(tmp_path / "whole", environment=environment, normalise_observations=True)
    expected = network._run_network_training(whole)
    cut = build_context(tmp_path / "cut", environment=environment, normalise_observations=True)
    from rl_core.networks.trainer import NetworkTrainer

    step, calls = NetworkTrainer.step, []

    def dying(self):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(NetworkTrainer, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        network._run_network_training(cut)
    monkeypatch.undo()
    assert network._run_network_training(cut) == expected
    for name in ("network/network.safetensors", "episodes.json"):
        assert (cut.folder / name).read_bytes() == (whole.folder / name).read_bytes()


@needs_gymnasium
def test_environments_in_processes_give_the_same_numbers(tmp_path):
    one = network._run_network_training(build_context(tmp_path / "sync"))
    other = network._run_network_training(build_context(tmp_path / "async", vectorization="async"))
    assert one["metrics"] == other["metrics"]


@needs_gymnasium
def test_a_class_of_the_users_by_file(tmp_path, monkeypatch):
    (tmp_path / "world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    options = {"environment_class": "world.py:World", "environment_options": {"length": 5}}
    context = build_context(tmp_path / "a", **options)
    summary = network._run_network_training(context)
    assert summary["metrics"]["eval/test/episode_length"] == 5
    assert summary["metrics"]["eval/test/truncated_rate"] == 1
    assert (
        json.loads((context.folder / "network/network.json").read_text())["environment"]
        == "world.py:World"
    )
    assert list_problems(environment_class="world.py:Elsewhere").keys() == {
        "stages.network.environment_class"
    }
    (tmp_path / "other.py").write_text("class World: pass")
    problems = list_problems(environment_class="other.py:World")
    assert problems == {
        "stages.network.environment_class": "'other.py:World' is not a subclass of gymnasium.Env"
    }
    assert list_problems(environment_class="no import path").keys() == {
        "stages.network.environment_class"
    }


@needs_gymnasium
@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (
            {"environment": "Foo-v1"},
            "environment",
            "cannot be made (NameNotFound: Environment `Foo` doesn't exist.)",
        ),
        ({"environment_options": {"wheels": 2}}, "environment", "cannot be made (TypeError"),
        ({"environment": "Blackjack-v1"}, "environment", "observations are Tuple"),
        (
            {"environment": "CartPole-v1", "gamma": 2},
            "gamma",
            "found 2 (whole number); expected a number at least 0 and at most 1",
        ),
        ({"replay": 2}, "replay", "set advantages to vtrace"),
        ({"hidden": "64"}, "hidden", "found '64' (text); expected a list"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(settings, key, words):
    problems = list_problems(**settings)
    assert list(problems) == [f"stages.network.{key}"]
    assert (
        words in problems[f"stages.network.{key}"] and "\n" not in problems[f"stages.network.{key}"]
    )


def test_without_the_package_its_installation_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None)
    assert list_problems() == {
        "stages.network.environment": "a network's environment needs the package 'gymnasium', which is not installed; "
        "python -m posttrain.install --extras gymnasium"
    }
    with pytest.raises(
        SettingsError, match=r"environment: a network's environment needs the package 'gymnasium'"
    ):
        rl_core.network_ppo("CartPole-v1")


def test_code_of_the_users_is_not_run_where_it_must_not(monkeypatch):
    assert list_problems(environment_class="nowhere.to:Be", import_code=False) == {}


# -------------------------------------------------------------------------------------------- the Python API


@needs_gymnasium
def test_the_entry_point_trains_resumes_saves_and_tests(tmp_path):
    def settings(steps):
        return rl_core.NetworkSettings(**{**SMALL, "hidden": (8,), "environment_steps": steps})

    seen = []
    whole = rl_core.network_ppo(
        "CartPole-v1", settings=settings(160), seed=3, callbacks=[seen.append]
    )
    assert whole.run().iterations == 5 and {event.kind for event in seen} == {
        "iteration",
        "evaluation",
    }
    first = rl_core.network_ppo(
        "CartPole-v1", settings=settings(64), seed=3, output=tmp_path / "out"
    )
    first.run()
    again = rl_core.network_ppo(
        "CartPole-v1", settings=settings(160), seed=3, output=tmp_path / "out"
    )
    assert again.run().resumed_iteration == 2
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert again.test() == whole.test()
    network_folder = again.save(tmp_path / "net")
    loaded = rl_core.load_network(network_folder)
    assert torch.equal(loaded.act(torch.ones(2, 4)), again.model.act(torch.ones(2, 4)))
    assert "train/episode_return" in again.metrics()
    with pytest.raises(ResumeRefused, match=r"settings.gamma"):
        other = settings(160)
        rl_core.network_ppo(
            "CartPole-v1",
            settings=rl_core.NetworkSettings(**{**vars(other), "gamma": 0.5}),
            seed=3,
            output=tmp_path / "out",
        ).run()


@needs_gymnasium
def test_the_entry_point_takes_classes_functions_and_vectors():
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    settings = rl_core.NetworkSettings(**{**SMALL, "hidden": (8,)})
    world = lambda: gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 7)  # noqa: E731
    trained = rl_core.network_ppo(world, settings=settings)
    assert trained.run().metrics["eval/episode_length"] <= 7
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        vector = SyncVectorEnv([world] * 3, autoreset_mode=mode)
        trained = rl_core.network_ppo(vector, settings=settings)
        assert trained.run().iterations == 3 and trained.trainer.environment.mode == mode.value
    vector_environment = gymnasium.make_vec(
        "CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"
    )
    assert rl_core.network_ppo(vector_environment, settings=settings).run().iterations == 3
    with pytest.raises(SettingsError, match="environment: a int; pass an id"):
        rl_core.network_ppo(3)
    with pytest.raises(SettingsError, match="eval_every: a VectorEnv has no held-out episodes"):
        rl_core.network_ppo(vector_environment, settings=rl_core.NetworkSettings(eval_every=1))


@needs_gymnasium
def test_an_environment_that_raises_stops_the_run_with_its_seed():
    import gymnasium

    class Breaking(gymnasium.Wrapper):
        steps = 0

        def step(self, action):
            Breaking.steps += 1
            if Breaking.steps == 50:
                raise RuntimeError("no power")
            return self.env.step(action)

    settings = rl_core.NetworkSettings(**{**SMALL, "hidden": (8,)})
    training = rl_core.network_ppo(
        lambda: Breaking(gymnasium.make("CartPole-v1")), settings=settings
    )
    with pytest.raises(
        EnvironmentFault, match=r"seeds of the episodes: \[\d+, \d+\].* raised RuntimeError in step"
    ):
        training.run()


@needs_gymnasium
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_gymnasiums_modes_end_alike(mode):
    """Of each mode: behind the limit `after` is the third state, and the episode was truncated."""
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    from rl_core.networks.vector_environment import VectorEnvironment

    world = lambda: gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1").unwrapped, 3)  # noqa: E731
    vector = SyncVectorEnv([world], autoreset_mode=AutoresetMode[mode])
    environment = VectorEnvironment(vector, "CartPole", iter([11, 12, 13]).__next__)
    environment.reset()
    steps = [environment.step(np.array([1])) for _ in range(3)]
    single = world()
    seen, _ = single.reset(seed=11)
    for step in steps:
        seen, *_ = single.step(1)
        assert np.array_equal(step.after_ND[0], seen)
    assert [bool(step.truncated_N[0]) for step in steps] == [False, False, True]
    assert not any(step.terminated_N[0] for step in steps)
    assert np.array_equal(steps[-1].observations_ND, steps[-1].after_ND) == (mode == "NEXT_STEP")
