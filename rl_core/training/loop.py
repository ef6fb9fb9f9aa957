"""The one training loop: evaluation, early stopping with the best model restored, checkpoints, resume, stop signals.

Order within an iteration: step, log, [stop?], evaluate when due, log, checkpoint when due. A checkpoint may lie between
a step and its evaluation; the resumed run then evaluates first. So the numbers do not depend on where a run was cut.
With ema_decay the averaged weights are evaluated, compared, and left in the model; steps go on from the others.

Where several processes train one model (`OptimizerStep.process_group`), each runs this loop on the same numbers, so all
decide alike; rank 0 alone logs, reads and writes. A stop signal to any of them stops all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import CheckpointError, PosttrainError, SettingsError, Stopped, nearest
from rl_core.metrics import MetricHistory
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.settings import LoopSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import fault
from rl_core.storage.rng_state import restore_rng, rng_state
from rl_core.storage.single_files import write_text_atomic
from rl_core.timing import collected
from rl_core.tracking import MemoryTracker, Tracker, sync_tracker
from rl_core.training.callbacks import Callback, TrainingEvent, call_all, check_callbacks
from rl_core.training.peak_memory import peak_memory_gb
from rl_core.training.resume import check_fingerprint, runtime_fingerprint
from rl_core.training.signals import GivenUp, StopRequests
from rl_core.training.throughput import COUNTS, throughput_metrics
from rl_core.training.trainer_protocol import Trainer

__all__ = ["LoopMemory", "LoopOutcome", "run_loop"]

logger = logging.getLogger(__name__)

HISTORY = 500  # newest values of each metric that are kept
EXPORT_SECONDS = 5.0  # between two exports of them while training
SAVE_SECONDS = 60.0  # of training that a stop may cost, and
SAVE_TIMES = 50.0  # as many times the time that saving takes, whichever is longer
# The first of these that an iteration reports stands in the progress message.
HEADLINES = ("success_rate", "reward/mean", "train/accuracy", "train/loss")


@dataclass(frozen=True)
class LoopOutcome:
    """Outcome of a run of the loop; the trainer's model holds the weights that `metrics` were measured on."""

    iterations: int  # done in all, those before a resume included
    steps: int  # optimizer steps in all
    stop_reason: str  # "iterations", "patience", or what the trainer's `finished` or a callback said
    best_metric: float | None  # best value of the chosen metric; None = no metric was chosen
    metrics: dict[str, float]  # last evaluation of the model as it is left
    best_iteration: int | None = None  # the iteration whose weights were restored or kept
    resumed_iteration: int = 0  # 0 = from the start
    seconds: float = 0.0  # of this process
    # the newest values of every metric
    history: MetricHistory = field(default_factory=lambda: MetricHistory(HISTORY), repr=False)


@dataclass
class _Progress:
    """The loop's own part of a checkpoint."""

    iteration: int = 0
    evaluated_iteration: int = 0  # the last one that was evaluated
    metrics: dict[str, float] = field(default_factory=dict)  # last evaluation
    best_value: float | None = None
    best_iteration: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    reference: float | None = None  # value at the last improvement that was large enough for patience
    bad_evaluations: int = 0  # evaluations since then
    nonfinite_metrics: int = 0


@dataclass
class LoopMemory:
    """The loop's state between two calls of `run_loop` on one trainer in one process: the second goes on from it."""

    state: _Progress = field(default_factory=_Progress)
    history: MetricHistory = field(default_factory=lambda: MetricHistory(HISTORY))
    best_weights: dict[str, torch.Tensor] | None = None
    is_whole: bool = True  # False = the last iteration was left in its middle, so a checkpoint is the better start


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
    clock: Callable[[], float] = time.perf_counter,
) -> LoopOutcome:
    """Train until `iterations`, patience or the trainer's own end; resume from `checkpoints` where they hold a state.

    Args:
        trainer: fully built, every module and generator made; its state is overwritten on resume, RNG last.
        iterations: calls of `trainer.step()` at most, those before a resume included.
        best_metric: name of an evaluation metric; its best weights are kept and restored at the end. None = the last.
        fingerprint: what must be equal for a resume (settings, data digests, code version), nested as one likes; thread
            count, torch version and device are added here.
        allow_drift: resume although the fingerprint differs (True), or differs in these dotted keys alone; logged as a
            warning and as the tag `drift.fingerprint`.
        stop_event: set by another thread to ask for a stop, as SIGTERM does.
        history: a JSON file with the newest values of every metric (see `MetricHistory.to_json`), replaced every few
            seconds at most while training, and at the end.
        callbacks: called in the first process after every iteration and evaluation (see `training.callbacks`).
        memory: written to while training; a later call on the same trainer goes on from it, without a checkpoint.
    Raises: Stopped after a stop request (state saved, or the iteration given up); CallbackError; ResumeRefused;
        NonFiniteError; CheckpointError; FolderBusy.
    """
    loop = _Loop(
        trainer,
        settings,
        iterations=iterations,
        tracker=tracker or MemoryTracker(),
        checkpoints=checkpoints,
        best_metric=best_metric,
        sign=1.0 if larger_is_better else -1.0,
        fingerprint={**(fingerprint or {}), "runtime": runtime_fingerprint(trainer.model)},
        stop=StopRequests(stop_event),
        export_to=history,
        clock=clock,
        process_group=trainer.optimizer_step.process_group,
        callbacks=check_callbacks(callbacks),
        memory=memory or LoopMemory(),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.stop)
        if checkpoints is not None and loop.process_group.is_rank_zero:
            stack.enter_context(checkpoints)
        try:
            return loop.run(allow_drift)
        except GivenUp as given_up:
            raise loop.stopped_within(given_up) from None


