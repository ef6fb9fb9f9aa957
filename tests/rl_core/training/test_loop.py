"""The loop: the same numbers however a run is cut; early stopping; stop signals; what is logged."""

import itertools
import json
import logging
import math
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
from helpers.tiny import logged_bits, weights_digest
from torch import nn

from rl_core.data.batches import DataOrder
from rl_core.errors import CheckpointError, ResumeRefused, SettingsError, Stopped
from rl_core.readers import read_history
from rl_core.settings import LoopSettings, OptimizerSettings
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.training import checkpoints, signals
from rl_core.training.loop import run_loop
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch


class NoisyTrainer:
    """Regression whose every step draws from python's, numpy's and torch's generators and from one of its own."""

    def __init__(self, iterations=12, seed=0):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.optimizer_step = OptimizerStep(
            self.model,
            OptimizerSettings(learning_rate=0.01, schedule="cosine", dropout=True),
            iterations,
        )
        self.order = DataOrder(20, 6, seed)
        self.noise = np.random.default_rng(seed)
        self.data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        self.hook = lambda trainer: None
        self.finished = None

    def step(self):
        self.hook(self)
        rows = self.order.next_batch()
        shift = random.random() + np.random.random() + float(self.noise.random())
        batch = TrainBatch(
            self.data[rows], torch.ones(len(rows), 4), torch.ones(len(rows), 4), rows=rows
        )

        def loss_fn(part):
            target = part.input_ids_BS.sum(1) + shift
            return (self.model(part.input_ids_BS).squeeze(-1) - target).square().sum() / len(
                rows
            ), {"train/shift": shift}

        return self.optimizer_step.run_step([batch], loss_fn)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            error = (self.model(self.data).squeeze(-1) - self.data.sum(1)).square().mean()
        return {"eval/loss": float(error), "eval/draw": random.random()}

    def state_dict(self):
        return {"order": self.order.state_dict(), "noise": self.noise.bit_generator.state}

    def load_state_dict(self, state):
        self.order.load_state_dict(state["order"])
        self.noise.bit_generator.state = state["noise"]


class ScriptedTrainer:
    """Its evaluations are given; its weight equals the number of iterations done."""

    def __init__(self, values, steps=None):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer_step = OptimizerStep(self.model, OptimizerSettings(), 10)
        self.values = values
        self.steps = steps or {}
        self.done = 0
        self.evaluations = 0
        self.finished = None

    def step(self):
        self.done += 1
        with torch.no_grad():
            self.model.weight.fill_(self.done)
        self.optimizer_step.num_steps += 1
        return self.steps.get(self.done, {"train/loss": 1.0 / self.done})

    def evaluate(self):
        self.evaluations += 1
        return {"eval/score": self.values[self.done]}

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


SETTINGS = LoopSettings(eval_every=3, checkpoint_every=2)
ITERATIONS = 12


def run(folder, *, trainer=None, tracker=None, settings=SETTINGS, iterations=ITERATIONS, **options):
    trainer = trainer or NoisyTrainer(iterations)
    tracker = tracker or MemoryTracker()
    store = CheckpointStore(folder) if folder is not None else None
    options = {"best_metric": "eval/loss", "larger_is_better": False, **options}
    outcome = run_loop(
        trainer, settings, iterations=iterations, tracker=tracker, checkpoints=store, **options
    )
    return outcome, weights_digest(trainer.model), tracker


@pytest.fixture(scope="module")
def unbroken():
    """Return outcome, weights and metrics of a run that never failed and never saved."""
    outcome, digest, tracker = run(None)
    return outcome, digest, logged_bits(tracker)


def check_same_as_unbroken(result, unbroken, tracker=None):
    outcome, digest, last_tracker = result
    assert digest == unbroken[1]
    assert outcome.metrics == unbroken[0].metrics
    assert (
        outcome.iterations,
        outcome.steps,
        outcome.stop_reason,
        outcome.best_metric,
        outcome.best_iteration,
    ) == (
        unbroken[0].iterations,
        unbroken[0].steps,
        unbroken[0].stop_reason,
        unbroken[0].best_metric,
        unbroken[0].best_iteration,
    )
    assert logged_bits(tracker or last_tracker) == unbroken[2]


def test_saving_changes_nothing(tmp_path, unbroken):
    check_same_as_unbroken(run(tmp_path), unbroken)


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
def test_a_run_that_dies_anywhere_gives_the_same_numbers(tmp_path, unbroken, point, hit):
    tracker = MemoryTracker()
    faults.configure_faults(
        f"{point}:{hit}:raise"
    )  # nothing of the loop catches it: as abrupt as a kill
    with pytest.raises(InjectedFault):
        run(tmp_path, tracker=tracker)
    faults.configure_faults(None)
    result = run(tmp_path, tracker=tracker)
    check_same_as_unbroken(result, unbroken, tracker)


