"""Trials of a sweep in this process: shared stages, seeds, foreign checkpoints, the list of runs and a comparison."""

import dataclasses
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.small_sweep import CONFIG
from helpers.stage_doubles import PipelineRun as FakePipelineRun

from flows.sweep import winner as winner_module
from flows.sweep.plan import SweepPlan, format_configuration
from flows.sweep.report import (
    build_report_rows,
    format_report_table,
    render_markdown,
    write_report_files,
)
from flows.sweep.schedule import SweepRecord, TrialOutcome, TrialSchedule
from flows.sweep.search import Dimension, create_search, parse_set_options
from flows.sweep.trial import TrialJob, TrialPruned, evaluate_on_fresh_episodes, run_trial
from flows.sweep.winner import choose_winner
from posttrain.cli import compare
from posttrain.cli.compare import compare_tracked_runs, format_comparison
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import ResumeRefused, SettingsError, Stopped
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.locks import FolderLock
from tasks.config import dump_settings
from tasks.pipeline.dag import run_dag, wrap_stage_call
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.run_options import RunOptions, TrialLocation
from tasks.pipeline.stage import run_stage
from tasks.stage_registry import list_stage_names
from tasks.stages import evaluate
from tasks.tracking import Tracking, list_run_records, list_runs

TRIALS = [(0, 0), (0, 1), (1, 0)]  # number, seed


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.yaml").write_text(CONFIG)
    overrides, varied = parse_set_options(
        [f"output={folder / 'out'}", "stages.policy.learning_rate=1e-4,1e-2"]
    )
    return SweepPlan(
        config=str(folder / "small.yaml"),
        overrides=tuple(overrides),
        dimensions=tuple(varied),
        seeds=2,
        seed_stage="policy",
    )


def make_job(plan, record, number, seed, **changes):
    params = [{"stages.policy.learning_rate": rate} for rate in plan.dimensions[0].choices][number]
    job = TrialJob(
        home=str(record.locate_trial_folder(number, seed)),
        name=f"small · trial {number}, seed {seed}",
        settings=dump_settings(plan.load_trial_settings(params, seed)),
        metric=plan.metric,
        rungs=None,
        parent_folder=str(record.home),
        tags={"sweep": "s"},
        models={},
    )
    return params, dataclasses.replace(job, **changes)


def ignore_progress(*_):
    pass


@pytest.fixture(scope="module")
def swept_record(plan):
    """Run three of the four trials, one after the other."""
    record = SweepRecord(plan.locate_folder(plan.load_base_settings()))
    assert record.open_folder({"started": "now"}) is False
    base = plan.load_base_settings()
    run = Tracking(None, Path(base.output), "small").start_run(
        "small · sweep", record.home, tags={"kind": "sweep"}
    )
    for number, seed in TRIALS:
        params, job = make_job(plan, record, number, seed)
        if seed == 0:
            record.add_configuration(params)
        fields = run_trial(job, threading.Event(), lambda value: True, ignore_progress)
        record.record_outcome(TrialOutcome(number=number, seed=seed, params=params, **fields))
    run.close()
    return record


@pytest.mark.slow
def test_trials_share_every_stage_that_does_not_change(plan, swept_record):
    outcomes = swept_record.outcomes
    assert {key: outcome.status for key, outcome in outcomes.items()} == dict.fromkeys(
        TRIALS, "finished"
    )
    for name in ("prepare_data", "sft"):
        assert len({outcome.stages[name]["key"] for outcome in outcomes.values()}) == 1
        assert [outcome.stages[name]["cached"] for outcome in outcomes.values()] == [
            False,
            True,
            True,
        ]
    assert len({outcome.stages["policy"]["key"] for outcome in outcomes.values()}) == 3
    assert all(
        set(outcome.stages) == {"prepare_data", "sft", "policy", "evaluate"}
        for outcome in outcomes.values()
    )
    assert all(
        0 <= outcome.value <= 1 and outcome.peak_bytes > 2**27 for outcome in outcomes.values()
    )


