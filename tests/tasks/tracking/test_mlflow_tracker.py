"""MLflow as a tracker of the Python API, by name and as an object, with a real sqlite store."""

import tomllib
from pathlib import Path

import pytest

import rl_core
from rl_core.trackers.resolve import build_tracker_group
from tasks.tracking import MlflowTracker

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install the project's entry points as a distribution."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "site" / "posttrain_plugins-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: posttrain-plugins\nVersion: 1.0\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entry_points.items())
        for group, entry_points in points.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def score_length(trajectories):
    return [float(len(trajectory.completion)) for trajectory in trajectories]


def train(tracker, output=None):
    model = rl_core.ModelSettings(preset="nano", vocab_size=300, context=48, device="cpu")
    training = rl_core.grpo(
        rl_core.create_policy(["say e"], model),
        prompts=["say e"],
        reward=score_length,
        tracker=tracker,
        output=output,
        settings=rl_core.PolicySettings(
            iterations=2,
            prompts_per_iteration=1,
            group_size=2,
            entropy_coef=0.01,  # rewards are equal, and a run must learn something
            sampling=rl_core.SamplingSettings(max_completion_tokens=3),
        ),
    )
    training.run()
    return training


def read_history(tracking, run_id):
    client = tracking.store.client
    run = client.get_run(run_id)
    history = client.get_metric_history(run_id, "reward/mean")
    return run, [
        (point.step, point.value) for point in sorted(history, key=lambda point: point.step)
    ]


def test_by_name(installed, tracking, tmp_path):
    uri = tracking.store.uri
    training = train(f"mlflow:{uri}", output=tmp_path / "out")
    run_id = training._tracker.trackers[-1].run_id
    run, history = read_history(tracking, run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "grpo"
    assert history == list(training.metrics()["reward/mean"].items()) and len(history) == 2
    assert run.data.params["settings.group_size"] == "2" and run.data.params["seed"] == "0"


def test_as_an_object_with_a_name(tracking, tmp_path):
    tracker = MlflowTracker(tracking.store.uri, folder=tmp_path, experiment="tests", name="mine")
    training = train(tracker)
    run, history = read_history(tracking, tracker.run_id)
    assert run.info.run_name == "mine" and history == list(
        training.metrics()["reward/mean"].items()
    )


def test_without_the_plug_in_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("rl_core.trackers.resolve.entry_points", lambda group: [])
    with pytest.raises(rl_core.SettingsError, match="it comes with the package posttrain"):
        build_tracker_group("mlflow:sqlite:///x.db")
