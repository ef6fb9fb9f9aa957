"""The loop: equal results after any interruption; resume, fingerprints, stop signals."""

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loop_trainers import ITERATIONS, NoisyTrainer, run, send_at
from helpers.tiny import logged_bits, weights_digest
from torch import nn

from rl_core.errors import CheckpointError, ResumeRefused, Stopped
from rl_core.settings import LoopSettings
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.training import checkpoints, signals
from rl_core.training.loop import run_loop


@pytest.fixture(scope="module")
def unbroken_run():
    """Return outcome, weights and metrics of a run that never failed and never saved."""
    outcome, digest, tracker = run(None)
    return outcome, digest, logged_bits(tracker)


def check_same_as_unbroken(result, unbroken_run, tracker=None):
    outcome, digest, last_tracker = result
    assert digest == unbroken_run[1]
    assert outcome.metrics == unbroken_run[0].metrics
    assert (
        outcome.iterations,
        outcome.steps,
        outcome.stop_reason,
        outcome.best_metric,
        outcome.best_iteration,
    ) == (
        unbroken_run[0].iterations,
        unbroken_run[0].steps,
        unbroken_run[0].stop_reason,
        unbroken_run[0].best_metric,
        unbroken_run[0].best_iteration,
    )
    assert logged_bits(tracker or last_tracker) == unbroken_run[2]


def test_saving_changes_nothing(tmp_path, unbroken_run):
    check_same_as_unbroken(run(tmp_path), unbroken_run)


KILLS = [
    *(
        (point, hit)
        for point in ("loop.step", "loop.stepped", "loop.logged")
        for hit in range(1, ITERATIONS + 1)
    ),
    *(("loop.evaluated", hit) for hit in range(1, 5)),
    *(("loop.saved", hit) for hit in range(1, 7)),
    ("loop.finished", 1),
]


@pytest.mark.parametrize(("point", "hit"), KILLS)
def test_a_run_that_dies_anywhere_gives_the_same_numbers(tmp_path, unbroken_run, point, hit):
    tracker = MemoryTracker()
    faults.configure_faults(
        f"{point}:{hit}:raise"
    )  # the loop does not catch it: as abrupt as a kill
    with pytest.raises(InjectedFault):
        run(tmp_path, tracker=tracker)
    faults.configure_faults(None)
    result = run(tmp_path, tracker=tracker)
    check_same_as_unbroken(result, unbroken_run, tracker)


def test_one_checkpoint_is_enough_and_its_size_is_reported(
    tmp_path, unbroken_run, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoints, "REPORTED_CHECKPOINT_BYTES", 1000)
    caplog.set_level(logging.INFO)
    settings = LoopSettings(eval_every=3, checkpoint_every=2, keep_checkpoints=1)
    tracker = MemoryTracker()
    for point in ("loop.saved:2", "publish.file:3", "pointer.done:1"):
        faults.configure_faults(f"{point}:raise")
        with pytest.raises((InjectedFault, CheckpointError)):
            run(tmp_path, tracker=tracker, settings=settings)
        faults.configure_faults(None)
        assert len(list(tmp_path.glob("checkpoint-*"))) >= 1
    result = run(tmp_path, tracker=tracker, settings=settings)
    check_same_as_unbroken(result, unbroken_run, tracker)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    lines = [
        record.getMessage() for record in caplog.records if "a checkpoint takes" in record.message
    ]
    assert "the newest 1 stay in" in lines[0] and "keep_checkpoints: 1" in lines[0]


def test_the_size_of_all_checkpoints_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoints, "REPORTED_CHECKPOINT_BYTES", 1000)
    monkeypatch.setattr(CheckpointStore, "measure_newest", lambda store: 1_600_000_000)
    caplog.set_level(logging.INFO)
    run(tmp_path, settings=LoopSettings(checkpoint_every=6, keep_checkpoints=3))
    [line] = [
        record.getMessage() for record in caplog.records if "a checkpoint takes" in record.message
    ]
    assert (
        line.startswith("a checkpoint takes 1.6 GB, and the newest 3 stay in")
        and "4.8 GB in all" in line
    )


def test_a_run_that_dies_again_and_again(tmp_path, unbroken_run):
    tracker = MemoryTracker()
    for _ in range(30):
        faults.configure_faults("loop.step:3:raise")  # two iterations and a checkpoint at a time
        try:
            result = run(tmp_path, tracker=tracker)
            break
        except InjectedFault:
            pass
    check_same_as_unbroken(result, unbroken_run, tracker)


