"""Trials of a sweep in this process: shared stages, seeds, checkpoints of others, the list of runs and a comparison."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from helpers.small_sweep import CONFIG
from helpers.stage_doubles import PipelineRun as Double

from flows.sweep.plan import SweepPlan, format_configuration
from flows.sweep.report import build_report_rows, format_report_table, write_report_files
from flows.sweep.schedule import SweepRecord, TrialOutcome, TrialSchedule
from flows.sweep.search import create_search, parse_set_options
from flows.sweep.trial import TrialJob, TrialPruned, evaluate_on_fresh_episodes, run_trial
from posttrain.cli import run_comparison
from posttrain.cli.run_comparison import compare_tracked_runs, format_comparison
from rl_core.errors import ResumeRefused, SettingsError, Stopped
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.locks import FolderLock
from tasks.config import dump_settings
from tasks.pipeline.run_options import RunOptions, TrialLocation
from tasks.pipeline.stage import run_stage
from tasks.stage_registry import list_stage_names
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


def job_of(plan, record, number, seed, **more):
    params = [{"stages.policy.learning_rate": rate} for rate in plan.dimensions[0].choices][number]
    job = TrialJob(
        home=str(record.folder(number, seed)),
        name=f"small · trial {number}, seed {seed}",
        settings=dump_settings(plan.settings_of(params, seed)),
        metric=plan.metric,
        rungs=None,
        parent_folder=str(record.home),
        tags={"sweep": "s"},
        models={},
    )
    return params, dataclasses.replace(job, **more)


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def swept(plan):
    """Three trials of the four, one after the other."""
    record = SweepRecord(plan.home(plan.base()))
    assert record.open_folder({"started": "now"}) is False
    base = plan.base()
    run = Tracking(None, Path(base.output), "small").start_run(
        "small · sweep", record.home, tags={"kind": "sweep"}
    )
    for number, seed in TRIALS:
        params, job = job_of(plan, record, number, seed)
        if seed == 0:
            record.add_configuration(params)
        fields = run_trial(job, threading.Event(), lambda value: True, quiet)
        record.record_outcome(TrialOutcome(number=number, seed=seed, params=params, **fields))
    run.close()
    return record


def test_trials_share_every_stage_that_does_not_change(plan, swept):
    outcomes = swept.outcomes
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


def test_a_sweep_that_goes_on_repeats_no_trial_with_an_outcome(plan, swept):
    again = SweepRecord(swept.home)
    assert again.open_folder({"started": "later"}) is True and again.values["started"] == "now"
    assert again.outcomes == swept.outcomes and [
        asked.is_finished for asked in again.list_configurations(2)
    ] == [True, False]
    search = create_search("grid", plan.dimensions, again.list_configurations(2), {})
    left = TrialSchedule(plan, again, search, threading.Event(), quiet).take_next_trial()
    assert (left.number, left.seed) == (1, 1)
    third = dataclasses.replace(plan, seeds=3)
    more = TrialSchedule(
        third,
        again,
        create_search("grid", plan.dimensions, again.list_configurations(3), {}),
        threading.Event(),
        quiet,
    )
    unit = more.take_next_trial()
    assert (unit.number, unit.seed, unit.settings.seeds) == (0, 2, {"policy": 2})
    assert again.home == third.home(third.base()), "more seeds go on with the same sweep"


def test_fresh_episodes_are_none_that_a_trial_was_evaluated_on(plan, swept):
    base = plan.base()
    fresh = dataclasses.replace(base.stages.evaluate, episodes_draw=1)
    settings = dataclasses.replace(base, stages=dataclasses.replace(base.stages, evaluate=fresh))
    models = {"a": swept.outcomes[0, 0].model, "b": swept.outcomes[1, 0].model}
    _, job = job_of(
        plan,
        swept,
        0,
        0,
        home=str(swept.locate_trial_folder(9999, 0)),
        settings=dump_settings(settings),
        models=models,
        skip=tuple(name for name in list_stage_names() if name not in ("prepare_data", "evaluate")),
    )
    found = evaluate_on_fresh_episodes(job, threading.Event())

    def keys(folder, name):
        table = json.loads((Path(folder) / "evaluation.json").read_text())
        return {(episode["level"], episode["seed"]) for episode in table[name]["episodes"]}

    played = keys(found["folder"], "a")
    assert played == keys(found["folder"], "b") and len(played) == 6
    chosen_by = {
        key
        for outcome in swept.outcomes.values()
        for key in keys(outcome.stages["evaluate"]["folder"], "policy")
    }
    assert len(chosen_by) == 6, "all trials played the same episodes"
    assert played & chosen_by == set()


def test_report_and_figure(plan, swept):
    rows = build_report_rows(swept, plan, None)
    assert sorted(row["seeds"] for row in rows) == [1, 2] and rows[0]["mean"] >= rows[1]["mean"]
    assert "finished 1, waiting 1" in format_report_table(
        rows, plan, width=160
    ) and "learning_rate=" in format_report_table(rows, plan, width=160)
    assert all(
        format_configuration(row["settings"]) in format_report_table(rows, plan, width=80)
        for row in rows
    ), "unbroken in 80 columns"
    write_report_files(swept, plan, rows, None)
    lines = (swept.home / "sweep.csv").read_text().splitlines()
    assert lines[0].startswith("number,stages.policy.learning_rate,seeds,mean") and len(lines) == 3
    assert (swept.home / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((swept.home / "results.json").read_text())["configurations"] == rows


def test_runs_are_listed_with_what_differs_and_filtered(plan, swept):
    output = plan.base().output
    lines = list_runs(output, limit=50, settings=True)
    told = {line["run"].strip(): line["settings"] for line in lines}
    assert told["small · trial 0, seed 1"] == "learning_rate=0.0001, policy=1"
    assert told["policy"] == "", "stages have none of their own"

    def names_of(*where):
        return {
            row["run"]
            for row in list_run_records(output, where=where)
            if row["tags"].get("kind") == "trial"
        }

    other = {"small · trial 1, seed 0"}
    assert (
        names_of("stages.policy.learning_rate>1e-3")
        == other
        == names_of("run~TRIAL 1", "status=finished")
    )
    assert names_of("seeds.policy=1", "stages.policy.learning_rate<=1e-4") == {
        "small · trial 0, seed 1"
    }
    assert names_of("sweep/value<0") == set()
    with pytest.raises(SettingsError, match=r"no run has 'learning_rat'; did you mean"):
        list_run_records(output, where=["learning_rat=1"])
    with pytest.raises(SettingsError, match="must be KEY OPERATOR VALUE"):
        list_run_records(output, where=["learning_rate"])


def test_runs_are_compared(plan, swept, tmp_path):
    runs = ["small · trial 0, seed 0", "small · trial 1, seed 0", "small · trial 0, seed 1"]
    told = compare_tracked_runs(Path(plan.base().output), None, runs, tmp_path / "out")
    assert told["settings"]["stages.policy.learning_rate"] == dict(
        zip(runs, ["0.0001", "0.01", "0.0001"], strict=True)
    )
    assert (
        len(set(told["stages"]["sft"].values())) == 1
        and len(set(told["stages"]["policy"].values())) == 3
    )
    assert [pair["episodes"] for pair in told["episodes"]] == [6, 6]
    first = told["episodes"][0]
    values = {key: outcome.value for key, outcome in swept.outcomes.items()}
    assert first["gain"]["difference"] == pytest.approx(values[1, 0] - values[0, 0])
    assert first["wins"] - first["losses"] == pytest.approx(6 * (values[1, 0] - values[0, 0]))
    assert told["curves"]["reward/mean"]["last"].keys() == set(runs)
    text = format_comparison(told)
    assert "sft           shared by all" in text and "B against A on 6 shared episodes" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.json", "curves.png"}
    with pytest.raises(SettingsError, match="at least two different runs"):
        compare_tracked_runs(Path(plan.base().output), None, [runs[0], runs[0]])


def test_runs_without_success_are_compared_by_reward(plan, swept, monkeypatch):
    runs = ["small · trial 0, seed 0", "small · trial 1, seed 0"]
    place = Path(plan.base().output)
    success = compare_tracked_runs(place, None, runs)["episodes"][0]
    assert success["metric"] == "success"
    monkeypatch.setattr(run_comparison._ComparedRun, "knows_success", False)
    told = compare_tracked_runs(place, None, runs)
    (pair,) = told["episodes"]
    before, after = pair["reward"]
    assert pair["metric"] == "reward" and "success" not in pair
    assert pair["gain"]["difference"] == pytest.approx(after - before)
    text = format_comparison(told)
    assert (
        f"6 shared episodes: reward {after:.4g} against {before:.4g}, {after - before:+.4g} ["
        in text
    )
    assert "points" not in text


def test_a_trial_that_the_search_gives_up_saves_and_ends(plan, swept):
    _, job = job_of(plan, swept, 0, 0, home=str(swept.locate_trial_folder(7, 0)), rungs=0)
    settings = plan.load_trial_settings({"stages.policy.learning_rate": "3e-3"}, 0)
    seen = []
    with pytest.raises(TrialPruned):
        run_trial(
            dataclasses.replace(job, settings=dump_settings(settings)),
            threading.Event(),
            lambda value: seen.append(value) or len(seen) < 2,
            quiet,
        )
    assert len(seen) == 2 and all(0 <= value <= 1 for value in seen)
    kept = list((swept.home.parent.parent / "stages" / "policy").glob("*.open"))
    (open_one,) = kept
    assert CheckpointStore(open_one / "checkpoints").describe_newest().iteration == 2, (
        "a third of 4 iterations, rounded up"
    )


# ---------------------------------------------------------------------------------------- stages beside each other


def body(context):
    return {"note": "done"}


def stopped(context):
    CheckpointStore(context.checkpoints).save_version({"loop": {"iteration": 4}})
    raise Stopped("asked", 15)


def as_trial(tmp_path, name="a"):
    return RunOptions(on_drift="beside", trial=TrialLocation(home=tmp_path / name, name=name))


def play(run, what):
    return run_stage(
        run, "sft", what, settings=run.settings.stages.sft, inputs={"model": "org/name"}
    )


def test_checkpoints_of_a_trial_are_no_drift_for_others_and_resumed_by_their_own(tmp_path):
    trials = [
        Double(
            tmp_path / "stages", as_trial(tmp_path, name), stages={"sft": {"learning_rate": rate}}
        )
        for name, rate in (("a", 1e-3), ("b", 2e-3))
    ]
    for trial in trials:
        with pytest.raises(Stopped):
            play(trial, stopped)
    own = Double(tmp_path / "stages", RunOptions(), stages={"sft": {"learning_rate": 3e-3}})
    assert play(own, body).cached is False, "an ordinary run passes them over without a question"
    for trial in trials:
        found = []
        done = play(
            trial,
            lambda context, found=found: (
                found.append(CheckpointStore(context.checkpoints).describe_newest()) or {}
            ),
        )
        assert found[0].iteration == 4 and not (done.path / "aside.json").exists()
    with pytest.raises(Stopped):
        play(
            Double(tmp_path / "stages", RunOptions(), stages={"sft": {"learning_rate": 4e-3}}),
            stopped,
        )
    with pytest.raises(ResumeRefused):
        play(
            Double(tmp_path / "stages", RunOptions(), stages={"sft": {"learning_rate": 5e-3}}), body
        )
    fifth = Double(tmp_path / "stages", as_trial(tmp_path), stages={"sft": {"learning_rate": 5e-3}})
    assert play(fifth, body).cached is False, "a trial leaves an ordinary run's checkpoints alone"


def test_a_trial_waits_for_another_one_that_runs_the_same_stage(tmp_path):
    first, second = (Double(tmp_path / "stages", as_trial(tmp_path, name)) for name in "ab")
    begun, go_on, results = threading.Event(), threading.Event(), []

    def slow(context):
        begun.set()
        assert go_on.wait(30)
        return {}

    threads = [threading.Thread(target=lambda: results.append(play(first, slow)))]
    threads[0].start()
    assert begun.wait(30)
    threads.append(threading.Thread(target=lambda: results.append(play(second, body))))
    threads[1].start()
    assert results == []
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert sorted(result.cached for result in results) == [False, True]


def test_a_trial_that_waits_is_stopped(tmp_path):
    trial = Double(tmp_path / "stages", as_trial(tmp_path))
    key = play(trial, body).key
    trial.stop.set()
    with FolderLock(tmp_path / "stages" / "sft" / f"{key}.lock"), pytest.raises(Stopped):
        play(trial, body)


def test_a_configuration_with_wrong_settings_fails_alone(plan, tmp_path, reached):
    record = SweepRecord(tmp_path / "s")
    record.open_folder({})
    varied = parse_set_options(["stages.policy.learning_rate=1e-4,-1,1e-3"])[1]
    wrong = dataclasses.replace(plan, dimensions=tuple(varied), seeds=1)
    told = []
    schedule = TrialSchedule(
        wrong, record, create_search("grid", varied, [], {}), threading.Event(), told.append
    )
    units = [schedule.take_next_trial(), schedule.take_next_trial()]
    assert [unit.number for unit in units] == [0, 2]
    assert [(outcome.number, outcome.status) for outcome in told] == [(1, "failed")]
    assert "learning_rate" in told[0].why
    assert schedule.should_continue(units[0], 0.5) and record.read_rungs(0, 0) == [0.5]
    assert {"sweep.begun", "sweep.asked", "sweep.told", "sweep.rung"} <= reached()
