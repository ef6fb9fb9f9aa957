"""Settings, inputs, folder, tracker and stop signal of a stage, in one object for its body.

Execution of a stage: cache key, folders, lock, resume, tracking, hand-over.

    <output>/<pipeline>/stages/<stage>/
        <key>/            finished: model/, *.jsonl, summary.json, metrics.jsonl, manifest.json; never written again
                          (after training also metrics_history.json; metrics_history.jsonl grows meanwhile),
                          stage.log: what the stage said
        <key>.open/       being written; checkpoints/ inside survive a kill and are resumed, with threads.json and
                          conditions.json beside
        <key>.tracking/   the journal of metrics and what was shipped of it, and stage.log while the stage runs
        <key>.lock        held while the stage runs
        decisions.jsonl   why the stage was run, or was not

The key is (stage, its settings, environment and model settings, digests of its inputs, seed, code version, content of
the user's modules that settings name and of those that they import). The same key is not run twice; a changed one is.
In how many processes a stage runs (`launch`) is no part of its key, nor are files that the user's code opens by itself.
A finished folder is verified against its manifest before it is used. Checkpoints of another key are not passed over
without a word: see tasks/pipeline/changed_conditions.py.
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
from tasks.pipeline.run_record import (
    STOP_TIMEOUT_SECONDS,
    THREADS_FILE,
    is_stop_error,
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
    collect_stage_key,
    compute_stage_key,
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


def _build_single_process_group() -> ProcessGroup:
    from rl_core.distributed import SINGLE_PROCESS  # here, as it loads torch

    return SINGLE_PROCESS


@dataclass
class StageContext:
    """Settings, inputs, folder, tracker and stop signal of a stage, for its body."""

    name: str
    folder: Path  # write here; renamed when finished
    settings: Any  # the stage's own settings
    pipeline: PipelineSettings
    inputs: dict[str, Path | str]  # folders of finished stages, model folders or hub names
    tracker: RunTracker  # in one of several processes a Tracker alone, that tells the stage's own process
    pipeline_run: PipelineRun  # not there in one of several processes
    seed: int
    fingerprint: dict[str, str]  # what has to be equal for a checkpoint to be resumed
    stop: threading.Event
    allow_drift: bool | tuple[str, ...] = (
        False  # resume although the fingerprint differs, in these keys or in any
    )
    threads: int = 1  # of all processes of the stage on this machine together
    process_group: ProcessGroup = field(
        default_factory=_build_single_process_group
    )  # the processes that run this stage's body together

    @property
    def checkpoints(self) -> Path:
        """Folder of the stage's checkpoints; removed when it has finished."""
        return self.folder / "checkpoints"

    def train(
        self, recipe: Recipe[Any], after_iteration: Callable[[int], None] | None = None
    ) -> LoopOutcome:
        """Run a recipe's trainer to its end, or resume it: tracked, checkpointed and stoppable as every stage is.

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
        """For `train`: keeps the models of epochs, where the stage's settings ask for some. Arguments: `save_model`."""
        from rl_core.models import causal_lm
        from rl_core.training.checkpoints import EpochModelWriter

        if not self.settings.keep_epochs:
            return None

        def save(folder: Path) -> None:
            whole = self._gather_full_model(trainer.optimizer_step, model, load)
            if whole is not None:
                causal_lm.publish_model(whole, tokenizer, folder)

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

        Where several processes share its weights out, the first one puts them together, in a model made anew on the
        CPU: no GPU need hold them all.

        Args:
            optimizer_step: that has trained the model.
            load: gives the model that training started from, for settings with another device.
        """
        from rl_core.models import causal_lm

        if find_stage(self.name).trained_kind == "policy":
            self._record_logprobs(optimizer_step, model)
        elif find_stage(self.name).trained_kind == "reward_model":
            self._record_scores(optimizer_step, model)
        whole = self._gather_full_model(optimizer_step, model, load)
        if whole is not None:
            causal_lm.save(whole, tokenizer, self.folder / "model")

    def _record_logprobs(self, optimizer_step: OptimizerStep, model: PreTrainedModel) -> None:
        """Keep log-probs of the trainer's own model, which the written one has to have (stage `export`)."""
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
        """As `_record_logprobs`, for a reward model."""
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
        """The model with all its weights; None in a process that is not the first of several."""
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