def test_a_run_that_dies_again_and_again(tmp_path, unbroken):
    tracker = MemoryTracker()
    for _ in range(30):
        faults.configure_faults("loop.step:3:raise")  # two iterations and a checkpoint at a time
        try:
            result = run(tmp_path, tracker=tracker)
            break
        except InjectedFault:
            pass
    check_same_as_unbroken(result, unbroken, tracker)


def test_kill_9_of_a_real_process(tmp_path, unbroken):
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
    assert (digest, outcome.metrics) == (unbroken[1], unbroken[0].metrics)


def drop(state, path):
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
            return drop(state, item) if item else state

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
    wanted = (
        expected,
        expected_outcome.best_iteration,
        expected_outcome.iterations,
        logged_bits(expected_tracker),
    )
    assert (actual == wanted) is (item is None)


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


def send_at(iteration, signum=signal.SIGTERM):
    count = 0

    def hook(trainer):
        nonlocal count
        count += 1
        if count == iteration:
            os.kill(os.getpid(), signum)

    return hook


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("iteration", [1, 3, 5, 12])
def test_a_stop_signal_saves_raises_and_resumes_to_the_same_numbers(
    tmp_path, unbroken, signum, iteration
):
    previous = signal.getsignal(signum)
    tracker = MemoryTracker()
    trainer = NoisyTrainer(ITERATIONS)
    trainer.hook = send_at(iteration, signum)
    with pytest.raises(Stopped, match=f"after iteration {iteration}; saved") as error:
        run(tmp_path, trainer=trainer, tracker=tracker)
    assert error.value.signum == signum
    assert signal.getsignal(signum) is previous
    # iterations 3 and 12 are stopped before their evaluation, which the resumed run makes up for
    result = run(tmp_path, tracker=tracker)
    assert result[0].resumed_iteration == iteration
    check_same_as_unbroken(result, unbroken, tracker)


def test_the_second_signal_stops_at_once():
    trainer = NoisyTrainer()

    def hook(_):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    trainer.hook = hook
    with pytest.raises(
        Stopped, match=r"within iteration 1 \(a second SIGTERM\); no checkpoint yet"
    ) as error:
        run(None, trainer=trainer)
    assert error.value.signum == signal.SIGTERM


def test_an_iteration_that_takes_too_long_is_given_up_and_done_again(
    tmp_path, unbroken, monkeypatch
):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.05)
    previous = signal.getsignal(signal.SIGTERM)
    trainer, tracker, requests = NoisyTrainer(ITERATIONS), MemoryTracker(), send_at(6)

    def hook(trainer):
        requests(trainer)
        try:
            time.sleep(60.0 if trainer.optimizer_step.num_steps == 5 else 0.0)
        except Exception as error:  # as a guard around a user's reward function does
            raise AssertionError from error

    trainer.hook = hook
    with pytest.raises(Stopped, match=r"within iteration 6 .*resumes after iteration 4") as error:
        run(tmp_path, trainer=trainer, tracker=tracker)
    assert error.value.signum == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is previous
    result = run(tmp_path, tracker=tracker)
    assert result[0].resumed_iteration == 4
    check_same_as_unbroken(result, unbroken, tracker)


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


def test_in_a_worker_thread_an_event_stops(tmp_path, unbroken):
    event, errors = threading.Event(), []
    trainer = NoisyTrainer(ITERATIONS)
    trainer.hook = lambda trainer: event.set() if trainer.optimizer_step.num_steps == 6 else None

    def work():
        try:
            run(tmp_path, trainer=trainer, stop_event=event)
        except Stopped as error:
            errors.append(error)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [error.signum for error in errors] == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    outcome, digest, _ = run(tmp_path)
    assert (outcome.resumed_iteration, digest) == (7, unbroken[1])


def run_scripted(
    values, *, patience=None, min_improvement=0.0, every=1, larger=True, iterations=None, **options
):
    trainer = ScriptedTrainer([None, *values])
    outcome = run_loop(
        trainer,
        LoopSettings(eval_every=every, patience=patience, min_improvement=min_improvement),
        iterations=iterations or len(values),
        best_metric="eval/score",
        larger_is_better=larger,
        **options,
    )
    return outcome, float(trainer.model.weight.detach()), trainer