def test_a_resumed_sweep_repeats_no_trial_with_an_outcome(plan, swept_record):
    resumed = SweepRecord(swept_record.home)
    assert resumed.open_folder({"started": "later"}) is True and resumed.values["started"] == "now"
    assert resumed.outcomes == swept_record.outcomes and [
        configuration.is_finished for configuration in resumed.list_configurations(2)
    ] == [True, False]
    search = create_search("grid", plan.dimensions, resumed.list_configurations(2), {})
    next_trial = TrialSchedule(
        plan, resumed, search, threading.Event(), ignore_progress
    ).take_next_trial()
    assert (next_trial.number, next_trial.seed) == (1, 1)
    three_seeds = dataclasses.replace(plan, seeds=3)
    schedule = TrialSchedule(
        three_seeds,
        resumed,
        create_search("grid", plan.dimensions, resumed.list_configurations(3), {}),
        threading.Event(),
        ignore_progress,
    )
    trial = schedule.take_next_trial()
    assert (trial.number, trial.seed, trial.settings.seeds) == (0, 2, {"policy": 2})
    assert resumed.home == three_seeds.locate_folder(three_seeds.load_base_settings()), (
        "it extends the sweep"
    )


def test_no_trial_was_evaluated_on_the_fresh_episodes(plan, swept_record):
    base = plan.load_base_settings()
    fresh = dataclasses.replace(base.stages.evaluate, episodes_draw=1)
    settings = dataclasses.replace(base, stages=dataclasses.replace(base.stages, evaluate=fresh))
    models = {"a": swept_record.outcomes[0, 0].model, "b": swept_record.outcomes[1, 0].model}
    _, job = make_job(
        plan,
        swept_record,
        0,
        0,
        home=str(swept_record.locate_trial_folder(9999, 0)),
        settings=dump_settings(settings),
        models=models,
        skip=tuple(name for name in list_stage_names() if name not in ("prepare_data", "evaluate")),
    )
    evaluation = evaluate_on_fresh_episodes(job, threading.Event())

    def list_episodes(folder, name):
        table = json.loads((Path(folder) / "evaluation.json").read_text())
        return {(episode["level"], episode["seed"]) for episode in table[name]["episodes"]}

    played = list_episodes(evaluation["folder"], "a")
    assert played == list_episodes(evaluation["folder"], "b") and len(played) == 6
    chosen_by = {
        key
        for outcome in swept_record.outcomes.values()
        for key in list_episodes(outcome.stages["evaluate"]["folder"], "policy")
    }
    assert len(chosen_by) == 6, "all trials played the same episodes"
    assert played & chosen_by == set()