# what a file with a stage's body needs; keys and finished folders have modules of their own

logger = logging.getLogger(__name__)

_STOPPED_BETWEEN_STAGES = "stopped between two stages; the same command goes on from there"
_WAIT_SECONDS = 0.2  # between two looks at a stage that another trial runs


def run_stage(
    pipeline_run: PipelineRun,
    name: str,
    body: Callable[[StageContext], dict[str, Any]],
    *,
    settings: Any,
    inputs: Mapping[str, StageResult | Path | str],
    label: str | None = None,
) -> StageResult:
    """Run one stage, or take its finished folder when its key has been run before.

    Args:
        pipeline_run: the pipeline run that this stage belongs to.
        name: the stage; also the folder under which its keys lie.
        body: writes into `context.folder` and returns numbers for people (summary.json).
        settings: the stage's own settings.
        inputs: by name, what the stage reads; its content decides the key.
        label: name of the tracking run, where it differs from the stage's.
    Raises: FolderBusy when another process runs the same stage; ResumeRefused where checkpoints of other conditions
        would be passed over; Stopped; whatever the body raises.
    """
    if pipeline_run.stop.is_set():
        raise Stopped(_STOPPED_BETWEEN_STAGES, signal.SIGTERM)
    digests = {key: digest_input(value) for key, value in inputs.items()}
    pipeline_run.tracker.record_data_inputs(digests)
    made_of = collect_stage_key(name, settings, pipeline_run.settings, digests)
    key = made_of.key
    final = pipeline_run.stages_folder / name / key
    before = {earlier: result.key for earlier, result in pipeline_run.results.items()}
    conditions = build_stage_fingerprint(name, made_of, inputs, before)
    stage = KeyedStage(name, label or name, settings, inputs, digests, key, final, conditions)
    make_folder(final.parent)
    with _lock_stage(pipeline_run, final.with_name(f"{key}.lock")):
        inject_fault("stage.locked")
        clear_leftovers(final.parent)
        fresh = pipeline_run.should_recompute(name, key)
        was_there = final.is_dir()
        done = None if fresh else load_finished_stage(final, name, key)
        if done is not None:
            inject_fault("stage.cached")
            logger.info("%s: finished before (%s), not run again", stage.label, key)
            record_decision(final, "cached", conditions)
            pipeline_run.tracker.record_cached_stage(stage.label, done.run_id or done.key)
            return done
        if fresh or pipeline_run.should_restart(key):
            discard_stage(final)
            archive_checkpoints(final)
        drift = resolve_checkpoints(final, conditions, pipeline_run.options)
        why = "fresh" if fresh else "drifted" if drift else "damaged" if was_there else ""
        _record_start(stage, why, drift, for_people=not pipeline_run.options.evaluated_models)
        pipeline_run.mark_computed(key)
        return _compute_stage(pipeline_run, stage, body, drift)


@contextlib.contextmanager
def _lock_stage(pipeline_run: PipelineRun, path: Path) -> Iterator[None]:
    """The lock of a stage's key. A trial waits for another one that runs the same stage, and then shares it."""
    lock = FolderLock(path)
    while True:
        try:
            lock.__enter__()
            break
        except FolderBusy:
            if pipeline_run.options.trial is None:
                raise
            if pipeline_run.stop.wait(_WAIT_SECONDS):
                raise Stopped(_STOPPED_BETWEEN_STAGES, signal.SIGTERM) from None
    with contextlib.ExitStack() as held:
        held.push(lock)
        yield