def test_patience_stops_and_the_best_weights_are_restored():
    outcome, weight, _ = run_scripted([0.1, 0.5, 0.4, 0.3, 0.9, 0.9], patience=2)
    assert (outcome.stop_reason, outcome.iterations) == ("patience", 4)
    assert (outcome.best_iteration, outcome.best_metric, weight) == (2, 0.5, 2.0)
    assert outcome.metrics == {"eval/score": 0.5}


def test_smaller_can_be_better():
    outcome, weight, _ = run_scripted([3.0, 1.0, 2.0, 2.0, 0.0], patience=2, larger=False)
    assert (outcome.stop_reason, outcome.best_metric, weight) == ("patience", 1.0, 2.0)


def test_a_tie_is_no_improvement():
    outcome, weight, _ = run_scripted([0.5, 0.5, 0.5, 0.9], patience=2)
    assert (outcome.iterations, outcome.best_iteration, weight) == (3, 1, 1.0)


def test_small_gains_are_kept_but_do_not_buy_patience():
    # from 0.5: +0.04 and +0.08 are below 0.1, so patience ends at iteration 3; its weights are the best all the same
    outcome, weight, _ = run_scripted([0.5, 0.54, 0.58, 0.9], patience=2, min_improvement=0.1)
    assert (outcome.stop_reason, outcome.iterations, outcome.best_metric, weight) == (
        "patience",
        3,
        0.58,
        3.0,
    )
    # ... but many small gains that add up to more than 0.1 do count
    outcome, _, _ = run_scripted([0.5, 0.58, 0.66, 0.74, 0.82], patience=2, min_improvement=0.1)
    assert outcome.stop_reason == "iterations"


def test_an_evaluation_that_is_not_a_number_is_never_the_best():
    outcome, weight, _ = run_scripted([0.1, math.nan, 0.2, math.inf, math.nan], patience=2)
    assert (outcome.best_metric, weight, outcome.stop_reason) == (0.2, 3.0, "patience")


def test_without_a_best_metric_the_last_weights_stay():
    trainer = ScriptedTrainer([None, 0.9, 0.1])
    outcome = run_loop(trainer, LoopSettings(eval_every=1), iterations=2)
    assert (outcome.best_metric, outcome.metrics, float(trainer.model.weight.detach())) == (
        None,
        {"eval/score": 0.1},
        2.0,
    )


def test_eval_every_zero_evaluates_once_at_the_end():
    _, _, trainer = run_scripted([0.1, 0.2, 0.3], every=0)
    assert trainer.evaluations == 1
    _, _, trainer = run_scripted([0.1, 0.2, 0.3, 0.4, 0.5], every=2)
    assert trainer.evaluations == 3  # 2, 4, and the end
    _, _, trainer = run_scripted([0.1, 0.2, 0.3, 0.4], every=2)
    assert trainer.evaluations == 2


def test_the_trainers_own_end_comes_first():
    trainer = ScriptedTrainer([None, 0.1, 0.2, 0.3])
    original = trainer.step

    def step():
        metrics = original()
        trainer.finished = "curriculum finished" if trainer.done == 2 else None
        return metrics

    trainer.step = step
    outcome = run_loop(trainer, LoopSettings(), iterations=3)
    assert (outcome.stop_reason, outcome.iterations, outcome.metrics) == (
        "curriculum finished",
        2,
        {"eval/score": 0.2},
    )


def test_a_misspelt_best_metric_names_the_nearest():
    trainer = ScriptedTrainer([None, 0.1])
    with pytest.raises(
        SettingsError, match=r"'eval/scores' is not evaluated; did you mean 'eval/score'"
    ):
        run_loop(trainer, LoopSettings(), iterations=1, best_metric="eval/scores")


def test_a_finished_run_is_not_run_again(tmp_path):
    options = {"patience": 2, "checkpoints": CheckpointStore(tmp_path)}
    first, weight, _ = run_scripted([0.1, 0.5, 0.4, 0.3], **options)
    second, weight_again, trainer = run_scripted([0.1, 0.5, 0.4, 0.3], **options)
    assert (trainer.evaluations, second.resumed_iteration) == (0, 4)
    assert (second.best_metric, second.stop_reason, weight_again) == (
        first.best_metric,
        first.stop_reason,
        weight,
    )
    assert second.metrics == first.metrics


