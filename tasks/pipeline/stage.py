"""Execution of one stage: cache key, folders, lock, resume, tracking, and the context that its body receives.

    <output>/<pipeline>/stages/<stage>/
        <key>/            finished: model/, *.jsonl, summary.json, metrics.jsonl, manifest.json; never written again
                          (after training also metrics_history.json; metrics_history.jsonl grows during training),
                          stage.log: log messages of the stage
        <key>.open/       in progress; checkpoints/ inside survive a kill and are resumed, with threads.json and
                          conditions.json next to them
        <key>.tracking/   journal of metrics and its delivery state, and stage.log while the stage runs
        <key>.lock        held while the stage runs
        decisions.jsonl   why the stage was run or skipped

The key covers the stage, its settings, environment and model settings, digests of its inputs, seed, code version, and
the content of the user's modules that settings name, including their imports. A stage with the same key is not run
twice; a changed key runs. The key does not cover the number of processes (`launch`) or files that the user's code
opens by itself.
A finished folder is verified against its manifest before it is used. Checkpoints of another key are never ignored
silently: see tasks/pipeline/changed_conditions.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import FolderBusy, PosttrainError, Stopped
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock
from rl_core.timing import collect_seconds
from tasks.config import PipelineSettings
from tasks.pipeline.changed_conditions import (
    archive_checkpoints,
    reserve_checkpoints,
    resolve_checkpoints,
)
from tasks.pipeline.cpu_threads import (
    THREADS_FILE,
    read_recorded_threads,
    record_num_threads,
    use_torch_threads,
)
from tasks.pipeline.stage_fingerprint import (
    FINGERPRINT_FILE,
    build_stage_fingerprint,
    record_decision,
)
from tasks.pipeline.stage_folder import (
    KeyedStage,
    StageLog,
    count_damaged_lines,
    discard_stage,
    keep_checkpoints,
    list_saved_epochs,
    log_stage_records,
    seal_stage,
)
from tasks.pipeline.stage_key import (
    compute_stage_seed,
    digest_input,
)
from tasks.pipeline.stage_result import (
    EPOCH_MODELS,
    METRICS_HISTORY,
    STAGE_LOG,
    StageResult,
    load_finished_stage,
)
from tasks.processes.launch import recover_events, run_in_workers
from tasks.run_status import STOP_TIMEOUT_SECONDS, is_stop_error
from tasks.stage_registry import find_stage, list_training_stages
from tasks.tracking import RunTracker, read_metrics, shorten_result

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.api.recipes import Recipe
    from rl_core.distributed import ProcessGroup
    from rl_core.trainers.supervised_trainer import SupervisedTrainer
    from rl_core.training.checkpoints import EpochModelWriter
    from rl_core.training.loop_state import LoopOutcome
    from rl_core.training.optimizer_step import OptimizerStep
    from tasks.pipeline.pipeline_run import PipelineRun


logger = logging.getLogger(__name__)

_STOPPED_BETWEEN_STAGES = "stopped between two stages; run the same command again to continue"
_LOCK_POLL_SECONDS = 0.2  # while another trial runs the same stage


def _build_single_process_group() -> ProcessGroup:
    from rl_core.distributed import SINGLE_PROCESS  # imported here because it loads torch

    return SINGLE_PROCESS


@dataclass
class StageContext:
    """Settings, inputs, folder, tracker and stop signal that a stage's body receives."""

    name: str
    folder: Path  # write here; renamed when finished
    settings: Any  # of this stage
    pipeline: PipelineSettings
    inputs: dict[str, Path | str]  # folders of finished stages, model folders or hub names
    tracker: (
        RunTracker  # in a worker process a plain Tracker that reports to the stage's main process
    )
    pipeline_run: PipelineRun  # None in a worker process
    seed: int
    fingerprint: dict[str, str]  # must match for a checkpoint to be resumed
    stop: threading.Event
    # True or a tuple of keys: resume although the fingerprint differs, in any key or in these
    allow_drift: bool | tuple[str, ...] = False
    threads: int = 1  # total over all processes of the stage on this machine
    # processes that run this stage's body together
    process_group: ProcessGroup = field(default_factory=_build_single_process_group)

    @property
    def checkpoints(self) -> Path:
        """Folder of the stage's checkpoints; removed when the stage has finished."""
        return self.folder / "checkpoints"

    def train(
        self, recipe: Recipe[Any], after_iteration: Callable[[int], None] | None = None
    ) -> LoopOutcome:
        """Run a recipe's trainer to its end, or resume it, with tracking, checkpoints and the stop signal.

        Arguments and errors: as `rl_core.training.loop.run_loop`.
        """
        return recipe.run(
            self.settings,
            tracker=self.tracker,
            checkpoints=self.checkpoints,
            fingerprint=self.fingerprint,
            allow_drift=self.allow_drift,
            stop_event=self.stop,
            history=self.folder / METRICS_HISTORY,
            after_iteration=after_iteration,
        )

    def build_epoch_keeper(
        self,
        trainer: SupervisedTrainer[Any, Any],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        load: Callable[[PipelineSettings], PreTrainedModel],
    ) -> EpochModelWriter | None:
        """Build the writer that keeps models of epochs during `train`; None if the settings keep none.

        Arguments: as `save_model`.
        """
        from rl_core.models import causal_lm
        from rl_core.training.checkpoints import EpochModelWriter

        if not self.settings.keep_epochs:
            return None

        def save(folder: Path) -> None:
            full_model = self._gather_full_model(trainer.optimizer_step, model, load)
            if full_model is not None:
                causal_lm.publish_model(full_model, tokenizer, folder)

        return EpochModelWriter(
            self.folder / EPOCH_MODELS,
            self.settings.keep_epochs,
            trainer.order.batches_per_epoch,
            trainer.optimizer_step,
            save,
        )

    def save_model(
        self,
        optimizer_step: OptimizerStep,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        load: Callable[[PipelineSettings], PreTrainedModel],
    ) -> None:
        """Write the trained model into the stage's folder.

        If several processes share its weights, the first one gathers them into a fresh model on the CPU, so that no GPU
        has to hold them all.

        Args:
            optimizer_step: the one that trained the model.
            load: loads the model that training started from, for settings with another device.
        """
        from rl_core.models import causal_lm

        if find_stage(self.name).trained_kind == "policy":
            self._record_logprobs(optimizer_step, model)
        elif find_stage(self.name).trained_kind == "reward_model":
            self._record_scores(optimizer_step, model)
        full_model = self._gather_full_model(optimizer_step, model, load)
        if full_model is not None:
            causal_lm.save(full_model, tokenizer, self.folder / "model")

    def _record_logprobs(self, optimizer_step: OptimizerStep, model: PreTrainedModel) -> None:
        """Record log-probs of the trainer's model, which the exported model must reproduce (stage `export`)."""
        from rl_core.models.export_records import (
            TRAINED_LOGPROBS_FILE,
            record_trained_logprobs,
            write_records,
        )

        records = optimizer_step.sharded.run_independently_with_full_weights(
            lambda: record_trained_logprobs(model)
        )
        if self.process_group.is_rank_zero:
            write_records(self.folder / TRAINED_LOGPROBS_FILE, records)

    def _record_scores(self, optimizer_step: OptimizerStep, model: PreTrainedModel) -> None:
        """Record scores of a reward model, as `_record_logprobs` does for a policy."""
        from rl_core.models.export_records import (
            TRAINED_SCORES_FILE,
            record_fixed_scores,
            write_scores,
        )

        records = optimizer_step.sharded.run_independently_with_full_weights(
            lambda: record_fixed_scores(model)
        )
        if self.process_group.is_rank_zero:
            write_scores(self.folder / TRAINED_SCORES_FILE, records)

    def _gather_full_model(
        self,
        optimizer_step: OptimizerStep,
        model: PreTrainedModel,
        load: Callable[[PipelineSettings], PreTrainedModel],
    ) -> PreTrainedModel | None:
        """Return the model with all its weights; None in every process but the first."""
        from rl_core.models.trainable_weights import (
            collect_trainable_weights,
            load_trainable_weights,
        )

        if self.process_group.size == 1:
            return model
        weights = optimizer_step.sharded.gather_state(collect_trainable_weights(model))
        if not self.process_group.is_rank_zero:
            return None
        on_cpu = dataclasses.replace(self.pipeline.model, device="cpu")
        model = load(dataclasses.replace(self.pipeline, model=on_cpu))
        load_trainable_weights(model, weights)
        return model