def _record_start(
    stage: KeyedStage, start_kind: str, drift: list[str], *, for_people: bool
) -> None:
    """Note why a stage is run, and say it where one with another key was finished before.

    why: kind of the decision; "" = resumed where there are checkpoints, else its first run or a changed one.
    for_people: False = models were given to be evaluated: that they are others than those of a run is no news.
    """
    has_checkpoints = (stage.folder / "checkpoints").is_dir()
    kind = "resumed" if has_checkpoints else "first"
    decision = record_decision(stage.final, start_kind or kind, stage.fingerprint, drift)
    if decision.kind == "changed":
        lines = "\n  ".join(decision.changes)
        logger.info(
            "%s runs anew, since this changed:\n  %s",
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
    """True = a stage with these settings and inputs has been run, to its end or not. Arguments: see `run_stage`."""
    key = compute_stage_key(
        name,
        settings,
        pipeline_run.settings,
        {key: digest_input(value) for key, value in inputs.items()},
    )
    final = pipeline_run.stages_folder / name / key
    return final.is_dir() or final.with_name(f"{key}.open").is_dir()


def _compute_stage(
    pipeline_run: PipelineRun,
    stage: KeyedStage,
    body: Callable[[StageContext], dict[str, Any]],
    drift: list[str],
) -> StageResult:
    """Open or reopen the stage's folder, run the body, and seal the folder under its final name.

    drift: differences under which the stage's checkpoints may be resumed.
    """
    keep_checkpoints(stage.folder)
    write_json_atomic(stage.folder / FINGERPRINT_FILE, {**stage.fingerprint, "drift": drift})
    if pipeline_run.options.on_drift == "beside":
        reserve_checkpoints(
            stage.final
        )  # no other run takes its checkpoints for those of a stage that it would pass over
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
    context = StageContext(
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
        allow_drift=pipeline_run.options.on_drift == "resume"
        or (("stage key",) if drift else False),
        stop=pipeline_run.stop,
    )
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


def _complete_summary(
    pipeline_run: PipelineRun, stage: KeyedStage, tracker: RunTracker, summary: dict[str, Any]
) -> None:
    """Complete the summary by what the folder tells; write it, and show it and the folder's records in the run."""
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
        curves := pipeline_run.tracking.build_charts_url(stage.name)
    ):
        tracker.set_description(
            f"{summary.get('note', '')}\n\n[Curves, success first]({curves})".strip()
        )
    write_json_atomic(stage.folder / "summary.json", summary)


def _choose_stage_threads(pipeline_run: PipelineRun, stage: KeyedStage) -> int:
    """The run's number of threads; with `threads: auto` the one that the stage's checkpoints were made with, if any."""
    threads = pipeline_run.threads
    if pipeline_run.settings.threads == "auto":
        kept = read_recorded_threads(stage.folder / THREADS_FILE)
        if kept is not None and kept != threads:
            logger.info("%s: goes on with %d threads, as its checkpoints", stage.label, kept)
            threads = kept
    record_num_threads(stage.folder, threads)
    return threads


def _run_body(
    context: StageContext, body: Callable[[StageContext], dict[str, Any]]
) -> dict[str, Any]:
    """The body's summary, computed in this process or in those that the settings ask for."""
    recover_events(context.folder, context.tracker)
    launch = getattr(context.settings, "launch", None)
    in_workers = launch is not None and launch.kind == "torchrun"
    return dict(run_in_workers(context, body) if in_workers else body(context))


@contextlib.contextmanager
def _close_on_exit(tracker: RunTracker, stage: KeyedStage, log: StageLog) -> Iterator[None]:
    """Close the stage's run as finished, killed or failed; after an error of ours keep only checkpoints in its folder.

    Beginning, progress and outcome stand in its log, of which the tracking store gets the end.
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
    """Tokens over seconds of all training steps in a stage's journal; None where it did not train."""
    tokens = seconds = 0.0
    for _, row in read_metrics(journal):
        if "perf/tokens_per_second" in row and "perf/step_seconds" in row:
            tokens += row["perf/tokens_per_second"] * row["perf/step_seconds"]
            seconds += row["perf/step_seconds"]
    return tokens / seconds if seconds else None
