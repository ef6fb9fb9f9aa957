"""Worker processes of a sweep: a killed trial goes on from its checkpoint, rungs are asked about, stops save."""

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
from rl_core.errors import SettingsError, Stopped, WorkerFailed
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


def environment(**more):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def worker_of(log, stop, **variables):
    return TrialWorker(log, lambda: LocalTrialProcess(log, environment(**variables)), stop)


def job_of(settings, home, **more):
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
    return {**vars(job), **more}


def rewards(settings):
    (journal,) = (Path(settings.output) / "small" / "stages" / "policy").glob("*.tracking")
    return [
        (step, row["reward/mean"]) for step, row in read_metrics(journal) if "reward/mean" in row
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trial_whose_process_is_killed_goes_on_from_its_checkpoint(settings, tmp_path):
    home = tmp_path / "sweep"
    run = Tracking(None, Path(settings.output), "small").start_run("sweep", home)
    stop = threading.Event()
    broken = worker_of(
        tmp_path / "a.log", stop, POSTTRAIN_FAULT="loop.stepped:5:kill"
    )  # 2 are SFT's
    with pytest.raises(
        WorkerFailed, match=r"ended with -9 \(out of memory\? try --parallel 1\); its output is in"
    ):
        broken.run_job(job_of(settings, home), lambda value: True, lambda *_: None)
    (begun,) = (Path(settings.output) / "small" / "stages" / "policy").glob("*.open")
    assert CheckpointStore(begun / "checkpoints").describe_newest().iteration == 2
    asked, seen = [], []
    worker = worker_of(tmp_path / "b.log", stop)
    fields = worker.run_job(
        job_of(settings, home, rungs=0),
        lambda value: asked.append(value) or True,
        lambda stage, done, total, message: seen.append((stage, done)),
    )
    assert (
        fields["status"] == "finished"
        and fields["stages"]["sft"]["cached"]
        and 0 <= fields["value"] <= 1
    )
    assert [done for stage, done in seen if stage == "policy"] == [3, 4], (
        "two of four iterations were done before"
    )
    assert [step for step, _ in rewards(settings)] == [1, 2, 3, 4] and len(asked) == 2
    again = worker.run_job(job_of(settings, home), lambda value: True, lambda *_: None)
    assert all(stage["cached"] for stage in again["stages"].values()), (
        "the same process takes the next job"
    )
    failed = worker.run_job(
        job_of(settings, home, metric="no/such"), lambda value: True, lambda *_: None
    )
    assert (
        failed["status"] == "failed" and "no stage of the trial logs it; it logs" in failed["why"]
    )
    assert "Error:" not in failed["why"]  # the text for people, without the name of a class
    process = psutil.Process(worker._process.process.pid)
    worker.close_process()
    assert not process.is_running()
    stop.set()
    late = worker_of(tmp_path / "c.log", stop)
    with pytest.raises(Stopped):
        late.run_job(job_of(settings, home), lambda value: True, lambda *_: None)
    run.close()


def test_more_processes_than_fit_are_refused_with_the_number_that_does(settings, monkeypatch):
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
    own = dataclasses.replace(
        settings, model=dataclasses.replace(settings.model, path=str(tmp_path / "model"))
    )
    assert (
        trial_process.estimate_trial_bytes(own) - trial_process.estimate_trial_bytes(settings)
        == 4000
    )


def test_each_worker_has_another_gpu():
    assert [select_visible_device(index, None, 2) for index in range(3)] == ["0", "1", "0"]
    assert [select_visible_device(index, "3,5", 2) for index in range(2)] == ["3", "5"]
    assert (
        select_visible_device(1, None, 1) is None
        and select_visible_device(1, None, 0) is None
        and select_visible_device(0, "4", 1) is None
    )


def test_what_cannot_be_swept_is_refused(tmp_path):
    (tmp_path / "small.yaml").write_text(CONFIG)

    def refused(*sets, **more):
        overrides, dimensions = parse_set_options([f"output={tmp_path / 'out'}", *sets])
        plan = SweepPlan(
            config=str(tmp_path / "small.yaml"),
            overrides=tuple(overrides),
            dimensions=tuple(dimensions),
            **more,
        )
        with pytest.raises(SettingsError) as caught:
            plan.load_base_settings()
        return str(caught.value)

    assert "--set seed: cannot vary in a sweep; use --seeds N" in refused("seed=1,2")
    assert "--set output: cannot vary" in refused("output=a,b")
    assert "--seed-stage rewards: " in refused("stages.sft.max_steps=1,2", seed_stage="rewards")
    assert "is to be large" in refused("stages.sft.max_steps=1,2", minimize=True)
    assert "add stages.evaluate: {}" in refused(
        "stages.evaluate=null", "stages.sft.max_steps=1,2", "stages.promote=null"
    )
