"""The stage suites in a small pipeline, with a stand-in for lm-eval: keys, resuming, tracking, and the gate."""

from __future__ import annotations

import json

import pytest
from crash.pipelines import write_inputs
from helpers.adapters import fakes
from helpers.exports import in_this_process

from rl_core.errors import DataError, SettingsError
from rl_core.evaluators import lm_eval_child, run_suites
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault
from tasks.config import build_settings, load_settings
from tasks.config.problems import ConfigError
from tasks.pipeline.dag import run_dag, wrap_stage_call
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.tracking import Tracking

WITHOUT = [
    f"stages.{stage}=null"
    for stage in ("distill", "preference", "reward_model", "policy", "analyze")
]
ROWS = [
    {"context": f"red at row {n} ", "choices": [" one", " two", " three"], "gold": n % 3}
    for n in range(12)
]


@pytest.fixture(scope="module", autouse=True)
def _stand_ins():
    with pytest.MonkeyPatch.context() as patch, fakes("lm_eval"):
        patch.setattr("rl_core.models.export_verification.score_in_fresh_process", in_this_process)
        patch.setattr(run_suites, "_run_child", run_in_this_process)
        yield


def run_in_this_process(command, variables, log, stop):
    """Run the program of a child here, which takes seconds less."""
    try:
        return lm_eval_child.main(command[-1:])
    except SystemExit as left:
        return left.code


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("suites"))


def write_task(config, **task):
    folder = config.parent / "evals"
    folder.mkdir(exist_ok=True)
    row = {"rows": ROWS, "calls": str(config.parent / "calls"), **task}
    (folder / "cells.json").write_text(json.dumps(row))
    return folder


def count_calls(config):
    path = config.parent / "calls"
    return len(path.read_text().split()) if path.exists() else 0


def run(config, *overrides):
    suites = {"tasks": ["lm-eval:cells"], "include_path": "evals"}
    overrides = [*WITHOUT, f"stages.suites={json.dumps(suites)}", *overrides]
    with PipelineRun(load_settings(config, overrides)) as pipeline_run:
        run_dag(pipeline_run, {}, wrap_stage_call)
    return pipeline_run


@pytest.mark.slow
def test_suites_run_once_resume_and_count_at_the_gate(config):
    write_task(config, exit=1)
    with pytest.raises(DataError, match="ended with exit code 1 before lm_eval/cells had a result"):
        run(config)
    write_task(config)
    before = count_calls(config)
    metrics = 'stages.promote.metrics={"lm_eval/cells/acc": {min: 0, max_loss: 0.9}}'
    first = run(config, metrics).results
    models = first["suites"].summary["models"]
    assert list(models) == ["sft"] and count_calls(config) == before + 1
    value = models["sft"]["lm_eval/cells"]["metrics"]["acc"]["value"]
    assert first["promote"].summary["decision"] == "promoted"
    assert f"lm_eval/cells/acc {value:.4g} [" in first["promote"].summary["reason"]
    output = config.parent / "work" / "outputs"
    tracking = Tracking(None, output, "small")
    (row,) = [row for row in tracking.list_runs() if row.run_id == first["suites"].run_id]
    logged = row.metrics
    assert logged["eval/sft/lm_eval/cells/acc"] == pytest.approx(value)
    assert (
        logged["eval/sft/lm_eval/cells/acc_low"] < value < logged["eval/sft/lm_eval/cells/acc_high"]
    )
    tags = tracking.find_champion("small").tags
    assert float(tags["gate.metrics/lm_eval/cells/acc"]) == pytest.approx(value, abs=1e-5)
    stored = first["suites"].path / "sft" / "lm_eval-cells"
    assert {path.name for path in stored.iterdir()} == {"result.json", "samples.jsonl"}

    again = run(config, metrics).results
    assert again["suites"].cached and count_calls(config) == before + 1

    # another model: it and the champion are evaluated, one task each
    refused = run(config, metrics, "seed=1").results
    assert count_calls(config) == before + 3
    summary = refused["promote"].summary
    assert "lm_eval/cells/acc" in summary["reason"] and "on 12 samples" in summary["reason"]
    assert any(key.endswith("lm_eval/cells/acc/gain") for key in summary["metrics"])

    above = 'stages.promote.metrics={"lm_eval/cells/acc": {min: 1.5}}'
    rejected = run(config, above, "seed=2", "stages.promote.min_gain=-1").results["promote"].summary
    assert rejected["decision"] == "rejected" and "is below 1.5" in rejected["reason"]
    with pytest.raises(SettingsError, match="no suite gave a metric 'lm_eval/cells/acc_norm'; did"):
        run(config, 'stages.promote.metrics={"lm_eval/cells/acc_norm": {min: 0}}')

    write_task(config, rows=ROWS[:5])  # the content of the folder decides the key
    changed = run(config, metrics).results["suites"]
    assert not changed.cached and changed.summary["models"]["sft"]["lm_eval/cells"]["samples"] == 5