def run_stage(
    pipeline_run: PipelineRun,
    name: str,
    body: Callable[[StageContext], dict[str, Any]],
    *,
    inputs: Mapping[str, StageResult | Path | str],
    settings: Any = None,
    label: str | None = None,
    is_complete: Callable[[Path], bool] = Path.is_dir,
) -> StageResult:
    """Run one stage, or reuse its finished folder if its key has been run before.

    Args:
        pipeline_run: the pipeline run that this stage belongs to.
        name: the stage; also the folder that holds its keys.
        body: writes into `context.folder` and returns the numbers of summary.json.
        inputs: what the stage reads, by name; the content decides the key.
        settings: of the stage; None = those of the pipeline.
        label: name of the tracking run, if it differs from the stage's.
        is_complete: returns whether a finished folder has what the later stages of this run need; else it is replaced.
    Raises: FolderBusy if another process runs the same stage; ResumeRefused if checkpoints of other conditions would be
        ignored; Stopped; whatever the body raises.
    """
    if pipeline_run.stop.is_set():
        raise Stopped(_STOPPED_BETWEEN_STAGES, signal.SIGTERM)
    if settings is None:
        settings = getattr(pipeline_run.settings.stages, name)
    digests = {key: digest_input(value) for key, value in inputs.items()}
    pipeline_run.tracker.record_data_inputs(digests)
    stage_key = pipeline_run.stage_keys.collect_started_key(name, settings, digests)
    key = stage_key.key
    final = pipeline_run.stages_folder / name / key
    earlier_keys = {earlier: result.key for earlier, result in pipeline_run.results.items()}
    fingerprint = build_stage_fingerprint(name, stage_key, inputs, earlier_keys)
    stage = KeyedStage(name, label or name, settings, inputs, digests, key, final, fingerprint)
    make_folder(final.parent)
    with _lock_stage(pipeline_run, final.with_name(f"{key}.lock")):
        inject_fault("stage.locked")
        clear_leftovers(final.parent)
        had_finished_folder = final.is_dir()
        is_incomplete = had_finished_folder and not is_complete(final)
        fresh = is_incomplete or pipeline_run.should_recompute(name, key)
        finished = None if fresh else load_finished_stage(final, name, key)
        if finished is not None:
            inject_fault("stage.cached")
            logger.info("%s: already finished (%s), not run again", stage.label, key)
            record_decision(final, "cached", fingerprint)
            pipeline_run.tracker.record_cached_stage(stage.label, finished.run_id or finished.key)
            return finished
        if fresh or pipeline_run.should_restart(key):
            discard_stage(final)
            archive_checkpoints(final)
        drift = resolve_checkpoints(final, fingerprint, pipeline_run.options)
        kind = "incomplete" if is_incomplete else "fresh" if fresh else "drifted" if drift else ""
        kind = kind or ("damaged" if had_finished_folder else "")
        _record_start(stage, kind, drift, for_people=not pipeline_run.options.evaluated_models)
        pipeline_run.mark_computed(key)
        return _compute_stage(pipeline_run, stage, body, drift)


