"""The main pipeline, interrupted: killed and resumed to the same bits, stopped by SIGTERM and Ctrl-C."""

import json
import os
import re
import signal
import subprocess

import pytest
from helpers import ROOT
from helpers.pipeline_runs import (
    build_run_command,
    read_metric_rows,
    read_run_tags,
    run_test_pipeline,
    write_policy_config,
)

from rl_core.cpu import openmp_spin
from rl_core.storage.manifest import digest_folder

PPO = ["algorithm=ppo", "epochs=2", "eval_every=2", "eval_episodes=6", "patience=5"]
# Rolls back at any decline.
ROLLBACK = [
    "rollback={metric: completion_tokens, window: 1, margin: 0.001, patience: 1, cooldown: 0}"
]


def kill_run(command, prefect_api, fault):
    """Run a command that a fault kills; return its stderr."""
    environment = {**os.environ, "POSTTRAIN_FAULT": fault, "PREFECT_API_URL": prefect_api}
    killed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return killed.stderr


def start_until_policy(command, environment, **options):
    """Start a command; return the process and its output as soon as its policy stage reports progress."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    lines = []
    for line in child.stdout:
        lines.append(line)
        if re.match(r"stage \d+/\d+ policy\b", line):
            break
    return child, "".join(lines)


@pytest.mark.parametrize(
    ("point", "settings"),
    [
        # The test of `threads=auto` covers the same with a curriculum.
        pytest.param("loop.stepped:4:kill", [], marks=pytest.mark.slow),
        pytest.param("pointer.written:2:kill", [], marks=pytest.mark.slow),
        # Items that are resumed from disk: test_every_saved_item.
        pytest.param("loop.stepped:4:kill", PPO, marks=pytest.mark.slow),
        pytest.param("loop.stepped:6:kill", ROLLBACK, marks=pytest.mark.slow),
    ],
)
def test_kill_9_in_the_policy_stage_and_resume_gives_the_same_bits(
    prefect_api, tmp_path, point, settings
):
    config, overrides = write_policy_config(tmp_path)
    overrides += [f"stages.policy.{setting}" for setting in settings]
    uninterrupted = run_test_pipeline(tmp_path / "whole", *overrides, config=config)
    kill_run(build_run_command(config, tmp_path / "cut", overrides, "--quiet"), prefect_api, point)
    stages = tmp_path / "cut/test/stages/policy"
    assert len(list(stages.glob("*.open/checkpoints/*"))) >= 1
    resumed = run_test_pipeline(tmp_path / "cut", *overrides, config=config)
    assert resumed.results["prepare_data"].cached
    policy, expected = resumed.results["policy"], uninterrupted.results["policy"]
    assert not policy.cached
    assert digest_folder(policy.model) == digest_folder(expected.model)
    assert read_metric_rows(policy.folder) == read_metric_rows(expected.folder)
    history = expected.summary["curriculum"]
    assert policy.summary["curriculum"] == history
    assert any(move["kind"] == "rollback" for move in history) is (settings == ROLLBACK)
    shown = json.loads((expected.path / "metrics_history.json").read_text())
    assert len(shown["metrics"]["train/success_rate"]) == 6


# The command line on a machine where two processors are free.
TWO_FREE = """
import sys
from rl_core.cpu import openmp_spin
openmp_spin.free_processors = lambda: 2
from posttrain.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_threads_auto_killed_and_resumed_under_another_load_gives_the_same_bits(
    prefect_api, tmp_path, monkeypatch
):
    config, overrides = write_policy_config(tmp_path)
    overrides += ["threads=auto", "stages.policy.iterations=4", "stages.policy.curriculum=[]"]
    monkeypatch.setattr(openmp_spin, "free_processors", lambda: 2)
    uninterrupted = run_test_pipeline(tmp_path / "whole", *overrides, config=config)
    command = build_run_command(
        config, tmp_path / "cut", overrides, "--quiet", program=("-c", TWO_FREE)
    )
    assert "threads: 2, as 2 of " in kill_run(command, prefect_api, "loop.stepped:3:kill")
    monkeypatch.setattr(openmp_spin, "free_processors", lambda: 1)
    # Other settings of the run, so that another run resumes the stage.
    resumed = run_test_pipeline(tmp_path / "cut", *overrides, "run.retries=1", config=config)
    assert json.loads((tmp_path / "cut/test/run.json").read_text())["threads"] == 1
    policy, expected = resumed.results["policy"], uninterrupted.results["policy"]
    assert not policy.cached
    assert policy.summary["threads"] == expected.summary["threads"] == 2
    assert read_run_tags(tmp_path / "cut", policy.run_id)["threads"] == "2"
    assert digest_folder(policy.model) == digest_folder(expected.model)
    assert read_metric_rows(policy.folder) == read_metric_rows(expected.folder)


def test_sigterm_saves_and_the_next_run_resumes(prefect_api, tmp_path):
    config, overrides = write_policy_config(tmp_path)
    command = build_run_command(config, tmp_path, [*overrides, "stages.policy.iterations=2000"])
    child, output = start_until_policy(command, {**os.environ, "PREFECT_API_URL": prefect_api})
    child.send_signal(signal.SIGTERM)
    output += child.communicate(timeout=60)[0]
    assert child.returncode == 143, output
    assert "resumes" in output
    checkpoints = list((tmp_path / "test/stages/policy").glob("*.open/checkpoints/*/manifest.json"))
    assert len(checkpoints) >= 1


@pytest.mark.slow
def test_ctrl_c_reaches_the_run_and_not_its_embedded_server(tmp_path):
    config, overrides = write_policy_config(tmp_path)
    command = build_run_command(config, tmp_path, [*overrides, "stages.policy.iterations=4000"])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    child, output = start_until_policy(command, environment, start_new_session=True)
    os.killpg(child.pid, signal.SIGINT)  # like a terminal: to everyone in the group
    # If the server were in the group, the client would retry for minutes.
    output += child.communicate(timeout=60)[0]
    assert child.returncode == 130, output
    assert "the same command resumes" in output
