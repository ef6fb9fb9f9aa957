"""`posttrain sweep` as a user runs it: in worker processes, killed and gone on with, with its winner at the gate."""

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
EACH = [
    point for point, found in FAULT_POINTS.items() if found.run == "sweep" and point != "sweep.rung"
]


def command(folder, *more):
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
        *more,
    ]


def environment(**more):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run(folder, *more, code=0, **variables):
    done = subprocess.run(
        command(folder, *more),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def results(folder):
    (path,) = (folder / "out" / "small" / "sweeps").glob("*/results.json")
    found = json.loads(path.read_text())
    values = {
        row["settings"]["stages.policy.learning_rate"]: row["values"]
        for row in found["configurations"]
    }
    return values, found["choice"]


def finished(folder):
    paths = sorted((folder / "out" / "small" / "sweeps").glob("*/trials/*/trial.json"))
    return {path.parent.name: path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_from_the_command_line(whole):
    folder, said = whole
    values, choice = results(folder)
    assert {rate: len(found) for rate, found in values.items()} == {"1e-4": 2, "1e-2": 2}
    assert (
        choice["draw"] == 1
        and choice["fresh"].keys() == {"0", "1"}
        and len(choice["comparisons"]) == 1
    )
    assert "on fresh held-out episodes" in said and "promote: version 1 of small" in said
    (table,) = (folder / "out" / "small" / "sweeps").glob("*/sweep.csv")
    with table.open(newline="") as file:
        assert [row["winner"] for row in csv.DictReader(file)].count("1") == 1
    rows = Tracking(None, folder / "out", "small").list_runs()
    sweep = next(row for row in rows if row.tags.get("kind") == "sweep")
    trials = [row for row in rows if row.parent_run_id == sweep.run_id]
    assert len(trials) == 5 and {row.status for row in [sweep, *trials]} == {"FINISHED"}, (
        "and one plays fresh episodes"
    )
    assert sum(row.name == "sft" for row in rows) == 1, "trained once for all"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", EACH)
def test_killed_at_each_point_it_ends_as_one_that_was_not(whole, tmp_path, point):
    run(tmp_path, code=-9, POSTTRAIN_FAULT=f"{point}:1:kill")
    before = finished(tmp_path)
    run(tmp_path)
    after = finished(tmp_path)
    assert {name: after[name] for name in before} == before, "no finished trial ran again"
    assert results(tmp_path) == results(whole[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_from_outside_with_two_at_a_time_no_process_stays_and_checkpoints_are_used(
    whole, tmp_path
):
    more = ("--parallel", "2")
    process = subprocess.Popen(
        command(tmp_path, *more), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
    )
    stages = tmp_path / "out" / "small" / "stages" / "policy"
    deadline = time.monotonic() + 300
    while (
        not list(stages.glob("*.open/checkpoints/*"))
        and not finished(tmp_path)
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
    before = finished(tmp_path)
    run(tmp_path, *more)
    assert {name: finished(tmp_path)[name] for name in before} == before
    assert results(tmp_path) == results(whole[0]), "the order of trials changes no number"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_is_stopped_in_time_and_goes_on(tmp_path):
    said = subprocess.run(
        command(tmp_path, "--stop-after", "14"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 143 and "Traceback" not in said.stderr, said.stderr
    assert Path(tmp_path / "out").is_dir()
    run(tmp_path)
    assert results(tmp_path)[1]["draw"] == 1