def test_more_iterations_go_on_where_the_last_run_ended(tmp_path):
    run_loop(
        ScriptedTrainer([None, 1.0, 2.0, 3.0, 4.0]),
        LoopSettings(),
        iterations=2,
        checkpoints=CheckpointStore(tmp_path),
    )
    trainer = ScriptedTrainer([None, 1.0, 2.0, 3.0, 4.0])
    outcome = run_loop(trainer, LoopSettings(), iterations=4, checkpoints=CheckpointStore(tmp_path))
    assert (outcome.resumed_iteration, outcome.iterations, outcome.metrics) == (
        2,
        4,
        {"eval/score": 4.0},
    )


def test_checkpoint_every_zero_saves_only_when_stopped(tmp_path):
    run(tmp_path / "never", settings=LoopSettings(checkpoint_every=0))
    assert CheckpointStore(tmp_path / "never").list_versions() == []
    trainer = NoisyTrainer()
    trainer.hook = send_at(2)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", trainer=trainer, settings=LoopSettings(checkpoint_every=0))
    assert CheckpointStore(tmp_path / "stopped").list_versions() == [1]


def test_metrics_are_logged_at_the_steps_and_bad_ones_counted(caplog):
    steps = {
        1: {"train/loss": 2.0},
        2: {"train/loss": math.nan, "policy/update_kl": math.inf, "reward/mean": 0.5},
    }
    trainer, tracker = ScriptedTrainer([None, 0.0, 0.0, 0.25], steps), MemoryTracker()
    with caplog.at_level(logging.WARNING):
        run_loop(
            trainer, LoopSettings(), iterations=3, tracker=tracker, clock=iter(range(100)).__next__
        )
    bad = {"train/nonfinite_metrics": 2.0}
    memory = [row.pop("perf/memory_gb") for _, row in tracker.metrics[:3]]
    assert (
        memory == sorted(memory) and 0.05 < memory[0] < 100
    )  # a peak, in 10^9 bytes: torch alone takes 0.1
    assert tracker.metrics == [
        (1, {"train/loss": 2.0, "perf/step_seconds": 1.0}),
        (2, {"reward/mean": 0.5, "perf/step_seconds": 1.0, "perf/tracking_seconds": 1.0} | bad),
        (3, {"train/loss": 1 / 3, "perf/step_seconds": 1.0, "perf/tracking_seconds": 1.0} | bad),
        (3, {"eval/score": 0.25, "perf/eval_seconds": 1.0} | bad),
    ]
    assert "policy/update_kl, train/loss" in caplog.text
    assert (tracker.done, tracker.total, tracker.message) == (3, 3, "loss 0.333")


def test_the_time_of_a_checkpoint_is_told_by_the_next_iteration(tmp_path):
    tracker = MemoryTracker()
    settings = LoopSettings(eval_every=0, checkpoint_every=2)
    run_loop(
        ScriptedTrainer([0.1] * 6),
        settings,
        iterations=5,
        tracker=tracker,
        checkpoints=CheckpointStore(tmp_path),
        clock=iter(range(1000)).__next__,
    )
    steps = [row for _, row in tracker.metrics if "perf/step_seconds" in row]
    assert [row.get("perf/checkpoint_seconds") for row in steps] == [None, None, 1.0, None, 1.0]
    assert [row.get("perf/tracking_seconds") for row in steps] == [None, 1.0, 1.0, 1.0, 1.0]


def test_frozen_weights_stay_out_of_the_checkpoint(tmp_path):
    """As under LoRA: only what trains is saved; the rest comes with the model that is built again."""

    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        trainer = NoisyTrainer()
        trainer.model, trainer.optimizer_step = (
            model,
            OptimizerStep(model, OptimizerSettings(), ITERATIONS),
        )
        torch.manual_seed(4)
        return trainer

    _, expected, _ = run(None, trainer=build())
    faults.configure_faults("loop.step:8:raise")
    with pytest.raises(InjectedFault):
        run(tmp_path, trainer=build())
    faults.configure_faults(None)
    assert list(CheckpointStore(tmp_path).load_latest()["model"]) == ["3.weight", "3.bias"]
    assert run(tmp_path, trainer=build())[1] == expected