def test_a_stage_that_dies_at_each_point_of_its_tasks_ends_with_the_same_files(config):
    folder = write_task(config, rows=ROWS[:7])
    (folder / "more.json").write_text(json.dumps({"rows": ROWS[:3]}))
    options = ('stages.suites.tasks=["lm-eval:cells,more"]', "stages.promote=null")

    def read_files(slots, plan):
        """Run until the stage ends; return its files. Every number of slots has a key of its own."""
        faults.configure_faults(plan)
        while True:
            try:
                result = run(config, *options, f"stages.suites.slots={slots}").results["suites"]
                break
            except InjectedFault as fault:
                deaths.append(fault)
        faults.configure_faults(None)
        paths = sorted((result.path / "sft").rglob("*.json*"))
        return [(path.relative_to(result.path), path.read_bytes()) for path in paths]

    deaths, points = [], ("suite.samples", "suite.result", "suite.copied")
    undisturbed = read_files(3, None)
    assert not deaths and len(undisturbed) == 4
    before = count_calls(config)
    assert read_files(4, ",".join(f"{point}:1:raise" for point in points)) == undisturbed
    assert len(deaths) == 3 and all(map(str.__contains__, map(str, deaths), points))
    assert count_calls(config) == before + 2  # a task with samples but without a result runs again


def test_what_cannot_run_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals.py").write_text("")

    def build(**stages):
        values = {"name": "t", "environment": {"name": "arithmetic"}}
        with pytest.raises(ConfigError) as refused:
            build_settings({**values, "stages": {"sft": {}, "evaluate": {}, **stages}})
        return str(refused.value)

    assert "stages.suites.tasks: names no suite" in build(suites={})
    assert "the file no.py does not exist" in build(suites={"tasks": ["inspect:no.py@t"]})
    text = build(suites={"tasks": ["lm-eval:t"], "include_path": "nowhere"})
    assert "stages.suites.include_path: nowhere does not exist" in text
    metrics = {"lm_eval/gsm9k/acc": {"min": 0.1}}
    text = build(suites={"tasks": ["lm-eval:gsm8k"]}, promote={"metrics": metrics})
    assert "names no task of stages.suites; write TASK/METRIC: did you mean 'lm_eval/gsm8k'" in text
    assert "is a metric of no suite: add stages.suites" in build(promote={"metrics": metrics})
    assert "min, max or max_loss" in build(promote={"metrics": {"lm_eval/a/acc": {}}})


def test_files_are_found_beside_the_config(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "evals.py").write_text("")
    (tmp_path / "tasks").mkdir()
    suites = {"tasks": ["inspect:evals.py@t", "lm-eval:a"], "include_path": "tasks"}
    values = {
        "name": "t",
        "output": str(tmp_path / "out"),
        "environment": {"name": "arithmetic"},
        "stages": {"sft": {}, "suites": suites},
    }
    config = tmp_path / "t.yaml"
    config.write_text(json.dumps(values))
    loaded = load_settings(config, check_servers=False).stages.suites
    assert loaded.tasks == (f"inspect:{tmp_path / 'evals.py'}@t", "lm-eval:a")
    assert loaded.include_path == str(tmp_path / "tasks")