def test_kill_9_of_a_real_process(tmp_path, unbroken_run):
    here, folder = str(Path(__file__).parent), str(tmp_path)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_loop; test_loop.run({folder!r})"
    environment = {
        **os.environ,
        "POSTTRAIN_FAULT": "loop.stepped:8:kill",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    outcome, digest, _ = run(tmp_path)
    assert outcome.resumed_iteration == 6
    assert (digest, outcome.metrics) == (unbroken_run[1], unbroken_run[0].metrics)


def drop_item(state, path):
    """Return the state with one item as a fresh trainer has it."""
    fresh = NoisyTrainer(ITERATIONS, seed=5)
    full = {
        "model": dict(fresh.model.state_dict()),
        "best_model": None,
        "optimizer_step": fresh.optimizer_step.state_dict(),
        "trainer": fresh.state_dict(),
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": [],
        },
        "loop": {
            **state["loop"],
            "iteration": 0,
            "best_value": None,
            "best_iteration": None,
            "evaluated_iteration": 0,
        },
    }
    *folders, last = path.split("/")
    target, source = state, full
    for name in folders:
        target, source = target[name], source[name]
    target[last] = source[last]
    return state


@pytest.mark.parametrize(
    "item",
    [
        None,
        "model/0.weight",
        "model/1.running_mean",
        "best_model",
        "optimizer_step/optimizer",
        "optimizer_step/num_steps",
        "trainer/order",
        "trainer/noise",
        "rng/python",
        "rng/numpy",
        "rng/torch",
        "loop/iteration",
        "loop/best_value",
        "loop/best_iteration",
    ],
)
def test_every_saved_item_is_needed(tmp_path, item):
    """Drop one item of the checkpoint: the numbers must change, or the tests above would not notice its loss."""
    # the best evaluation lies before the cut, so that the best weights have to come from the checkpoint
    settings = LoopSettings(eval_every=1, checkpoint_every=5)
    options = {"settings": settings, "best_metric": "eval/draw", "larger_is_better": True}
    expected_outcome, expected, expected_tracker = run(
        None, trainer=NoisyTrainer(ITERATIONS, seed=5), **options
    )
    assert expected_outcome.best_iteration <= 5
    tracker = MemoryTracker()
    faults.configure_faults("loop.step:8:raise")
    with pytest.raises(InjectedFault):
        run(tmp_path, tracker=tracker, trainer=NoisyTrainer(ITERATIONS, seed=5), **options)
    faults.configure_faults(None)

    class Dropping(CheckpointStore):
        def load_latest(self):
            state = super().load_latest()
            return drop_item(state, item) if item else state

    trainer = NoisyTrainer(ITERATIONS, seed=5)
    outcome = run_loop(
        trainer,
        settings,
        iterations=ITERATIONS,
        tracker=tracker,
        checkpoints=Dropping(tmp_path),
        best_metric="eval/draw",
    )
    actual = (
        weights_digest(trainer.model),
        outcome.best_iteration,
        outcome.iterations,
        logged_bits(tracker),
    )
    expected_bits = (
        expected,
        expected_outcome.best_iteration,
        expected_outcome.iterations,
        logged_bits(expected_tracker),
    )
    assert (actual == expected_bits) is (item is None)


def test_resume_is_refused_key_by_key_and_allowed_explicitly(tmp_path, caplog):
    with pytest.raises(InjectedFault):
        faults.configure_faults("loop.step:5:raise")
        run(
            tmp_path,
            fingerprint={
                "settings": {"learning_rate": 0.1, "betas": (0.9, 0.95)},
                "data": "aa",
                "old": 1,
            },
        )
    faults.configure_faults(None)
    changed = {"settings": {"learning_rate": 0.2, "betas": (0.9, 0.95)}, "data": "bb", "new": None}
    with pytest.raises(ResumeRefused) as error:
        run(tmp_path, fingerprint=changed)
    text = str(error.value)
    assert "settings.learning_rate: 0.1 in the checkpoint, 0.2 now" in text
    assert 'data: "aa" in the checkpoint, "bb" now' in text
    assert "old: 1 in the checkpoint, absent now" in text
    assert "new: absent in the checkpoint, null now" in text
    assert "betas" not in text and "runtime" not in text
    with caplog.at_level(logging.WARNING):
        outcome, _, _ = run(tmp_path, fingerprint=changed, allow_drift=True)
    assert outcome.resumed_iteration == 4
    assert "settings.learning_rate: 0.1 in the checkpoint" in caplog.text