def test_the_history_of_metrics_grows_while_training_and_survives_a_kill(tmp_path):
    path = tmp_path / "history.json"
    lines, seconds, sizes = tmp_path / "history.jsonl", iter(range(0, 10_000, 1)), []
    trainer = ScriptedTrainer([0.1] * 8)
    step = trainer.step

    def watched():
        sizes.append(lines.stat().st_size if lines.exists() else 0)
        assert not path.exists(), "written whole once, at the end"
        return step()

    trainer.step = watched
    settings = LoopSettings(eval_every=0, checkpoint_every=2)
    run(
        tmp_path / "a",
        trainer=trainer,
        settings=settings,
        iterations=7,
        best_metric=None,
        history=path,
        clock=lambda: 0.5 * next(seconds),
    )
    assert (
        sizes[0] == 0 < sizes[1] and sorted(sizes) == sizes and 1 < len(set(sizes)) < 6
    )  # not at every step
    final = json.loads(path.read_text())
    assert final["metrics"]["train/loss"] == [[float(i), 1 / i] for i in range(1, 8)]
    assert final["summary"]["train/loss"]["mean"] == pytest.approx(
        sum(1 / i for i in range(1, 8)) / 7
    )
    values = read_history(lines)
    assert (values["metrics"]["train/loss"], values["summary"]["train/loss"]) == (
        final["metrics"]["train/loss"],
        final["summary"]["train/loss"],
    )

    run(
        tmp_path / "b",
        trainer=ScriptedTrainer([0.1] * 8),
        settings=settings,
        iterations=4,
        best_metric=None,
    )
    other = tmp_path / "other.json"
    run(
        tmp_path / "b",
        trainer=ScriptedTrainer([0.1] * 8),
        settings=settings,
        iterations=7,
        best_metric=None,
        history=other,
    )
    assert json.loads(other.read_text())["metrics"]["train/loss"] == final["metrics"]["train/loss"]
    names = ["a", "b", "history.json", "history.jsonl", "other.json", "other.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_killed_export_goes_on_where_the_checkpoint_is(tmp_path):
    """Check that lines after the checkpoint and a torn one are cut off, a damaged one skipped, no value repeated."""
    settings = LoopSettings(eval_every=3, checkpoint_every=2, history_seconds=0)
    path, lines = tmp_path / "h.json", tmp_path / "h.jsonl"

    def go(iterations, folder="c", **options):
        run(
            tmp_path / folder,
            trainer=ScriptedTrainer([0.1] * 9),
            settings=settings,
            iterations=iterations,
            best_metric=None,
            history=options.get("history", path),
        )

    faults.configure_faults(
        "loop.step:6:raise"
    )  # five iterations done, the checkpoint is that of the fourth
    with pytest.raises(InjectedFault):
        go(8)
    faults.configure_faults(None)
    stored = lines.read_bytes()
    rows = stored.splitlines(keepends=True)
    assert [json.loads(row)["iteration"] for row in rows] == [
        1,
        2,
        3,
        3,
        4,
        5,
    ]  # one of the evaluation
    rows[1] = rows[1].replace(b"train/loss", b"train/lost", 1)
    lines.write_bytes(b"".join(rows) + stored[:50])
    go(8)
    values, uninterrupted = read_history(lines), json.loads(path.read_text())
    steps = [step for step, _ in values["metrics"]["train/loss"]]
    assert steps == [1, 3, 4, 5, 6, 7, 8], "that of the damaged line is lost here"
    assert (
        len(uninterrupted["metrics"]["train/loss"]) == 8
        and values["summary"].keys() == uninterrupted["summary"].keys()
    )
    assert [step for step, _ in values["metrics"]["eval/score"]] == [3, 6, 8]
    go(8, "d", history=tmp_path / "other.json")
    undisturbed = read_history(tmp_path / "other.jsonl")["metrics"]["train/loss"]
    assert [point for point in undisturbed if point[0] != 2] == values["metrics"]["train/loss"]


def test_a_history_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    settings = LoopSettings(eval_every=0, checkpoint_every=2)
    outcome, _, _ = run(
        tmp_path / "a",
        trainer=ScriptedTrainer([0.1] * 8),
        settings=settings,
        iterations=3,
        best_metric=None,
        history=tmp_path / "nowhere" / "history.json",
    )
    assert outcome.iterations == 3
    assert "nowhere/history.jsonl: cannot be written" in caplog.text


def test_what_was_recorded_is_on_the_disk_before_a_checkpoint_says_so(tmp_path, monkeypatch):
    """Check the order; otherwise a power cut could leave a checkpoint whose steps nobody recorded."""
    calls = []

    class Tracker(MemoryTracker):
        def log_metrics(self, metrics, step):
            calls.append("metrics")

        def sync(self):
            calls.append("sync")

    save = CheckpointStore.save_version
    monkeypatch.setattr(
        CheckpointStore,
        "save_version",
        lambda store, state: calls.append("save") or save(store, state),
    )
    run(tmp_path, tracker=Tracker(), iterations=4)
    assert calls.count("save") >= 2
    for index, call in enumerate(calls):
        if call == "save":
            assert calls[index - 1] == "sync"
