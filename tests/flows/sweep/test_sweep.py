"""`posttrain sweep` as a user runs it: in worker processes, killed and resumed, with its winner at the gate."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import ROOT
from helpers.small_sweep import CONFIG

from rl_core.storage.faults import FAULT_POINTS
from tasks.tracking import Tracking

RATES = "stages.policy.learning_rate=1e-4,1e-2"
SWEEP_POINTS = [
    name for name, point in FAULT_POINTS.items() if point.run == "sweep" and name != "sweep.rung"
]


def build_command(folder, *options):
    config = folder / "small.yaml"
    config.write_text(CONFIG)
    return [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "sweep",
        str(config),
        "--set",
        f"output={folder / 'out'}",
        "--set",
        RATES,
        "--seeds",
        "2",
        "--seed-stage",
        "policy",
        "--quiet",
        *options,
    ]


def build_environment(**variables):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def run_sweep(folder, *options, code=0, **variables):
    process = subprocess.run(
        build_command(folder, *options),
        cwd=folder,
        env=build_environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == code, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


def read_results(folder):
    (path,) = (folder / "out" / "small" / "sweeps").glob("*/results.json")
    document = json.loads(path.read_text())
    values = {
        row["settings"]["stages.policy.learning_rate"]: row["values"]
        for row in document["configurations"]
    }
    return values, document["choice"]


def read_trial_times(folder):
    paths = sorted((folder / "out" / "small" / "sweeps").glob("*/trials/*/trial.json"))
    return {path.parent.name: path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, run_sweep(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_from_the_command_line(uninterrupted):
    folder, output = uninterrupted
    values, choice = read_results(folder)
    assert {rate: len(values_of_rate) for rate, values_of_rate in values.items()} == {
        "1e-4": 2,
        "1e-2": 2,
    }
    assert (
        choice["draw"] == 1
        and choice["fresh"].keys() == {"0", "1"}
        and len(choice["comparisons"]) == 1
    )
    assert "on fresh held-out episodes" in output and "promote: version 1 of small" in output
    (table,) = (folder / "out" / "small" / "sweeps").glob("*/sweep.csv")
    with table.open(newline="") as file:
        assert [row["winner"] for row in csv.DictReader(file)].count("1") == 1
    rows = Tracking(None, folder / "out", "small").list_runs()
    sweep = next(row for row in rows if row.tags.get("kind") == "sweep")
    trials = [row for row in rows if row.parent_run_id == sweep.run_id]
    assert len(trials) == 5 and {row.status for row in [sweep, *trials]} == {"FINISHED"}, (
        "four trials, and a run of fresh episodes"
    )
    assert sum(row.name == "sft" for row in rows) == 1, "trained once for all trials"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", SWEEP_POINTS)
def test_a_sweep_killed_at_each_point_ends_like_an_uninterrupted_one(
    uninterrupted, tmp_path, point
):
    run_sweep(tmp_path, code=-9, POSTTRAIN_FAULT=f"{point}:1:kill")
    before = read_trial_times(tmp_path)
    run_sweep(tmp_path)
    after = read_trial_times(tmp_path)
    assert {name: after[name] for name in before} == before, "no finished trial ran again"
    assert read_results(tmp_path) == read_results(uninterrupted[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_of_two_parallel_trials_leaves_no_process_and_their_checkpoints_are_used(
    uninterrupted, tmp_path
):
    options = ("--parallel", "2")
    process = subprocess.Popen(
        build_command(tmp_path, *options),
        cwd=tmp_path,
        env=build_environment(),
        stdout=subprocess.DEVNULL,
    )
    stages = tmp_path / "out" / "small" / "stages" / "policy"
    deadline = time.monotonic() + 300
    while (
        not list(stages.glob("*.open/checkpoints/*"))
        and not read_trial_times(tmp_path)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "flows.sweep.worker" in " ".join(child.cmdline())]
    process.kill()
    process.wait()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == [], "workers die with the sweep"
    before = read_trial_times(tmp_path)
    run_sweep(tmp_path, *options)
    assert {name: read_trial_times(tmp_path)[name] for name in before} == before
    assert read_results(tmp_path) == read_results(uninterrupted[0]), (
        "the order of trials changes no value"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_stops_in_time_and_resumes(tmp_path):
    process = subprocess.run(
        build_command(tmp_path, "--stop-after", "14"),
        cwd=tmp_path,
        env=build_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 143 and "Traceback" not in process.stderr, process.stderr
    assert Path(tmp_path / "out").is_dir()
    run_sweep(tmp_path)
    assert read_results(tmp_path)[1]["draw"] == 1