def test_another_thread_count_is_refused(tmp_path):
    with pytest.raises(InjectedFault):
        faults.configure_faults("loop.step:5:raise")
        run(tmp_path)
    faults.configure_faults(None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        with pytest.raises(
            ResumeRefused, match=f"runtime.threads: {before} in the checkpoint, {before + 1} now"
        ):
            run(tmp_path)
    finally:
        torch.set_num_threads(before)


def test_weights_of_another_model_are_refused(tmp_path):
    run(tmp_path)
    trainer = NoisyTrainer()
    trainer.model[3] = nn.Linear(8, 2)
    with pytest.raises(CheckpointError, match=r"3\.weight: shape \(1, 8\), the model has \(2, 8\)"):
        run(tmp_path, trainer=trainer)
    trainer.model[3] = nn.Linear(8, 1, bias=False)
    with pytest.raises(CheckpointError, match=r"unexpected \['3\.bias'\]"):
        run(tmp_path, trainer=trainer)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("iteration", [1, 3, 5, 12])
def test_a_stop_signal_saves_raises_and_resumes_to_the_same_numbers(
    tmp_path, unbroken_run, signum, iteration
):
    previous = signal.getsignal(signum)
    tracker = MemoryTracker()
    trainer = NoisyTrainer(ITERATIONS)
    trainer.hook = send_at(iteration, signum)
    with pytest.raises(Stopped, match=f"after iteration {iteration}; saved") as error:
        run(tmp_path, trainer=trainer, tracker=tracker)
    assert error.value.signum == signum
    assert signal.getsignal(signum) is previous
    # iterations 3 and 12 are stopped before their evaluation, which the resumed run makes
    result = run(tmp_path, tracker=tracker)
    assert result[0].resumed_iteration == iteration
    check_same_as_unbroken(result, unbroken_run, tracker)


def test_the_second_signal_stops_immediately():
    trainer = NoisyTrainer()

    def send_signals(_):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    trainer.hook = send_signals
    with pytest.raises(
        Stopped, match=r"within iteration 1 \(a second SIGTERM\); no checkpoint yet"
    ) as error:
        run(None, trainer=trainer)
    assert error.value.signum == signal.SIGTERM


def test_an_iteration_that_takes_too_long_is_abandoned_and_repeated(
    tmp_path, unbroken_run, monkeypatch
):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.05)
    previous = signal.getsignal(signal.SIGTERM)
    trainer, tracker, requests = NoisyTrainer(ITERATIONS), MemoryTracker(), send_at(6)

    def hang_once(trainer):
        requests(trainer)
        try:
            time.sleep(60.0 if trainer.optimizer_step.num_steps == 5 else 0.0)
        except Exception as error:  # like a guard around a user's reward function
            raise AssertionError from error

    trainer.hook = hang_once
    with pytest.raises(Stopped, match=r"within iteration 6 .*resumes after iteration 4") as error:
        run(tmp_path, trainer=trainer, tracker=tracker)
    assert error.value.signum == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is previous
    result = run(tmp_path, tracker=tracker)
    assert result[0].resumed_iteration == 4
    check_same_as_unbroken(result, unbroken_run, tracker)


def test_no_signal_comes_after_the_block(monkeypatch):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.02)
    with signals.StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
    before = signal.signal(signal.SIGTERM, lambda *arguments: pytest.fail("a late signal"))
    try:
        time.sleep(0.1)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("tick", "expected"), [(0.1, [3]), (30.0, [1, 2, 3])])
def test_long_iterations_are_saved_before_their_turn(tmp_path, monkeypatch, tick, expected):
    """Check with `tick` seconds between two readings of the clock, of which an iteration has several."""
    saved, save = [], CheckpointStore.save_version
    monkeypatch.setattr(
        CheckpointStore,
        "save_version",
        lambda self, state: (saved.append(state["loop"]), save(self, state)),
    )
    monkeypatch.setattr(checkpoints, "UNSAVED_TO_SAVE_RATIO", 1.0)
    looks = itertools.count()
    settings = LoopSettings(eval_every=0, checkpoint_every=1000)
    run(
        tmp_path,
        settings=settings,
        iterations=3,
        clock=lambda: tick * next(looks),
        best_metric=None,
    )
    assert sorted({state["iteration"] for state in saved}) == expected


def test_a_stop_without_a_checkpoint_folder_says_that_nothing_was_saved():
    trainer = NoisyTrainer()
    trainer.hook = send_at(2)
    with pytest.raises(Stopped, match="nothing saved"):
        run(None, trainer=trainer)


def test_in_a_worker_thread_an_event_stops(tmp_path, unbroken_run):
    event, errors = threading.Event(), []
    trainer = NoisyTrainer(ITERATIONS)
    trainer.hook = lambda trainer: event.set() if trainer.optimizer_step.num_steps == 6 else None

    def run_in_thread():
        try:
            run(tmp_path, trainer=trainer, stop_event=event)
        except Stopped as error:
            errors.append(error)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run_in_thread)
    thread.start()
    thread.join(60)
    assert [error.signum for error in errors] == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    outcome, digest, _ = run(tmp_path)
    assert (outcome.resumed_iteration, digest) == (7, unbroken_run[1])