@contextlib.contextmanager
def _lock_stage(pipeline_run: PipelineRun, path: Path) -> Iterator[None]:
    """Hold the lock of a stage's key.

    A trial waits for another trial that runs the same stage, then shares its result.
    """
    lock = FolderLock(path)
    while True:
        try:
            lock.__enter__()
            break
        except FolderBusy:
            if pipeline_run.options.trial is None:
                raise
            if pipeline_run.stop.wait(_LOCK_POLL_SECONDS):
                raise Stopped(_STOPPED_BETWEEN_STAGES, signal.SIGTERM) from None
    with contextlib.ExitStack() as stack:
        stack.push(lock)
        yield


def _record_start(
    stage: KeyedStage, start_kind: str, drift: list[str], *, for_people: bool
) -> None:
    """Record why a stage runs, and log the changes if it finished before under another key.

    Args:
        start_kind: kind of the decision; "" = resumed if there are checkpoints, else its first run or a changed one.
        for_people: False if the user named the models to evaluate: that they differ from the run's is no news.
    """
    has_checkpoints = (stage.folder / "checkpoints").is_dir()
    kind = "resumed" if has_checkpoints else "first"
    decision = record_decision(stage.final, start_kind or kind, stage.fingerprint, drift)
    if decision.kind == "changed":
        lines = "\n  ".join(decision.changes)
        logger.info(
            "%s runs again because this changed:\n  %s",
            stage.label,
            lines,
            extra={"for_people": for_people},
        )


