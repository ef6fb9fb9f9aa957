"""The loop: early stopping, best weights, what is logged, and the exported history."""

import json
import logging
import math

import pytest
import torch
from helpers.loop_trainers import ITERATIONS, NoisyTrainer, ScriptedTrainer, run, send_at
from torch import nn

from rl_core.errors import SettingsError, Stopped
from rl_core.readers import read_history
from rl_core.settings import LoopSettings, OptimizerSettings
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop
from rl_core.training.optimizer_step import OptimizerStep


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


def test_small_gains_count_as_best_but_do_not_extend_patience():
    # from 0.5: +0.04 and +0.08 are below 0.1, so patience ends at iteration 3; its weights are still the best
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


def list_learning_rate_scales(values, lowest=0.1, checkpoints=None, interrupted_at=None, **options):
    """Train with these scores; return the scale of the learning rate in each iteration."""
    trainer, scales = ScriptedTrainer([None, *values]), []
    trainer.optimizer_step.settings = OptimizerSettings(min_lr_ratio=lowest)

    def record_scale(event):
        if event.kind == "iteration":
            scales.append(trainer.optimizer_step.learning_rate_scale)

    run_loop(
        trainer,
        LoopSettings(eval_every=1, plateau_patience=2, checkpoint_every=1, **options),
        iterations=interrupted_at or len(values),
        best_metric="eval/score",
        callbacks=[record_scale],
        checkpoints=checkpoints,
    )
    return scales


def test_a_plateau_lowers_the_learning_rate_down_to_its_limit(tmp_path):
    flat = [0.5] * 10
    assert list_learning_rate_scales(flat) == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1]
    assert list_learning_rate_scales(flat, plateau_factor=0.3, lowest=0.2)[3:6] == [0.3, 0.3, 0.2]
    # an improvement starts the count over; NaN is none
    assert list_learning_rate_scales([0.1, 0.1, 0.2, math.nan, 0.3, 0.3, 0.3]) == [1] * 7
    assert list_learning_rate_scales([0.1, 0.1, math.nan, 0.3, 0.3, 0.3, 0.9])[-1] == 0.25


def test_a_resumed_run_remembers_the_plateau(tmp_path):
    store = CheckpointStore(tmp_path)
    before = list_learning_rate_scales([0.5] * 6, checkpoints=store, interrupted_at=3)
    after = list_learning_rate_scales([0.5] * 6, checkpoints=CheckpointStore(tmp_path))
    assert [*before, *after] == [1, 1, 1, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("every", "metric"), [(0, "eval/score"), (1, None)], ids=["no evaluation", "no metric"]
)
def test_a_plateau_needs_evaluations(every, metric):
    settings = LoopSettings(eval_every=every, plateau_patience=1)
    with pytest.raises(SettingsError, match=r"plateau_patience: .* set eval_every above 0"):
        run_loop(ScriptedTrainer([None]), settings, iterations=1, best_metric=metric)


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


def test_the_trainers_stop_comes_first():
    trainer = ScriptedTrainer([None, 0.1, 0.2, 0.3])
    original = trainer.step

    def step_and_finish():
        metrics = original()
        trainer.finished = "curriculum finished" if trainer.done == 2 else None
        return metrics

    trainer.step = step_and_finish
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


def test_more_iterations_continue_where_the_last_run_ended(tmp_path):
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


def test_the_time_of_a_checkpoint_is_reported_by_the_next_iteration(tmp_path):
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
    """Check, as under LoRA, that only trained weights are saved; the others come with the rebuilt model."""

    def build_trainer():
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

    _, expected, _ = run(None, trainer=build_trainer())
    faults.configure_faults("loop.step:8:raise")
    with pytest.raises(InjectedFault):
        run(tmp_path, trainer=build_trainer())
    faults.configure_faults(None)
    assert list(CheckpointStore(tmp_path).load_latest()["model"]) == ["3.weight", "3.bias"]
    assert run(tmp_path, trainer=build_trainer())[1] == expected


def test_the_history_of_metrics_grows_while_training_and_survives_a_kill(tmp_path):
    path = tmp_path / "history.json"
    lines, seconds, sizes = tmp_path / "history.jsonl", iter(range(0, 10_000, 1)), []
    trainer = ScriptedTrainer([0.1] * 8)
    step = trainer.step

    def step_and_measure():
        sizes.append(lines.stat().st_size if lines.exists() else 0)
        assert not path.exists(), "written whole once, at the end"
        return step()

    trainer.step = step_and_measure
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


def test_a_killed_export_continues_at_the_checkpoint(tmp_path):
    """Check that lines after the checkpoint and a torn one are cut off, a damaged one skipped, no value repeated."""
    settings = LoopSettings(eval_every=3, checkpoint_every=2, history_seconds=0)
    path, lines = tmp_path / "h.json", tmp_path / "h.jsonl"

    def run_iterations(iterations, folder="c", **options):
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
        run_iterations(8)
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
    ]  # one row is the evaluation's
    rows[1] = rows[1].replace(b"train/loss", b"train/lost", 1)
    lines.write_bytes(b"".join(rows) + stored[:50])
    run_iterations(8)
    values, uninterrupted = read_history(lines), json.loads(path.read_text())
    steps = [step for step, _ in values["metrics"]["train/loss"]]
    assert steps == [1, 3, 4, 5, 6, 7, 8], "that of the damaged line is lost here"
    assert (
        len(uninterrupted["metrics"]["train/loss"]) == 8
        and values["summary"].keys() == uninterrupted["summary"].keys()
    )
    assert [step for step, _ in values["metrics"]["eval/score"]] == [3, 6, 8]
    run_iterations(8, "d", history=tmp_path / "other.json")
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
