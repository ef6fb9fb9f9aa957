"""`posttrain run --dry-run`: why a stage ran or was cached, and what has changed since."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from helpers.stage_doubles import PipelineRun

from posttrain.cli.dry_run import explain_pipeline, explain_stage
from posttrain.cli.main import main
from rl_core.errors import SettingsError, Stopped
from rl_core.storage.checkpoint import CheckpointStore
from tasks.config import build_settings
from tasks.pipeline.changed_conditions import read_newest_fingerprint
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage import run_stage


def build_test_settings(tmp_path, **sft):
    return build_settings(
        {
            "name": "t",
            "output": str(tmp_path),
            "environment": {"name": "arithmetic"},
            "stages": {"sft": sft},
        }
    )


def run_sft(tmp_path, body, options=RunOptions(), **sft):  # noqa: B008 frozen
    pipeline_run = PipelineRun(tmp_path / "t" / "stages", options)
    pipeline_run.settings = build_test_settings(tmp_path, **sft)
    settings = pipeline_run.settings.stages.sft
    return run_stage(pipeline_run, "sft", body, settings=settings, inputs={"model": "org/name"})


def stop_after_checkpoint(context):
    CheckpointStore(context.checkpoints).save_version({"loop": {"iteration": 4}})
    raise Stopped("asked", 15)


def test_runs_and_changes_are_explained(tmp_path):
    assert (
        explain_stage(build_test_settings(tmp_path), "sft")
        .format_text()
        .startswith(f"sft was never run in {tmp_path / 't'}")
    )
    first = run_sft(tmp_path, lambda context: {}, learning_rate=1e-3)
    run_sft(tmp_path, lambda context: {}, learning_rate=1e-3)
    with pytest.raises(Stopped):
        run_sft(tmp_path, stop_after_checkpoint, learning_rate=2e-3)
    run_sft(tmp_path, lambda context: {}, RunOptions(on_drift="resume"), learning_rate=3e-3)
    explanation = explain_stage(build_test_settings(tmp_path, learning_rate=3e-3), "sft")
    lines = [line.partition("  ")[2] for line in explanation.format_text().splitlines()]
    changed = "  stages.sft.learning_rate: "
    assert [line.partition("  ")[2] or line for line in lines[:7]] == [
        "resumed from its checkpoint although this changed",
        f"{changed}0.002 -> 0.003"[2:],
        f"run because this changed since {first.key}",
        f"{changed}0.001 -> 0.002"[2:],
        "not run again: already finished with the same settings, inputs and code",
        "run for the first time",
        "",
    ]
    now = explanation.format_text().partition("now:\n")[2]
    assert now.splitlines()[0] == "  sft: settings and code unchanged"
    log = Path(now.splitlines()[-1].removeprefix("  log of the newest run: "))
    assert (
        log.parent.suffix == "" and "sft has finished" in log.read_text()
    )  # in the folder of the finished stage
    other = (
        explain_stage(build_test_settings(tmp_path, learning_rate=5e-3), "sft")
        .format_text()
        .partition("now:\n")[2]
        .splitlines()
    )
    assert other[0] == "  sft: changed"
    assert other[1] in [
        f"    stages.sft.learning_rate: {old} -> 0.005" for old in (0.001, 0.003)
    ]  # of one second


def test_the_record_of_an_explanation(tmp_path):
    run_sft(tmp_path, lambda context: {}, learning_rate=1e-3)
    record = json.loads(
        json.dumps(
            explain_stage(build_test_settings(tmp_path, learning_rate=2e-3), "sft").to_record()
        )
    )
    (decision,), (now,) = record["decisions"], record["now"]
    assert (decision["kind"], decision["changes"]) == ("first", [])
    assert now == {
        "stage": "sft",
        "has_result": True,
        "changes": ["stages.sft.learning_rate: 0.001 -> 0.002"],
        "checkpoints": [],
    }
    assert Path(record["log"]).is_file() and record["folder"] == str(tmp_path / "t")


def test_without_a_stage_the_newest_decision_about_each(tmp_path, capsys):
    first = run_sft(tmp_path, lambda context: {}, learning_rate=1e-3)
    second = run_sft(tmp_path, lambda context: {}, learning_rate=2e-3)
    explanation = explain_pipeline(build_test_settings(tmp_path, learning_rate=3e-3))
    (stage,) = explanation.stages
    assert (stage.stage, len(stage.decisions)) == ("sft", 1) and first.key != second.key
    lines = explanation.format_text().splitlines()
    assert lines[0].startswith("sft: ") and lines[0].endswith(
        f"run because this changed since {first.key}"
    )
    assert lines[1:] == [
        "    stages.sft.learning_rate: 0.001 -> 0.002",
        "",
        "now:",
        "  sft: changed",
        "    stages.sft.learning_rate: 0.002 -> 0.003",
        "  content of inputs is compared when a stage runs",
    ]
    assert main(["run", "maze", "--dry-run", "--set", f"output={tmp_path}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    stages = "prepare_data, sft, policy, evaluate, analyze, export, promote"
    assert printed.startswith(f"never run in {tmp_path / 'maze'}: {stages} now: ")
    assert printed.count("no result yet") == 1 and f"no result yet: {stages} " in printed
    assert main(["run", "maze", "--dry-run", "--set", f"output={tmp_path}", "--json"]) == 0
    assert [stage["stage"] for stage in json.loads(capsys.readouterr().out)][:2] == [
        "prepare_data",
        "sft",
    ]


@pytest.mark.parametrize(
    "clock", ["12:00:00 12:00:01", "12:00:00 12:00:00"], ids=["a second later", "the same second"]
)
def test_the_newest_fingerprint_is_that_of_the_last_run(tmp_path, monkeypatch, clock):
    for rate, now in zip((1e-3, 2e-3), clock.split(), strict=True):
        monkeypatch.setattr(
            "tasks.pipeline.stage_fingerprint.time.strftime", lambda _, now=now: now
        )
        last = run_sft(tmp_path, lambda context: {}, learning_rate=rate)
    same_second = len(set(clock.split())) == 1
    for (
        folder
    ) in last.path.parent.iterdir():  # folder times count only within one second of the clock
        if folder.is_dir():
            os.utime(folder, ns=(0, 2 if (folder == last.path) == same_second else 1))
    fingerprint = read_newest_fingerprint(last.path.parent)
    assert fingerprint is not None and fingerprint["settings"]["learning_rate"] == 2e-3


def test_a_stage_without_its_configuration_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "policy", "--dry-run"]) == 2
    assert "policy is a stage; name the configuration, too" in capsys.readouterr().err


def test_a_mistyped_stage_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(SettingsError, match="t: has no stage 'sftt'; did you mean 'sft'\\?"):
        explain_stage(build_test_settings(tmp_path), "sftt")
    with pytest.raises(
        SettingsError, match=r"t: has no stage 'mine', only sft; name your own under stages\.custom"
    ):
        explain_stage(build_test_settings(tmp_path), "mine")


def test_a_stage_that_the_settings_lack_is_refused(tmp_path):
    settings = build_test_settings(tmp_path)
    without = dataclasses.replace(
        settings, stages=dataclasses.replace(settings.stages, preference=None)
    )
    with pytest.raises(SettingsError, match="t: has no stage 'preference', only sft"):
        explain_stage(without, "preference")


def test_a_result_that_a_run_archives_meanwhile_is_skipped(tmp_path, monkeypatch):
    archived, remaining = (
        Path(run_sft(tmp_path, lambda context: {}, learning_rate=rate).folder)
        for rate in (1e-3, 2e-3)
    )
    is_dir = Path.is_dir

    def set_aside_since(path):
        fingerprint = is_dir(path)
        if path == archived and fingerprint:
            path.rename(path.with_name(f"{path.name}.corrupt"))
        return fingerprint

    monkeypatch.setattr(Path, "is_dir", set_aside_since)
    fingerprint = read_newest_fingerprint(remaining.parent)
    assert fingerprint["key"] == remaining.name and not archived.exists()
