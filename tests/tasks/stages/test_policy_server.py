"""The stage `policy` on an inference server: the run of one process, its server in the record, a kill and a resume."""

import psutil
import pytest
import torch
from helpers.fake_vllm import write_program
from helpers.policy_stage import context_of, save_base
from helpers.rollout_server import KEY
from helpers.serving import TOKEN, running_server
from safetensors.torch import load_file

from rl_core.errors import BackendError
from tasks.config import ConfigError
from tasks.pipeline.run_tracking import ModelVersions
from tasks.stages import policy

OPTIONS = {
    "rewards": {"task": 1.0, "length": 0.1},
    "reward_options": {"length": {"free": 0, "limit": 32}},
    "entropy_coef": 0.01,  # rewards are equal, and a run must learn something
    "iterations": 3,
    "checkpoint_every": 1,
}


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, TOKEN)
    return save_base(tmp_path / "base")


def build_rollouts(url, **options):
    return {
        "workers": "server",
        "address": url.removeprefix("http://"),
        "server": {"key_variable": KEY, "patience_s": 0.2, **options},
    }


def run(base, folder, rollouts):
    context = context_of(base, folder, rollouts=rollouts, **OPTIONS)
    summary = policy._run_policy_training(context)
    return context, summary, load_file(folder / "model" / "model.safetensors")


def assert_close(ours, theirs):
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=0)


def test_the_stage_on_a_server(base, tmp_path):
    _, _, alone = run(base, tmp_path / "alone", {"independent": True})
    with running_server(tmp_path / "server", base, rollouts=True, context=128, slots=16) as server:
        context, summary, weights = run(base, tmp_path / "served", build_rollouts(server.url))
    assert_close(weights, alone)
    assert context.tracker.tags["rollouts.server"].startswith("posttrain ")
    assert "torch 2." in context.tracker.tags["rollouts.server_versions"]
    assert summary["sampler"]["server"] in context.tracker.tags["rollouts.server"]
    assert "rollouts by posttrain" in summary["note"]
    rows = [row for _, row in context.tracker.metrics if "policy/server_difference" in row]
    assert len(rows) == 3 and max(row["policy/server_difference"] for row in rows) < 1e-4
    assert not list((tmp_path / "served").rglob("posttrain-weights-*"))


def test_the_server_is_in_the_versions_tags(base, tmp_path, monkeypatch):
    tags = {}

    class Tracker:
        def log_model(self, folder, kind, name, **more):
            tags.update(more["tags"])

    versions = object.__new__(ModelVersions)
    versions._settings, versions._tags, versions.name, versions._base = (
        context_of(base, tmp_path / "x").pipeline,
        {},
        "t",
        "",
    )
    monkeypatch.setattr(ModelVersions, "_find_parent_result", lambda self, stage: None)
    versions.register_model(
        Tracker(),
        base,
        "policy",
        {"sampler": {"server": "vllm 0.30.0 at a:1", "dtype": "bfloat16"}},
    )
    assert tags["rollouts.server"] == "vllm 0.30.0 at a:1" and tags["rollouts.dtype"] == "bfloat16"


@pytest.mark.slow
def test_the_stage_starts_and_restarts_its_server(base, tmp_path, monkeypatch):
    """A killed server is started again within the iteration, and ends with the stage."""
    update, trees = policy.RewardRecord.__call__, []

    def kill(record, iteration, rollouts):
        update(record, iteration, rollouts)
        keeper = next(
            child
            for child in psutil.Process().children()
            if any("subreaper" in part for part in child.cmdline())
        )
        trees.append([keeper, *keeper.children(recursive=True)])
        if iteration == 1:
            keeper.children()[0].kill()

    monkeypatch.setattr(policy.RewardRecord, "__call__", kill)
    server = {"start": True, "python": str(write_program(tmp_path)), "patience_s": 30.0}
    context, _, weights = run(base, tmp_path / "managed", {"workers": "server", "server": server})
    assert len(trees) == 3 and "was lost" in context.tracker.tags["rollouts.lost"]
    assert context.tracker.tags["rollouts.server"].startswith("vllm 0.30.0 at 127.0.0.1:")
    assert (tmp_path / "managed" / "server.log").read_text().count("--- started") == 2
    assert not any(process.is_running() for tree in trees for process in tree)
    untrained = load_file(base / "model.safetensors")
    assert any((weights[name] != untrained[name]).any() for name in untrained)


def test_a_killed_server_ends_the_stage_with_one_error_and_the_next_run_resumes(
    base, tmp_path, monkeypatch
):
    _, _, alone = run(base, tmp_path / "alone", {"independent": True})
    folder = tmp_path / "served"
    with running_server(tmp_path / "server", base, rollouts=True, context=128, slots=16) as server:
        context = context_of(base, folder, rollouts=build_rollouts(server.url), **OPTIONS)
        update, iterations = policy.RewardRecord.__call__, []

        def killed(record, iteration, rollouts):
            update(record, iteration, rollouts)
            iterations.append(iteration)
            if iteration == 1:
                server.web.should_exit = True
                server._thread.join(20)

        monkeypatch.setattr(policy.RewardRecord, "__call__", killed)
        with pytest.raises(
            BackendError, match=r"has not answered for 0.2 s .* the same command resumes"
        ):
            policy._run_policy_training(context)
        assert iterations == [0, 1] and "was lost" in context.tracker.tags["rollouts.lost"]
    with pytest.raises(ConfigError, match="no inference server answers"):
        context_of(base, tmp_path / "refused", rollouts=build_rollouts(server.url), **OPTIONS)
    with running_server(
        tmp_path / "another", base, rollouts=True, context=128, slots=16
    ) as another:
        resumed = context_of(
            base, tmp_path / "resumed", rollouts=build_rollouts(another.url), **OPTIONS
        )
        (folder / "checkpoints").rename(tmp_path / "resumed" / "checkpoints")
        resumed = type(resumed)(**{**vars(resumed), "folder": tmp_path / "resumed"})
        policy._run_policy_training(resumed)
    assert_close(load_file(tmp_path / "resumed" / "model" / "model.safetensors"), alone)
    assert iterations[2:] == [2]