def has_begun(
    pipeline_run: PipelineRun,
    name: str,
    *,
    settings: Any,
    inputs: Mapping[str, StageResult | Path | str],
) -> bool:
    """Return whether a stage with these settings and inputs has been started, finished or not.

    Arguments: see `run_stage`.
    """
    digests = {key: digest_input(value) for key, value in inputs.items()}
    key = pipeline_run.stage_keys.collect_started_key(name, settings, digests).key
    final = pipeline_run.stages_folder / name / key
    return final.is_dir() or final.with_name(f"{key}.open").is_dir()


def _compute_stage(
    pipeline_run: PipelineRun,
    stage: KeyedStage,
    body: Callable[[StageContext], dict[str, Any]],
    drift: list[str],
) -> StageResult:
    """Open or reopen the stage's folder, run the body, and seal the folder under its final name.

    Args:
        drift: differences under which the stage's checkpoints may be resumed.
    """
    keep_checkpoints(stage.folder)
    write_json_atomic(stage.folder / FINGERPRINT_FILE, {**stage.fingerprint, "drift": drift})
    if pipeline_run.options.on_drift == "beside":
        reserve_checkpoints(stage.final)  # so that no other run refuses to start because of them
    threads = _choose_stage_threads(pipeline_run, stage)
    inject_fault("stage.cleared")
    tracker = pipeline_run.tracker.open_stage(
        stage.label,
        stage.name,
        stage.journal,
        stage.settings,
        stage.digests,
        stage.key,
        pipeline_run.models.build_parent_tags(stage.name),
    )
    tracker.set_tag("threads", str(threads))
    if drift:
        tracker.set_tag("drift", "; ".join(drift)[:4000])
    inject_fault("stage.tracked")
    context = _build_context(pipeline_run, stage, tracker, threads, drift)
    with (
        StageLog(stage.journal) as log,
        _close_on_exit(tracker, stage, log),
        use_torch_threads(threads),
    ):
        with collect_seconds() as counts:
            summary = _run_body(context, body)
        inject_fault("stage.computed")
        if counts.get("out_of_memory"):
            summary["out_of_memory"] = int(counts["out_of_memory"])
            tracker.log_metrics({"perf/out_of_memory": counts["out_of_memory"]}, 0)
        if drift:
            summary["drift"] = drift
        is_registered = (
            find_stage(stage.name).trained_kind is not None and pipeline_run.options.trial is None
        )
        if is_registered and (stage.folder / "model").is_dir():
            summary |= pipeline_run.models.register_model(
                tracker, stage.folder / "model", stage.name, summary
            )
        inject_fault("stage.registered")
        seconds = round(tracker.seconds, 2)
        summary |= {
            "seconds": seconds,
            "threads": threads,
            "run_id": tracker.run_id or "",
            "key": stage.key,
        }
        _complete_summary(pipeline_run, stage, tracker, summary)
        inject_fault("stage.summarised")
    inject_fault("stage.closed")
    return StageResult(
        stage=stage.name,
        folder=str(stage.final),
        digest=seal_stage(stage),
        key=stage.key,
        cached=False,
        seconds=seconds,
        run_id=tracker.run_id or "",
        summary=summary,
    )


def _build_context(
    pipeline_run: PipelineRun,
    stage: KeyedStage,
    tracker: RunTracker,
    threads: int,
    drift: list[str],
) -> StageContext:
    allow_any_drift = pipeline_run.options.on_drift == "resume"
    return StageContext(
        name=stage.name,
        folder=stage.folder,
        settings=stage.settings,
        pipeline=pipeline_run.settings,
        inputs={k: v.path if isinstance(v, StageResult) else v for k, v in stage.inputs.items()},
        tracker=tracker,
        pipeline_run=pipeline_run,
        threads=threads,
        seed=compute_stage_seed(pipeline_run.settings.find_stage_seed(stage.name), stage.name),
        fingerprint={"stage key": stage.key, "threads": str(threads)},
        allow_drift=allow_any_drift or (("stage key",) if drift else False),
        stop=pipeline_run.stop,
    )


