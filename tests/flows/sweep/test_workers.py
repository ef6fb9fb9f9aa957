"""Worker processes of a sweep: a killed trial resumes from its checkpoint, rungs are decided, stops save."""

import os
import threading
from pathlib import Path

import psutil
import pytest
from helpers import ROOT
from helpers.small_sweep import CONFIG

from flows.sweep import trial_process
from flows.sweep.plan import SweepPlan
from flows.sweep.search import parse_set_options
from flows.sweep.trial import TrialJob
from flows.sweep.trial_process import (
    LocalTrialProcess,
    TrialWorker,
    refuse_insufficient_memory,
    select_visible_device,
)
from rl_core.errors import CheckpointError, SettingsError, Stopped, WorkerFailed
from rl_core.machine_memory import measure_free_memory
from rl_core.storage.checkpoint import CheckpointStore
from tasks.config import dump_settings
from tasks.tracking import Tracking, read_metrics


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "small.yaml").write_text(CONFIG)
    plan = SweepPlan(
        config=str(tmp_path / "small.yaml"),
        overrides=(f"output={tmp_path / 'out'}",),
        dimensions=(),
    )
    return plan.load_base_settings()


def build_environment(**variables):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def make_worker(log, stop, **variables):
    return TrialWorker(log, lambda: LocalTrialProcess(log, build_environment(**variables)), stop)


def test_a_trial_that_cannot_start_leaves_no_open_file(tmp_path):
    (tmp_path / "taken").write_text("a file where the log's folder should be")
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CheckpointError, match="File exists"):
            LocalTrialProcess(tmp_path / "taken" / "log", build_environment())
    assert len(os.listdir("/proc/self/fd")) == num_files


def make_job(settings, home, **changes):
    job = TrialJob(
        home=str(home / "trial"),
        name="small · trial 0, seed 0",
        settings=dump_settings(settings),
        metric="success",
        rungs=None,
        parent_folder=str(home),
        tags={},
        models={},
    )
    return {**vars(job), **changes}


def read_rewards(settings):
    (journal,) = (Path(settings.output) / "small" / "stages" / "policy").glob("*.tracking")
    return [
        (step, row["reward/mean"]) for step, row in read_metrics(journal) if "reward/mean" in row
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trial_whose_process_is_killed_resumes_from_its_checkpoint(settings, tmp_path):
    home = tmp_path / "sweep"
    run = Tracking(None, Path(settings.output), "small").start_run("sweep", home)
    stop = threading.Event()
    broken = make_worker(
        tmp_path / "a.log", stop, POSTTRAIN_FAULT="loop.stepped:5:kill"
    )  # SFT has 2 of them
    with pytest.raises(
        WorkerFailed, match=r"ended with -9 \(out of memory\? try --parallel 1\); its output is in"
    ):
        broken.run_job(make_job(settings, home), lambda value: True, lambda *_: None)
    (open_folder,) = (Path(settings.output) / "small" / "stages" / "policy").glob("*.open")
    assert CheckpointStore(open_folder / "checkpoints").describe_newest().iteration == 2
    rungs, progress = [], []
    worker = make_worker(tmp_path / "b.log", stop)
    fields = worker.run_job(
        make_job(settings, home, rungs=0),
        lambda value: rungs.append(value) or True,
        lambda stage, done, total, message: progress.append((stage, done)),
    )
    assert (
        fields["status"] == "finished"
        and fields["stages"]["sft"]["cached"]
        and 0 <= fields["value"] <= 1
    )
    assert [done for stage, done in progress if stage == "policy"] == [3, 4], (
        "two of four iterations had been done"
    )
    assert [step for step, _ in read_rewards(settings)] == [1, 2, 3, 4] and len(rungs) == 2
    repeated = worker.run_job(make_job(settings, home), lambda value: True, lambda *_: None)
    assert all(stage["cached"] for stage in repeated["stages"].values()), (
        "the same process runs the next job"
    )
    failed = worker.run_job(
        make_job(settings, home, metric="no/such"), lambda value: True, lambda *_: None
    )
    assert (
        failed["status"] == "failed" and "no stage of the trial logs it; it logs" in failed["why"]
    )
    assert "Error:" not in failed["why"]  # without the name of an exception class
    process = psutil.Process(worker._process.process.pid)
    worker.close_process()
    assert not process.is_running()
    stop.set()
    late = make_worker(tmp_path / "c.log", stop)
    with pytest.raises(Stopped):
        late.run_job(make_job(settings, home), lambda value: True, lambda *_: None)
    run.close()


def test_more_processes_than_fit_are_refused_with_the_number_that_fits(settings, monkeypatch):
    monkeypatch.setattr(trial_process, "measure_free_memory", lambda: 3 * 2**30)
    refuse_insufficient_memory(1, settings)
    refuse_insufficient_memory(4, settings)
    with pytest.raises(
        SettingsError,
        match=r"--parallel 8: a trial takes at least 0.7 GiB, and 3.0 GiB are free; use --parallel 4",
    ):
        refuse_insufficient_memory(8, settings)
    assert 0 < measure_free_memory() <= psutil.virtual_memory().total


def test_a_model_in_training_counts_four_times(settings, tmp_path):
    import dataclasses

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))
    with_model = dataclasses.replace(
        settings, model=dataclasses.replace(settings.model, path=str(tmp_path / "model"))
    )
    assert (
        trial_process.estimate_trial_bytes(with_model)
        - trial_process.estimate_trial_bytes(settings)
        == 4000
    )


def test_each_worker_gets_another_gpu():
    assert [select_visible_device(index, None, 2) for index in range(3)] == ["0", "1", "0"]
    assert [select_visible_device(index, "3,5", 2) for index in range(2)] == ["3", "5"]
    assert (
        select_visible_device(1, None, 1) is None
        and select_visible_device(1, None, 0) is None
        and select_visible_device(0, "4", 1) is None
    )


def test_unsweepable_settings_are_refused(tmp_path):
    (tmp_path / "small.yaml").write_text(CONFIG)

    def read_refusal(*options, **fields):
        overrides, dimensions = parse_set_options([f"output={tmp_path / 'out'}", *options])
        plan = SweepPlan(
            config=str(tmp_path / "small.yaml"),
            overrides=tuple(overrides),
            dimensions=tuple(dimensions),
            **fields,
        )
        with pytest.raises(SettingsError) as caught:
            plan.load_base_settings()
        return str(caught.value)

    assert "--set seed: cannot vary in a sweep; use --seeds N" in read_refusal("seed=1,2")
    assert "--set output: cannot vary" in read_refusal("output=a,b")
    assert "--seed-stage rewards: " in read_refusal(
        "stages.sft.max_steps=1,2", seed_stage="rewards"
    )
    assert "a large success is better" in read_refusal("stages.sft.max_steps=1,2", minimize=True)
    assert "add stages.evaluate: {}" in read_refusal(
        "stages.evaluate=null", "stages.sft.max_steps=1,2", "stages.promote=null"
    )