def test_a_report_in_a_file_or_a_pipe_is_not_cut(plan, swept_record, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = build_report_rows(swept_record, plan, None)
    rows[0]["settings"] = {
        f"stages.policy.sampling.option_{number}_with_a_long_name": "0.123456789"
        for number in range(9)
    }
    header, *_ = format_report_table(rows, plan).splitlines()[1:]
    (line,) = [row for row in format_report_table(rows, plan).splitlines() if "option_0" in row]
    assert format_configuration(rows[0]["settings"]) in line and len(header) == len(line) > 300
    monkeypatch.setenv("COLUMNS", "100")
    assert all(len(line) <= 100 for line in format_report_table(rows, plan).splitlines())


def test_report_and_figure(plan, swept_record):
    rows = build_report_rows(swept_record, plan, None)
    assert sorted(row["seeds"] for row in rows) == [1, 2] and rows[0]["mean"] >= rows[1]["mean"]
    assert "finished 1, waiting 1" in format_report_table(
        rows, plan, width=160
    ) and "learning_rate=" in format_report_table(rows, plan, width=160)
    assert all(
        format_configuration(row["settings"]) in format_report_table(rows, plan, width=80)
        for row in rows
    ), "unbroken in 80 columns"
    write_report_files(swept_record, plan, rows, None)
    lines = (swept_record.home / "sweep.csv").read_text().splitlines()
    assert lines[0].startswith("number,stages.policy.learning_rate,seeds,mean") and len(lines) == 3
    assert (swept_record.home / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((swept_record.home / "results.json").read_text())["configurations"] == rows


def test_runs_are_listed_with_differing_settings_and_filtered(plan, swept_record):
    output = plan.load_base_settings().output
    lines = list_runs(output, limit=50, settings=True)
    # the short id of a trial stands before its name
    settings_of_run = {line["run"].split("  ")[-1].strip(): line["settings"] for line in lines}
    assert any(re.match(r" *small-[0-9a-f]{4,}  small · trial 0", line["run"]) for line in lines)
    assert settings_of_run["small · trial 0, seed 1"] == "learning_rate=0.0001, policy=1"
    assert settings_of_run["policy"] == "", "stages have no settings of their trial"

    def find_trials(*where):
        return {
            row["run"]
            for row in list_run_records(output, where=where)
            if row["tags"].get("kind") == "trial"
        }

    expected = {"small · trial 1, seed 0"}
    assert (
        find_trials("stages.policy.learning_rate>1e-3")
        == expected
        == find_trials("run~TRIAL 1", "status=finished")
    )
    assert find_trials("seeds.policy=1", "stages.policy.learning_rate<=1e-4") == {
        "small · trial 0, seed 1"
    }
    assert find_trials("sweep/value<0") == set()
    with pytest.raises(SettingsError, match=r"no run has 'learning_rat'; did you mean"):
        list_run_records(output, where=["learning_rat=1"])
    with pytest.raises(SettingsError, match="must be KEY OPERATOR VALUE"):
        list_run_records(output, where=["learning_rate"])


def test_runs_are_compared(plan, swept_record, tmp_path):
    runs = ["small · trial 0, seed 0", "small · trial 1, seed 0", "small · trial 0, seed 1"]
    comparison = compare_tracked_runs(
        Path(plan.load_base_settings().output), None, runs, tmp_path / "out"
    )
    assert comparison["settings"]["stages.policy.learning_rate"] == dict(
        zip(runs, ["0.0001", "0.01", "0.0001"], strict=True)
    )
    assert (
        len(set(comparison["stages"]["sft"].values())) == 1
        and len(set(comparison["stages"]["policy"].values())) == 3
    )
    assert [pair["episodes"] for pair in comparison["episodes"]] == [6, 6]
    first = comparison["episodes"][0]
    values = {key: outcome.value for key, outcome in swept_record.outcomes.items()}
    assert first["gain"]["difference"] == pytest.approx(values[1, 0] - values[0, 0])
    assert first["wins"] - first["losses"] == pytest.approx(6 * (values[1, 0] - values[0, 0]))
    assert comparison["curves"]["reward/mean"]["last"].keys() == set(runs)
    text = format_comparison(comparison)
    assert "sft           shared by all" in text and "B against A on 6 shared episodes" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.json", "curves.png"}
    with pytest.raises(SettingsError, match="at least two different runs"):
        compare_tracked_runs(Path(plan.load_base_settings().output), None, [runs[0], runs[0]])


def test_runs_without_success_are_compared_by_reward(plan, swept_record, monkeypatch):
    runs = ["small · trial 0, seed 0", "small · trial 1, seed 0"]
    output = Path(plan.load_base_settings().output)
    success = compare_tracked_runs(output, None, runs)["episodes"][0]
    assert success["metric"] == "success"
    monkeypatch.setattr(compare._ComparedRun, "knows_success", False)
    comparison = compare_tracked_runs(output, None, runs)
    (pair,) = comparison["episodes"]
    before, after = pair["reward"]
    assert pair["metric"] == "reward" and "success" not in pair
    assert pair["gain"]["difference"] == pytest.approx(after - before)
    text = format_comparison(comparison)
    assert (
        f"6 shared episodes: reward {after:.4g} against {before:.4g}, {after - before:+.4g} ["
        in text
    )
    assert "points" not in text


def test_a_pruned_trial_saves_and_ends(plan, swept_record):
    _, job = make_job(
        plan, swept_record, 0, 0, home=str(swept_record.locate_trial_folder(7, 0)), rungs=0
    )
    settings = plan.load_trial_settings({"stages.policy.learning_rate": "3e-3"}, 0)
    values = []
    with pytest.raises(TrialPruned):
        run_trial(
            dataclasses.replace(job, settings=dump_settings(settings)),
            threading.Event(),
            lambda value: values.append(value) or len(values) < 2,
            ignore_progress,
        )
    assert len(values) == 2 and all(0 <= value <= 1 for value in values)
    folders = list((swept_record.home.parent.parent / "stages" / "policy").glob("*.open"))
    (open_folder,) = folders
    assert CheckpointStore(open_folder / "checkpoints").describe_newest().iteration == 2, (
        "a third of 4 iterations, rounded up"
    )


def finish(context):
    return {"note": "done"}


def save_and_stop(context):
    CheckpointStore(context.checkpoints).save_version({"loop": {"iteration": 4}})
    raise Stopped("asked", 15)


def make_trial_options(tmp_path, name="a"):
    return RunOptions(on_drift="beside", trial=TrialLocation(home=tmp_path / name, name=name))


def run_sft(run, body):
    return run_stage(
        run, "sft", body, settings=run.settings.stages.sft, inputs={"model": "org/name"}
    )


def test_checkpoints_of_a_trial_are_ignored_by_others_and_resumed_by_it(tmp_path):
    trials = [
        FakePipelineRun(
            tmp_path / "stages",
            make_trial_options(tmp_path, name),
            stages={"sft": {"learning_rate": rate}},
        )
        for name, rate in (("a", 1e-3), ("b", 2e-3))
    ]
    for trial in trials:
        with pytest.raises(Stopped):
            run_sft(trial, save_and_stop)
    ordinary = FakePipelineRun(
        tmp_path / "stages", RunOptions(), stages={"sft": {"learning_rate": 3e-3}}
    )
    assert run_sft(ordinary, finish).cached is False, "an ordinary run ignores them"
    for trial in trials:
        checkpoints = []
        done = run_sft(
            trial,
            lambda context, checkpoints=checkpoints: (
                checkpoints.append(CheckpointStore(context.checkpoints).describe_newest()) or {}
            ),
        )
        assert checkpoints[0].iteration == 4 and not (done.path / "aside.json").exists()
    with pytest.raises(Stopped):
        run_sft(
            FakePipelineRun(
                tmp_path / "stages", RunOptions(), stages={"sft": {"learning_rate": 4e-3}}
            ),
            save_and_stop,
        )
    with pytest.raises(ResumeRefused):
        run_sft(
            FakePipelineRun(
                tmp_path / "stages", RunOptions(), stages={"sft": {"learning_rate": 5e-3}}
            ),
            finish,
        )
    fifth = FakePipelineRun(
        tmp_path / "stages", make_trial_options(tmp_path), stages={"sft": {"learning_rate": 5e-3}}
    )
    assert run_sft(fifth, finish).cached is False, "a trial ignores an ordinary run's checkpoints"


def test_a_trial_waits_for_another_that_runs_the_same_stage(tmp_path):
    first, second = (
        FakePipelineRun(tmp_path / "stages", make_trial_options(tmp_path, name)) for name in "ab"
    )
    has_started, may_finish, results = threading.Event(), threading.Event(), []

    def slow(context):
        has_started.set()
        assert may_finish.wait(30)
        return {}

    threads = [threading.Thread(target=lambda: results.append(run_sft(first, slow)))]
    threads[0].start()
    assert has_started.wait(30)
    threads.append(threading.Thread(target=lambda: results.append(run_sft(second, finish))))
    threads[1].start()
    assert results == []
    may_finish.set()
    for thread in threads:
        thread.join(30)
    assert sorted(result.cached for result in results) == [False, True]


def test_a_waiting_trial_is_stopped(tmp_path):
    trial = FakePipelineRun(tmp_path / "stages", make_trial_options(tmp_path))
    key = run_sft(trial, finish).key
    trial.stop.set()
    with FolderLock(tmp_path / "stages" / "sft" / f"{key}.lock"), pytest.raises(Stopped):
        run_sft(trial, finish)


def test_a_configuration_with_wrong_settings_fails_alone(plan, tmp_path, reached):
    record = SweepRecord(tmp_path / "s")
    record.open_folder({})
    varied = parse_set_options(["stages.policy.learning_rate=1e-4,-1,1e-3"])[1]
    plan_with_error = dataclasses.replace(plan, dimensions=tuple(varied), seeds=1)
    outcomes = []
    schedule = TrialSchedule(
        plan_with_error,
        record,
        create_search("grid", varied, [], {}),
        threading.Event(),
        outcomes.append,
    )
    trials = [schedule.take_next_trial(), schedule.take_next_trial()]
    assert [trial.number for trial in trials] == [0, 2]
    assert [(outcome.number, outcome.status) for outcome in outcomes] == [(1, "failed")]
    assert "learning_rate" in outcomes[0].why
    assert schedule.should_continue(trials[0], 0.5) and record.read_rungs(0, 0) == [0.5]
    assert {"sweep.begun", "sweep.asked", "sweep.told", "sweep.rung"} <= reached()


@pytest.mark.slow
def test_the_start_model_is_played_once_and_has_a_row(tmp_path, monkeypatch):
    """With the episodes of the choice, and with the fresh ones, which the gate's run takes over."""
    tokenizer = train_tokenizer([f"{a} + {b} = {a + b}" for a in range(9) for b in range(9)], 300)
    shape = ModelSettings(preset="nano", context=192, device="cpu")
    causal_lm.save(causal_lm.create_model(shape, tokenizer, 0), tokenizer, tmp_path / "model")
    preset = "{preset: nano, vocab_size: 320, context: 64}"
    (tmp_path / "small.yaml").write_text(CONFIG.replace(preset, f"{{path: {tmp_path / 'model'}}}"))
    overrides, varied = parse_set_options(
        [f"output={tmp_path / 'out'}", "stages.policy=null", "stages.sft.learning_rate=1e-4,1e-2"]
    )
    plan = SweepPlan(
        config=str(tmp_path / "small.yaml"), overrides=tuple(overrides), dimensions=tuple(varied)
    )
    base = plan.load_base_settings()
    record = SweepRecord(plan.locate_folder(base))
    record.open_folder({"started": "now"})

    def build_job(number, seed, settings, **fields):
        job = TrialJob(
            home=str(record.locate_trial_folder(number, seed)),
            name="trial",
            settings=dump_settings(settings),
            metric=plan.metric,
            rungs=None,
            parent_folder=str(record.home),
            tags={},
            models={},
        )
        return {**vars(job), **fields}

    for number, rate in enumerate(varied[0].choices):
        params = {"stages.sft.learning_rate": rate}
        record.add_configuration(params)
        job = TrialJob(**build_job(number, 0, plan.load_trial_settings(params, 0)))
        fields = run_trial(job, threading.Event(), lambda value: True, ignore_progress)
        record.record_outcome(TrialOutcome(number=number, seed=0, params=params, **fields))
    played = []

    def play_model(context, name, *arguments):
        played.append(name)
        return play(context, name, *arguments)

    play = evaluate._play_model
    monkeypatch.setattr(evaluate, "_play_model", play_model)
    worker = SimpleNamespace(
        run_job=lambda job, *_: evaluate_on_fresh_episodes(TrialJob(**job), threading.Event())
    )
    choice, winner = choose_winner(plan, base, record, build_job, worker)
    finalists = [f"{choice.winner:04d}-s0", f"{1 - choice.winner:04d}-s0"]
    assert played == ["base", "base", *finalists]
    start = choice.start
    assert start.path == str(tmp_path / "model") and 0 <= start.value <= 1 and 0 <= start.fresh <= 1
    assert start.gain[0] == choice.fresh[choice.winner][0] - start.fresh
    assert start.gain[1] <= start.gain[0] <= start.gain[2]
    assert f"{100 * start.gain[0]:+.1f} points [" in choice.describe_choice("x")
    rows = build_report_rows(record, plan, choice)
    assert [row["number"] for row in rows] == [choice.winner, 1 - choice.winner]
    line = format_report_table(rows, plan, choice, width=160).splitlines()[-2]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == [
        "", "base, the start model", "", f"{start.value:.4g}", f"{start.fresh:.4g}", "", "",
    ]  # fmt: skip
    page = render_markdown(rows, plan, "verdict", choice).splitlines()
    assert page[-1] == f"| base, the start model |  | {start.value:.4g} | {start.fresh:.4g} |  |"
    write_report_files(record, plan, rows, choice)
    stored = json.loads((record.home / "results.json").read_text())["choice"]["start"]
    assert stored["value"] == start.value and stored["gain"] == list(start.gain)
    played.clear()
    assert choose_winner(plan, base, record, build_job, worker)[0] == choice and played == []
    with PipelineRun(winner) as run:
        run_dag(run, {}, wrap_stage_call, skip=("analyze", "export", "promote"))
    assert played == ["sft"]


@pytest.mark.parametrize(("path", "key"), [(None, "stages.sft.learning_rate"), ("m", "model.path")])
def test_no_start_model_is_played_if_trials_do_not_share_one(path, key):
    plan = SweepPlan(config="test", dimensions=(Dimension(key, ("1", "2")),))
    base = SimpleNamespace(model=SimpleNamespace(path=path))
    assert winner_module._measure_start_model(plan, base, None, None) is None