def _complete_summary(
    pipeline_run: PipelineRun, stage: KeyedStage, tracker: RunTracker, summary: dict[str, Any]
) -> None:
    """Add to the summary what the folder holds, write it, and publish it and the folder's records with the run."""
    if epochs := list_saved_epochs(stage.folder):
        summary["epochs"] = epochs
    summary.setdefault("tokens_per_second", compute_tokens_per_second(stage.journal))
    if damaged := count_damaged_lines(stage):
        summary["damaged_lines"] = damaged
        tracker.set_tag(
            "damaged_lines", ", ".join(f"{name}: {count}" for name, count in damaged.items())
        )
    log_stage_records(
        tracker,
        stage.folder,
        stage.final,
        stage.name,
        max_megabytes=pipeline_run.settings.tracking.records_megabytes,
    )
    tracker.log_dict(summary, "summary.json")
    if summary.get("note"):
        tracker.set_tag("result", shorten_result(str(summary["note"])))
    if stage.name in list_training_stages() and (
        curves := pipeline_run.tracking.build_charts_link(stage.name)
    ):
        tracker.set_description(
            f"{summary.get('note', '')}\n\n[Curves, success first]({curves})".strip()
        )
    write_json_atomic(stage.folder / "summary.json", summary)


def _choose_stage_threads(pipeline_run: PipelineRun, stage: KeyedStage) -> int:
    """Return the run's number of threads; under `threads: auto` the number behind the stage's checkpoints, if any."""
    threads = pipeline_run.threads
    if pipeline_run.settings.threads == "auto":
        recorded = read_recorded_threads(stage.folder / THREADS_FILE)
        if recorded is not None and recorded != threads:
            logger.info("%s: uses %d threads, as its checkpoints did", stage.label, recorded)
            threads = recorded
    record_num_threads(stage.folder, threads)
    return threads


def _run_body(
    context: StageContext, body: Callable[[StageContext], dict[str, Any]]
) -> dict[str, Any]:
    """Run the body in this process, or in the processes that the settings ask for, and return its summary."""
    recover_events(context.folder, context.tracker)
    launch = getattr(context.settings, "launch", None)
    in_workers = launch is not None and launch.kind == "torchrun"
    return dict(run_in_workers(context, body) if in_workers else body(context))


@contextlib.contextmanager
def _close_on_exit(tracker: RunTracker, stage: KeyedStage, log: StageLog) -> Iterator[None]:
    """Close the stage's run as finished, killed or failed; after an error of ours keep only checkpoints in its folder.

    The log records begin, progress and outcome; the tracking store gets its end.
    """
    log.write_message(
        f"{stage.label} begins, key {stage.key}, process {os.getpid()} on {platform.node()}"
    )
    tracker.on_progress.append(log.write_progress)
    try:
        yield
    except BaseException as error:
        is_stopped = isinstance(error, Stopped) or is_stop_error(error)
        if is_stopped:
            log.write_message(f"stopped: {error}")
        else:
            log.write_message(
                "failed\n" + "".join(traceback.format_exception(error)).rstrip(), level="ERROR"
            )
            logger.info(
                "%s failed; its log is %s", stage.label, log.path, extra={"for_people": True}
            )
        if isinstance(error, PosttrainError) and not isinstance(error, Stopped):
            tracker.set_tag("error", f"{type(error).__name__}: {error}"[:4000])
            keep_checkpoints(stage.folder)
            with contextlib.suppress(OSError):  # checkpoints stay
                stage.folder.rmdir()
        tracker.log_text(log.tail, STAGE_LOG)
        if is_stopped:
            tracker.close("KILLED", timeout_s=STOP_TIMEOUT_SECONDS)
        else:
            tracker.close("FAILED")
        raise
    log.write_message(f"{stage.label} has finished after {tracker.seconds:.1f} s")
    tracker.log_text(log.tail, STAGE_LOG)
    tracker.close("FINISHED")


def compute_tokens_per_second(journal: Path) -> float | None:
    """Return tokens over seconds of all training steps in a stage's journal; None if the stage did not train."""
    tokens = seconds = 0.0
    for _, row in read_metrics(journal):
        if "perf/tokens_per_second" in row and "perf/step_seconds" in row:
            tokens += row["perf/tokens_per_second"] * row["perf/step_seconds"]
            seconds += row["perf/step_seconds"]
    return tokens / seconds if seconds else None