@dataclass
class _Loop:
    trainer: Trainer
    settings: LoopSettings
    iterations: int
    tracker: Tracker
    checkpoints: CheckpointStore | None
    best_metric: str | None
    sign: float
    fingerprint: dict[str, Any]
    stop: StopRequests
    clock: Callable[[], float]
    export_to: Path | str | None = None
    exported: float | None = None  # when, by `clock`
    process_group: ProcessGroup = SINGLE_PROCESS
    callbacks: Sequence[Callback] = ()
    memory: LoopMemory = field(default_factory=LoopMemory)
    stopped_by: str | None = None  # the reason that a callback gave
    saved: tuple[int, int] | None = None  # (iteration, evaluated_iteration) of the newest checkpoint
    saved_at: float = 0.0  # by `clock`
    save_seconds: float = 0.0  # of that one
    overheads: dict[str, float] = field(default_factory=dict)  # seconds of tracking and checkpoints, not yet reported

    @property
    def state(self) -> _Progress:
        return self.memory.state

    @property
    def history(self) -> MetricHistory:
        return self.memory.history

    def run(self, allow_drift: bool | Collection[str]) -> LoopOutcome:
        started = self.saved_at = self.clock()
        if not (self.state.iteration and self.memory.is_whole):
            self._resume(allow_drift)
        resumed = self.state.iteration
        self._evaluate_when_due()
        while (reason := self._stop_reason()) is None:
            self._iterate()
            self._evaluate_when_due()
            self._save_when_due()
        self._stop_when_asked()
        if self.state.iteration and self.state.evaluated_iteration != self.state.iteration:
            self._evaluate()
        if self.settings.checkpoint_every:
            self._save()
        self._export()
        fault("loop.finished")
        self._leave_best()
        fault("loop.left")
        return LoopOutcome(
            iterations=self.state.iteration,
            steps=self.trainer.optimizer_step.num_steps,
            stop_reason=reason,
            best_metric=self.state.best_value,
            metrics=self.state.metrics if self.state.best_iteration is None else self.state.best_metrics,
            best_iteration=self.state.best_iteration,
            resumed_iteration=resumed,
            seconds=self.clock() - started,
            history=self.history,
        )

    def _stop_reason(self) -> str | None:
        if self.stopped_by is not None:
            return self.stopped_by
        finished = getattr(self.trainer, "finished", None)
        if finished:
            return str(finished)
        if self.settings.patience is not None and self.state.bad_evaluations >= self.settings.patience:
            return "patience"
        return "iterations" if self.state.iteration >= self.iterations else None

    def _iterate(self) -> None:
        self._stop_when_asked()
        fault("loop.step")
        started = self.clock()
        self.memory.is_whole = False
        with collected() as spans:
            metrics = dict(self.trainer.step())
        metrics["perf/step_seconds"] = self.clock() - started
        metrics["perf/memory_gb"] = peak_memory_gb(self.trainer.model)
        optimizer_step = self.trainer.optimizer_step
        metrics |= throughput_metrics(spans, self.trainer.model, is_bfloat16=optimizer_step.computes_in_bfloat16)
        for name in COUNTS:
            spans.pop(name, None)
        metrics |= {f"perf/{name}_seconds": seconds for name, seconds in (spans | self.overheads).items()}
        self.overheads.clear()
        self.state.iteration += 1
        self.memory.is_whole = True
        fault("loop.stepped")
        finite = self._log(metrics)
        headline = next((f"{name} {finite[name]:.4g}" for name in HEADLINES if name in finite), "")
        if self.process_group.is_rank_zero:
            self.tracker.progress(self.state.iteration, self.iterations, headline)
        fault("loop.logged")
        self._call_back("iteration", finite)

    def _call_back(self, kind: Literal["iteration", "evaluation"], metrics: dict[str, float]) -> None:
        """Tell the callbacks, in the first process; every process learns whether one asked for a stop."""
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
            call_all(self.callbacks, event)
            return event.stop_reason

        self.stopped_by = self.process_group.on_rank_zero(call) or self.stopped_by

    def _log(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log finite metrics at the number of optimizer steps; count the others."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            self.state.nonfinite_metrics += len(values) - len(finite)
            logger.warning("metrics that are not finite: %s", ", ".join(sorted(values.keys() - finite.keys())))
        if self.state.nonfinite_metrics:
            finite["train/nonfinite_metrics"] = float(self.state.nonfinite_metrics)
        started = self.clock()
        if self.process_group.is_rank_zero:
            self.tracker.log_metrics(finite, self.trainer.optimizer_step.num_steps)
        self.history.observe(finite, self.trainer.optimizer_step.num_steps)
        self._export(EXPORT_SECONDS)
        self._spent("tracking", started)
        return finite

    def _spent(self, name: str, started: float) -> float:
        """Add to the overheads, which the next iteration reports (this one has reported already); returns the time."""
        now = self.clock()
        self.overheads[name] = self.overheads.get(name, 0.0) + now - started
        return now

    def _export(self, after: float = 0.0) -> None:
        """Export the history for dashboards, at most once in `after` seconds."""
        if self.export_to is None or not self.process_group.is_rank_zero:
            return
        if self.exported is not None and self.clock() - self.exported < after:
            return
        try:
            write_text_atomic(self.export_to, self.history.to_json())
        except (CheckpointError, OSError) as error:  # a dashboard's file is an extra; what is kept still raises
            logger.warning("the history of metrics is not shown: %s", error)
        self.exported = self.clock()

    def _evaluate_when_due(self) -> None:
        every, state = self.settings.eval_every, self.state
        if every and state.iteration % every == 0 and state.evaluated_iteration != state.iteration:
            self._stop_when_asked()  # an evaluation can be long; the resumed run makes up for it
            self._evaluate()

    def _evaluate(self) -> None:
        started = self.clock()
        with collected() as spans, self.trainer.optimizer_step.ema.swapped_in():  # the weights evaluated are those kept
            measured = {name: float(value) for name, value in self.trainer.evaluate().items()}
            raw = self.process_group.on_rank_zero(lambda: measured)
            if self.best_metric is not None:
                if self.best_metric not in raw:
                    raise SettingsError(
                        f"best_metric '{self.best_metric}' is not evaluated; {nearest(self.best_metric, raw)}"
                    )
                self._compare(raw[self.best_metric], raw)
        self.state.metrics = raw
        self.state.evaluated_iteration = self.state.iteration
        perf = {"perf/eval_seconds": self.clock() - started}
        if spans.get("out_of_memory"):
            perf["perf/eval_out_of_memory"] = spans["out_of_memory"]
        finite = self._log({**raw, **perf})
        fault("loop.evaluated")
        self._call_back("evaluation", finite)

    def _compare(self, value: float, metrics: dict[str, float]) -> None:
        """Keep the weights if `value` is the best so far; update the patience counter."""
        state = self.state
        if math.isfinite(value) and (state.best_value is None or self.sign * (value - state.best_value) > 0):
            state.best_value, state.best_iteration, state.best_metrics = value, state.iteration, metrics
            self.memory.best_weights = trainable_weights(self.trainer.model, copy=True)
        gain = math.inf if state.reference is None else self.sign * (value - state.reference)
        if math.isfinite(value) and gain > self.settings.min_improvement:
            state.reference, state.bad_evaluations = value, 0
        else:
            state.bad_evaluations += 1

    def _leave_best(self) -> None:
        """Leave the outcome's weights in the model: the best or the last; their average with ema_decay."""
        if self.memory.best_weights is None or self.state.best_iteration == self.state.iteration:
            self.trainer.optimizer_step.ema.adopt()
            return
        load_trainable_weights(self.trainer.model, self.memory.best_weights)
        self.trainer.optimizer_step.master_weights.refresh()
        logger.info("restored the weights of iteration %s, the best by %s", self.state.best_iteration, self.best_metric)

    def _stop_when_asked(self) -> None:
        signum = self.process_group.all_reduce_max(self.stop.signum or 0)
        if not signum:
            return
        if self.checkpoints is None:
            raise Stopped(
                f"stopped after iteration {self.state.iteration}; no checkpoint folder, nothing saved", signum
            )
        self._save()
        raise Stopped(f"stopped after iteration {self.state.iteration}; saved, the same command resumes", signum)

    def stopped_within(self, given_up: GivenUp) -> Stopped:
        """The error of a stop that gave the iteration up: what follows resumes from the newest checkpoint."""
        where = f"stopped within iteration {self.state.iteration + 1} ({given_up})"
        if self.saved is None:
            return Stopped(
                f"{where}; no checkpoint yet, so the same command begins this training anew", given_up.signum
            )
        return Stopped(f"{where}; the same command resumes after iteration {self.saved[0]}", given_up.signum)

    def _save_when_due(self) -> None:
        every = self.settings.checkpoint_every
        if not every or (self.checkpoints is None and self.process_group.size == 1):
            return
        # A stop may give up the iteration, so long iterations are saved before their turn: for little of their time.
        unsaved = self.clock() - self.saved_at
        is_late = unsaved > max(SAVE_SECONDS, SAVE_TIMES * self.save_seconds)
        if self.state.iteration % every == 0 or self.process_group.on_rank_zero(lambda: is_late):
            self._save()

    def _save(self) -> None:
        place = (self.state.iteration, self.state.evaluated_iteration)
        if self.checkpoints is None or self.saved == place:
            return
        started = self.clock()
        state = {
            "model": trainable_weights(self.trainer.model),
            "best_model": self.memory.best_weights,
            "optimizer_step": self.trainer.optimizer_step.state_dict(),
            "trainer": self.trainer.state_dict(),
            "loop": asdict(self.state),
            "history": self.history.state_dict(),
            "fingerprint": self.fingerprint,
            "rng": rng_state(),
        }
        if self.process_group.size > 1:
            state = self.trainer.optimizer_step.sharded.gather_state(state)
            state["workers"] = {"size": self.process_group.size, "rng": self.process_group.all_gather(state["rng"])}
        if self.process_group.is_rank_zero:
            sync_tracker(self.tracker)
            self.checkpoints.save(state)
        self.saved = place
        self.saved_at = self._spent("checkpoint", started)
        self.save_seconds = self.saved_at - started
        fault("loop.saved")

    def _resume(self, allow_drift: bool | Collection[str]) -> None:
        if self.checkpoints is None:
            return
        state = self.checkpoints.load_latest() if self.process_group.is_rank_zero else None
        state = self.trainer.optimizer_step.sharded.scatter_state(state, self.trainer.model)
        if state is None:
            return
        saved_by = state.get("workers", {"size": 1, "rng": [state["rng"]]})
        same_size = saved_by["size"] == self.process_group.size
        # Threads decide the last bits, and so does the number of processes, which may change.
        besides = () if same_size else ("runtime.threads",)
        changed = check_fingerprint(state["fingerprint"], self.fingerprint, allow_drift=allow_drift, besides=besides)
        if changed and self.process_group.is_rank_zero:
            self.tracker.set_tag("drift.fingerprint", "; ".join(changed)[:4000])
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if not changed or isinstance(error, PosttrainError):
                raise
            raise CheckpointError(
                f"the checkpoint cannot be resumed under the changed settings ({type(error).__name__}: {error}); put "
                "the old ones back, or begin anew"
            ) from error
        self.memory.is_whole = True
        self.saved = (self.state.iteration, self.state.evaluated_iteration)
        # last: building or loading anything may have drawn from the generators
        if same_size:
            restore_rng(saved_by["rng"][self.process_group.rank])
        else:
            logger.warning(
                "resumed in %d processes what was saved by %d: the same numbers to rounding, not to the last bit",
                self.process_group.size,
                saved_by["size"],
            )
            if self.process_group.is_rank_zero:
                restore_rng(state["rng"])
        fault("loop.resumed")
        logger.info("resumed after iteration %d, step %d", self.state.iteration, self.trainer.optimizer_step.num_steps)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Everything of a checkpoint but the random generators."""
        load_trainable_weights(self.trainer.model, state["model"])
        self.memory.best_weights = state["best_model"]
        self.trainer.optimizer_step.load_state_dict(state["optimizer_step"])
        self.trainer.load_state_dict(state["trainer"])
        if missing := sorted({field.name for field in fields(_Progress)} - state["loop"].keys()):
            raise CheckpointError(f"the checkpoint's loop lacks {', '.join(missing)}")
        self.memory.state = _Progress(**state["loop"])
        self.history.load_state_dict(state["history"])
