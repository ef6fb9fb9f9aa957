"""The training loop: evaluation, early stopping with the best model restored, checkpoints, resume, stop signals.

Order within an iteration: step, log, [stop?], evaluate when due, log, checkpoint when due. A checkpoint may lie between
a step and its evaluation; the resumed run then evaluates first. Results therefore do not depend on where a run was
interrupted. With ema_decay the averaged weights are evaluated, compared, and left in the model; steps continue from the
others.

If several processes train one model (`OptimizerStep.process_group`), each runs this loop on the same numbers, so all
decide alike; only rank 0 logs, reads and writes. A stop signal to any of them stops all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.distributed import ProcessGroup
from rl_core.errors import NothingLearned, SettingsError, Stopped, suggest_name
from rl_core.models.trainable_weights import (
    collect_trainable_weights,
    digest_trainable_weights,
    load_trainable_weights,
)
from rl_core.settings import LoopSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import inject_fault
from rl_core.timing import collect_seconds
from rl_core.tracking import MemoryTracker, Tracker
from rl_core.training.callbacks import (
    Callback,
    Trainer,
    TrainingEvent,
    call_callbacks,
    check_callbacks,
)
from rl_core.training.checkpoints import LoopCheckpoints, collect_runtime_fingerprint
from rl_core.training.loop_state import LoopMemory, LoopMetrics, LoopOutcome, LoopProgress
from rl_core.training.performance_metrics import (
    COUNTER_SPANS,
    compute_throughput_metrics,
    measure_peak_memory_gb,
)
from rl_core.training.signals import IterationAborted, StopRequests

logger = logging.getLogger(__name__)

# Metrics of the progress line and their labels, in order; the first MAX_HEADLINES that were logged are shown.
HEADLINES = {
    "train/success_rate": "success",
    "train/episode_return": "return",
    "reward/mean": "reward",
    "policy/update_kl": "KL",
    "policy/entropy": "entropy",
    "train/accuracy": "accuracy",
    "train/loss": "loss",
}
MAX_HEADLINES = 3
ROUNDING_NOISE = 1e-12
_HIDDEN_WHEN_ZERO = "policy/update_kl"  # always 0 with one step per rollout
_UNMOVED_HEADLINE = "no weight moved"


def format_headline(metrics: Mapping[str, float]) -> str:
    """Format the most important metrics of an iteration for the progress line."""
    headlines = []
    for name, label in HEADLINES.items():
        if name not in metrics or (name == _HIDDEN_WHEN_ZERO and not metrics[name]):
            continue
        value = metrics[name]
        if name.endswith("success_rate"):
            headlines.append(f"{label} {value:.0%}")
            continue
        # Sums that are 0, as of rewards with mean 0 over a group, may leave a rounding error.
        headlines.append(f"{label} {0.0 if abs(value) < ROUNDING_NOISE else value:.3g}")
    return " · ".join(headlines[:MAX_HEADLINES])


def run_loop(
    trainer: Trainer,
    settings: LoopSettings,
    *,
    iterations: int,
    tracker: Tracker | None = None,
    checkpoints: CheckpointStore | None = None,
    best_metric: str | None = None,
    larger_is_better: bool = True,
    fingerprint: Mapping[str, Any] | None = None,
    allow_drift: bool | Collection[str] = False,
    stop_event: threading.Event | None = None,
    history: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    memory: LoopMemory | None = None,
    after_iteration: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopOutcome:
    """Train until `iterations`, patience or the trainer's own stop; resume from `checkpoints` if they hold a state.

    Args:
        trainer: fully built, including every module and generator; its state is overwritten on resume, RNG last.
        iterations: maximum number of calls of `trainer.step()`, including those before a resume.
        best_metric: name of an evaluation metric; the weights with its best value are kept and restored at the end.
            None = the last weights.
        fingerprint: what must be equal for a resume (settings, data digests, code version), in any nesting; thread
            count, torch version and device are added here.
        allow_drift: resume although the fingerprint differs (True), or differs only in these dotted keys; logged as a
            warning and as the tag `drift.fingerprint`.
        stop_event: set by another thread to request a stop, as SIGTERM does.
        history: a JSON file with the newest values of every metric (see `MetricHistory.to_json`), written at the end;
            during training, lines are appended to a `.jsonl` file next to it (see `training.loop_state`).
        callbacks: called in the first process after every iteration and evaluation (see `training.callbacks`).
        after_iteration: called in every process with the number of iterations done, after each one and its evaluation
            and before its checkpoint; if a run is killed in between, it is called again for that iteration.
        memory: updated during training; a later call on the same trainer continues from it, without a checkpoint.
    Raises: Stopped after a stop request (state saved, or the iteration abandoned); NothingLearned if the trained
        weights have the bits that they started with; SettingsError for `plateau_patience` without evaluations;
        CallbackError; ResumeRefused; NonFiniteError; CheckpointError; FolderBusy.
    """
    if settings.plateau_patience is not None and (best_metric is None or not settings.eval_every):
        raise SettingsError(
            "plateau_patience: counts evaluations during training, of which there are none; set eval_every above 0"
        )
    tracker, memory = tracker or MemoryTracker(), memory or LoopMemory()
    process_group = trainer.optimizer_step.process_group
    metrics = LoopMetrics(
        tracker,
        memory,
        clock,
        process_group.is_rank_zero,
        export_to=history,
        export_seconds=settings.history_seconds,
        export_window=settings.history_window,
    )
    fingerprint = {**(fingerprint or {}), "runtime": collect_runtime_fingerprint(trainer.model)}
    loop = _TrainingLoop(
        trainer,
        settings,
        iterations=iterations,
        metrics=metrics,
        checkpoints=LoopCheckpoints(
            trainer, checkpoints, memory, metrics, fingerprint, process_group, clock
        ),
        best_metric=best_metric,
        sign=1.0 if larger_is_better else -1.0,
        stop=StopRequests(stop_event),
        clock=clock,
        process_group=process_group,
        callbacks=check_callbacks(callbacks),
        memory=memory,
        after_iteration=after_iteration,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.stop)
        if checkpoints is not None and loop.process_group.is_rank_zero:
            stack.enter_context(checkpoints)
        try:
            return loop.run_iterations(allow_drift)
        except IterationAborted as abort:
            raise loop.build_stop_error(abort) from None


@dataclass
class _TrainingLoop:
    trainer: Trainer
    settings: LoopSettings
    iterations: int
    metrics: LoopMetrics
    checkpoints: LoopCheckpoints
    best_metric: str | None
    sign: float
    stop: StopRequests
    clock: Callable[[], float]
    process_group: ProcessGroup
    callbacks: Sequence[Callback]
    memory: LoopMemory
    after_iteration: Callable[[int], None] | None
    callback_stop_reason: str | None = None

    @property
    def state(self) -> LoopProgress:
        return self.memory.state

    def run_iterations(self, allow_drift: bool | Collection[str]) -> LoopOutcome:
        start_time = self.checkpoints.saved_at = self.clock()
        if not (self.state.iteration and self.memory.is_consistent):
            self.checkpoints.resume_latest(allow_drift)
            is_continued = False
        else:
            is_continued = True
        resumed_iteration = self.state.iteration
        if not resumed_iteration:
            self.state.initial_digest = self._digest_weights()
        self._evaluate_when_due()
        while (reason := self._find_stop_reason()) is None:
            self._run_iteration()
            self._evaluate_when_due()
            if self.after_iteration is not None:
                self.after_iteration(self.state.iteration)
            self.checkpoints.save_when_due(self.settings.checkpoint_every)
        self._stop_if_requested()
        if self.state.iteration and self.state.evaluated_iteration != self.state.iteration:
            self._run_evaluation()
        if self.settings.checkpoint_every:
            self.checkpoints.save_checkpoint()
        self.metrics.export_history(is_last=True)
        inject_fault("loop.finished")
        if not (is_continued and self.state.iteration == resumed_iteration):
            self._check_learning()  # otherwise the weights are the best ones, left by the last call
        self._restore_best_weights()
        inject_fault("loop.left")
        has_best = self.state.best_iteration is not None
        metrics = self.state.best_metrics if has_best else self.state.metrics
        return LoopOutcome(
            iterations=self.state.iteration,
            steps=self.trainer.optimizer_step.num_steps,
            stop_reason=reason,
            best_metric=self.state.best_value,
            metrics=metrics,
            best_iteration=self.state.best_iteration,
            resumed_iteration=resumed_iteration,
            seconds=self.clock() - start_time,
            history=self.memory.history,
            unmoved_iterations=self.state.unmoved_iterations,
        )

    def _digest_weights(self) -> str:
        digest = digest_trainable_weights(self.trainer.model)
        return f"{sum(self.process_group.all_gather(digest)) % 2**64:016x}"

    def _check_learning(self) -> None:
        """Raise NothingLearned if the weights after the last iteration are those before the first, bit for bit."""
        state = self.state
        if not state.iteration or self._digest_weights() != state.initial_digest:
            return
        num_skipped = self.trainer.optimizer_step.skipped_steps
        if state.unmoved_iterations < state.iteration:
            cause = (
                "steps were undone, or too small for the weights' precision (learning_rate, dtype)"
            )
        elif num_skipped:
            cause = f"{num_skipped} optimizer steps were skipped, as a loss or gradient was not finite (see the log)"
        else:
            cause = (
                "no step had a gradient: of a policy, because all rewards of each prompt were equal or masked, or each "
                "update exceeded its KL limit"
            )
        raise NothingLearned(
            f"no weight moved in {state.iteration} iterations, so the result is the model that training started from: "
            f"{cause}. Start over in another folder or with other settings once the cause is mended"
        )

    def _count_steps(self) -> tuple[int, int]:
        """Count the steps that were tried and those that moved weights, of all optimizers, in this process."""
        steps = getattr(self.trainer, "optimizer_steps", [self.trainer.optimizer_step])
        return sum(step.tried_steps for step in steps), sum(step.moved_steps for step in steps)

    def _find_stop_reason(self) -> str | None:
        if self.callback_stop_reason is not None:
            return self.callback_stop_reason
        finished = getattr(self.trainer, "finished", None)
        if finished:
            return str(finished)
        patience = self.settings.patience
        if patience is not None and self.state.bad_evaluations >= patience:
            return "patience"
        return "iterations" if self.state.iteration >= self.iterations else None

    def _run_iteration(self) -> None:
        self._stop_if_requested()
        inject_fault("loop.step")
        start_time = self.clock()
        self.memory.is_consistent = False
        num_tried, num_moved = self._count_steps()
        with collect_seconds() as spans:
            metrics = dict(self.trainer.step())
        metrics["perf/step_seconds"] = self.clock() - start_time
        metrics["perf/memory_gb"] = measure_peak_memory_gb(self.trainer.model)
        optimizer_step = self.trainer.optimizer_step
        metrics |= compute_throughput_metrics(
            spans, self.trainer.model, is_bfloat16=optimizer_step.computes_in_bfloat16
        )
        for name in COUNTER_SPANS:
            spans.pop(name, None)
        spans |= self.metrics.take_overheads()
        metrics |= {f"perf/{name}_seconds": seconds for name, seconds in spans.items()}
        has_tried = self._count_steps()[0] != num_tried or metrics.get("train/empty_updates", 0) > 0
        is_unmoved = has_tried and self._count_steps()[1] == num_moved
        self.state.unmoved_iterations += is_unmoved
        self.state.iteration += 1
        self.memory.is_consistent = True
        inject_fault("loop.stepped")
        finite = self.metrics.log_metrics(metrics, self.trainer.optimizer_step.num_steps)
        if self.process_group.is_rank_zero:
            headline = format_headline(finite)
            if is_unmoved:
                headline = f"{_UNMOVED_HEADLINE} · {headline}" if headline else _UNMOVED_HEADLINE
            self.metrics.tracker.progress(self.state.iteration, self.iterations, headline)
        inject_fault("loop.logged")
        self._call_callbacks("iteration", finite)

    def _call_callbacks(
        self, kind: Literal["iteration", "evaluation"], metrics: dict[str, float]
    ) -> None:
        """Call the callbacks in the first process; every process learns whether one requested a stop."""
        if not self.callbacks:
            return

        def call() -> str | None:
            event = TrainingEvent(
                kind,
                self.state.iteration,
                self.iterations,
                self.trainer.optimizer_step.num_steps,
                dict(metrics),
                self.trainer,
            )
            call_callbacks(self.callbacks, event)
            return event.stop_reason

        self.callback_stop_reason = (
            self.process_group.run_on_rank_zero(call) or self.callback_stop_reason
        )

    def _evaluate_when_due(self) -> None:
        every, state = self.settings.eval_every, self.state
        if every and state.iteration % every == 0 and state.evaluated_iteration != state.iteration:
            self._stop_if_requested()  # an evaluation can be long; a resumed run catches up on it
            self._run_evaluation()

    def _run_evaluation(self) -> None:
        start_time = self.clock()
        # Within the averages, because the best weights are stored as they were evaluated.
        with collect_seconds() as spans, self.trainer.optimizer_step.ema.use_averages():
            local_metrics = {name: float(value) for name, value in self.trainer.evaluate().items()}
            metrics = self.process_group.run_on_rank_zero(lambda: local_metrics)
            if self.best_metric is not None:
                if self.best_metric not in metrics:
                    suggestion = suggest_name(self.best_metric, metrics)
                    raise SettingsError(
                        f"best_metric '{self.best_metric}' is not evaluated; {suggestion}"
                    )
                self._track_best_evaluation(metrics[self.best_metric], metrics)
        self.state.metrics = metrics
        self.state.evaluated_iteration = self.state.iteration
        perf = {"perf/eval_seconds": self.clock() - start_time}
        if spans.get("out_of_memory"):
            perf["perf/eval_out_of_memory"] = spans["out_of_memory"]
        finite = self.metrics.log_metrics(metrics | perf, self.trainer.optimizer_step.num_steps)
        inject_fault("loop.evaluated")
        self._call_callbacks("evaluation", finite)

    def _track_best_evaluation(self, value: float, metrics: dict[str, float]) -> None:
        """Store the weights if `value` is the best so far; update the patience counter."""
        state = self.state
        if math.isfinite(value) and (
            state.best_value is None or self.sign * (value - state.best_value) > 0
        ):
            state.best_value, state.best_iteration, state.best_metrics = (
                value,
                state.iteration,
                metrics,
            )
            self.memory.best_weights = collect_trainable_weights(self.trainer.model, copy=True)
        gain = math.inf if state.reference is None else self.sign * (value - state.reference)
        if math.isfinite(value) and gain > self.settings.min_improvement:
            state.reference, state.bad_evaluations, state.plateau_evaluations = value, 0, 0
        else:
            state.bad_evaluations += 1
            state.plateau_evaluations += 1
        if state.plateau_evaluations == self.settings.plateau_patience:
            state.plateau_evaluations = 0
            self._reduce_learning_rate()

    def _reduce_learning_rate(self) -> None:
        """Multiply the learning rate of all optimizers by `plateau_factor`, down to their `min_lr_ratio`."""
        factor = self.settings.plateau_factor
        for step in getattr(self.trainer, "optimizer_steps", [self.trainer.optimizer_step]):
            scale = step.learning_rate_scale
            step.learning_rate_scale = min(scale, max(scale * factor, step.settings.min_lr_ratio))
        logger.info(
            "%s got no better in %d evaluations: the learning rate is now %.3g",
            self.best_metric,
            self.settings.plateau_patience,
            self.trainer.optimizer_step.learning_rate,
        )

    def _restore_best_weights(self) -> None:
        """Leave the outcome's weights in the model: the best or the last; with ema_decay, their average."""
        if self.memory.best_weights is None or self.state.best_iteration == self.state.iteration:
            self.trainer.optimizer_step.ema.adopt_averages()
            return
        load_trainable_weights(self.trainer.model, self.memory.best_weights)
        self.trainer.optimizer_step.master_weights.refresh_masters()
        logger.info(
            "restored the weights of iteration %s, the best by %s",
            self.state.best_iteration,
            self.best_metric,
        )

    def _stop_if_requested(self) -> None:
        signum = self.process_group.all_reduce_max(self.stop.signum or 0)
        if not signum:
            return
        if self.checkpoints.store is None:
            raise Stopped(
                f"stopped after iteration {self.state.iteration}; nothing saved, as there is no checkpoint folder",
                signum,
            )
        self.checkpoints.save_checkpoint()
        raise Stopped(
            f"stopped after iteration {self.state.iteration}; saved, the same command resumes",
            signum,
        )

    def build_stop_error(self, abort: IterationAborted) -> Stopped:
        """Build the error of a stop that abandoned the iteration; a later run resumes from the newest checkpoint."""
        where = f"stopped within iteration {self.state.iteration + 1} ({abort})"
        if self.checkpoints.saved_position is None:
            return Stopped(
                f"{where}; no checkpoint yet, so the same command starts this training over",
                abort.signum,
            )
        return Stopped(
            f"{where}; the same command resumes after iteration {self.checkpoints.saved_position[0]}",
            abort.signum,
        )
