"""One run of a pipeline: record and lock of its folder, tracking, models, results and progress.

<output>/<pipeline>/
    .lock             held while the pipeline runs; a second run into the same folder is refused
    run.json          the newest run: MLflow run, digest of settings, status (tasks/pipeline/run_record.py)
    runs/<started>/   journal of the parent run, and a run.json of that run
    stages/           see tasks/pipeline/stage.py
    sweeps/           trials of sweeps share the stages above; each has a folder with lock, run.json and runs/
"""

from __future__ import annotations

import functools
import logging
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock
from tasks.command_hints import format_posttrain_command
from tasks.config import PipelineSettings, digest_settings
from tasks.lifecycle.approval import ApprovalRequest
from tasks.lifecycle.crashed_runs import CrashedRun, close_crashed_runs
from tasks.lifecycle.data_lineage import format_record_tags, inspect_data_sources
from tasks.pipeline.changed_conditions import check_unfinished_stages
from tasks.pipeline.cpu_threads import (
    choose_num_threads,
    read_default_threads,
    read_recorded_threads,
)
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.run_record import RUN_RECORD, PipelineRecord
from tasks.pipeline.run_tracking import (
    ModelVersions,
    PipelineTracker,
    choose_start_time,
    describe_progress,
    resolve_registered_name,
    resolve_run_folder,
)
from tasks.pipeline.stage_key import StageKeys
from tasks.pipeline.stage_result import StageResult
from tasks.run_status import POSTPONED, is_stop_error
from tasks.tracking import RunTracker, Tracking, UndeliveredCounts
from tasks.tracking.run_ids import shorten_run_name

logger = logging.getLogger(__name__)

StageProgressCallback = Callable[[str, int, int, str], None]  # stage, done, total, message


class PipelineRun:
    """One run of a pipeline; a context manager.

    Inside it, `tracker` and `models` give access to tracking and models.
    """

    tracker: PipelineTracker
    models: ModelVersions

    def __init__(
        self,
        settings: PipelineSettings,
        options: RunOptions | None = None,
        *,
        keys: StageKeys | None = None,
        lock: FolderLock | None = None,
        on_progress: StageProgressCallback | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Prepare the run; entering it opens files and tracking.

        Args:
            keys: of the stages, as far as the command has collected them; ignored if they are those of other settings.
            lock: of the pipeline's folder, if the caller holds it.
            stop: when set, no further stage starts, and training saves and stops.
        """
        self.settings = settings
        self.options = options or RunOptions()
        if keys is None or keys.pipeline is not settings:
            keys = StageKeys(settings)
        self.stage_keys = keys
        self.output = Path(settings.output).resolve()
        trial = self.options.trial
        shared = self.output / settings.name
        self.home = trial.home if trial is not None else shared
        self.stages_folder = shared / "stages"
        self._models_cache = shared / "base_models"
        self._threads: int | None = None  # chosen on entering; None = torch's default
        self.threads_note = ""  # a sentence for the user about the choice
        self.stop = stop or threading.Event()
        self.tracking = Tracking(
            settings.tracking.uri, self.output, settings.tracking.experiment or settings.name
        )
        self.crashed_runs: tuple[
            CrashedRun, ...
        ] = ()  # earlier runs of this pipeline, detected on entering
        self._record = PipelineRecord(
            self.home, self.options, wait_s=settings.run.wait_seconds, lock=lock
        )
        self._on_progress = on_progress
        self._fraction, self._progress = 0.0, ""
        self._results: dict[str, StageResult] = {}
        self._input_stages: dict[str, tuple[str, ...]] = {}
        self._computed_keys: set[str] = set()
        self._approval: ApprovalRequest | None = None
        self.postponed_reason = ""  # why the decision about the champion was left open
        self.resumed = False  # True = this run continues an interrupted one
        self.undelivered = (
            UndeliveredCounts()
        )  # at the end: records that the tracking store has not accepted

    def __enter__(self) -> PipelineRun:
        make_folder(self.stages_folder)
        self._record.acquire_lock()
        try:
            inject_fault("run.locked")
            self._open_run()
        except BaseException as error:
            if hasattr(self, "tracker"):
                self._close_run(error)
            self._record.release_lock()
            raise
        return self

    def _open_run(self) -> None:
        self._clear_leftovers()
        self.stage_keys.forget_user_content()  # the lock may have been waited for
        # Before anything of this run is recorded.
        check_unfinished_stages(self.stages_folder, self.stage_keys, self.options)
        digest = digest_settings(self.settings)
        previous = self._record.find_interrupted_run(digest)
        self.resumed = bool(previous)
        earlier_threads = None
        if previous:
            previous_folder = resolve_run_folder(self.home, previous)
            earlier_threads = read_recorded_threads(previous_folder / RUN_RECORD)
        self._threads, self.threads_note = choose_num_threads(
            self.settings.threads, earlier_threads
        )
        self._settle_earlier_runs(previous)
        # Before any stage reads them: rows that are added later count as unseen, never the other way round.
        data_record = inspect_data_sources(self.settings)
        started = previous or choose_start_time(self.home / "runs")
        self._record.record_start(
            resolve_run_folder(self.home, started),
            started=started,
            digest=digest,
            threads=self._threads,
        )
        inject_fault("run.noted")
        self.tracker = PipelineTracker(
            self.tracking,
            self.settings,
            self.options,
            started=started,
            resumed=self.resumed,
            home=self.home,
            on_progress=self.report_progress,
        )
        self.models = ModelVersions(
            self.settings,
            self.tracking.registry,
            self._models_cache,
            self.results,
            {**self.options.tags, **format_record_tags(data_record)},
            deliver=lambda: self.tracking.deliver_all_journals(self.home),
        )
        inject_fault("run.tracked")
        self._record.record_run_id(self.parent.run_id)
        self.tracker.log_settings(self._threads)

    def _clear_leftovers(self) -> None:
        """Remove temporary files that killed processes left here.

        Temporaries of living processes stay: some write answers here without the pipeline's lock.
        """
        # other trials write to the stages' folders
        stages = self.stages_folder.glob("*") if self.options.trial is None else ()
        for folder in (self.home, *self.home.glob("runs/*"), *stages):
            if folder.is_dir() and not folder.is_symlink():
                clear_leftovers(folder)

    def _settle_earlier_runs(self, previous: str) -> None:
        """Close crashed runs of this pipeline, and deliver what is still in the journals of earlier runs."""
        self.crashed_runs = tuple(close_crashed_runs(self.tracking, self.home))
        for run in self.crashed_runs:
            is_resumed_now = run.name == f"{self.settings.name} · {previous}"
            if run.is_pipeline and run.journal_folder.parent.name == "runs" and not is_resumed_now:
                resume = format_posttrain_command(
                    f"resume {shlex.quote(shorten_run_name(self.output, run.name))}", self.output
                )
                logger.warning("%s; `%s` resumes it", run.description, resume)
        num_undelivered = self.tracking.deliver_all_journals(self.home)
        if num_undelivered:
            logger.warning(
                "%d records of earlier runs still wait for the tracking store", num_undelivered
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close_run(error)
        finally:
            self._record.release_lock()

    def abandon_run(self) -> None:
        """Record on disk that the run was stopped, when its process has no time left to end it."""
        self._record.record_end("stopped")
        self.tracker.abandon_runs()

    def _close_run(self, error: BaseException | None) -> None:
        """End tracking and record; deliver what the stages could not, and count what is still undelivered."""
        stopped = is_stop_error(error)
        if error is not None:
            status = "stopped" if stopped else "failed"
        elif self._approval is not None:
            status = "waiting"
        elif self.postponed_reason:
            status = "postponed"
        else:
            status = "finished"
        inject_fault("run.ending")
        self.tracker.close(
            "FINISHED" if error is None else "KILLED" if stopped else "FAILED", error
        )
        inject_fault("run.ended")
        # Last: a run that is killed before this line is resumed, and ends the same run of the tracking store.
        self._record.record_end(status)
        if stopped:
            return
        self.undelivered = self.tracking.count_undelivered(self.home)
        if self.undelivered.total and not self.tracking.store.is_unreachable:
            self.tracking.deliver_all_journals(self.home)
            self.undelivered = self.tracking.count_undelivered(self.home)
        if self.undelivered.total:
            logger.warning(
                "not delivered yet: %s in %s wait for %s; `%s` or the next run delivers them",
                self.undelivered,
                self.home,
                self.tracking.uri,
                format_posttrain_command("store sync", self.output),
            )

    @functools.cached_property
    def threads(self) -> int:
        """CPU threads of the stages. Determined when the first one computes, since this loads and configures torch."""
        default_threads = read_default_threads()  # before they are set
        threads = default_threads if self._threads is None else self._threads
        _prepare_libraries(threads)
        if self._threads is None:
            self.parent.set_tag("threads", str(threads))
        return threads

    @property
    def parent(self) -> RunTracker:
        """The run of the whole pipeline in the tracking store."""
        return self.tracker.parent

    @property
    def registered_model(self) -> str:
        """Name of the policy in the model registry."""
        return resolve_registered_name(self.settings)

    @property
    def seconds(self) -> float:
        """Time spent on this run, including the earlier processes of a resumed run."""
        return self.parent.seconds

    @property
    def results(self) -> Mapping[str, StageResult]:
        """Finished stages by name, in the order in which they finished."""
        return MappingProxyType(self._results)

    @property
    def input_stages(self) -> Mapping[str, tuple[str, ...]]:
        """Stages whose outputs each finished stage received."""
        return MappingProxyType(self._input_stages)

    def add_result(self, name: str, result: StageResult, inputs: tuple[str, ...] = ()) -> None:
        """Add a finished stage, for later stages to start from.

        Args:
            inputs: stages whose outputs it received.
        """
        self._results[name], self._input_stages[name] = result, inputs

    @property
    def approval(self) -> ApprovalRequest | None:
        """The request that a person has to answer before the champion moves."""
        return self._approval

    def await_approval(self, request: ApprovalRequest | None) -> None:
        """Let the run end as waiting for this request; None = it does not wait."""
        self._approval = request

    def postpone_decision(self, reason: str) -> None:
        """Let the run end without a decision about the champion; the same command resumes there."""
        self.postponed_reason = reason
        self.parent.set_tag(POSTPONED, reason)

    def should_recompute(self, stage: str, key: str) -> bool:
        """Return whether to ignore a finished folder: `fresh` is set and this run has not computed the key."""
        return (
            self.options.fresh
            and self.options.only in (None, stage)
            and key not in self._computed_keys
        )

    def should_restart(self, key: str) -> bool:
        """Return whether to start an unfinished stage over and ignore its checkpoints."""
        return self.options.restart and key not in self._computed_keys

    def mark_computed(self, key: str) -> None:
        """Record that this run computes the stage of this key, so that `fresh` does not compute it twice."""
        self._computed_keys.add(key)

    @property
    def fraction(self) -> float:
        """Progress of the running stage, 0 to 1."""
        return self._fraction

    @property
    def progress(self) -> str:
        """Progress of the running stage as text."""
        return self._progress

    def report_progress(self, label: str, done: int, total: int, message: str = "") -> None:
        """Record the running stage's progress and pass it on to the display."""
        self._fraction = done / total if total else 0.0
        self._progress = describe_progress(label, done, total, message)
        if self._on_progress is not None:
            self._on_progress(label, done, total, message)


def import_libraries(settings: PipelineSettings, *, computes: bool) -> None:
    """Import libraries that take seconds to load.

    These are the tracking store's, and torch and transformers if stages will compute.
    """
    if computes:
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401  the base of every transformers model
    Tracking(settings.tracking.uri, Path(settings.output)).store.import_mlflow()


def _prepare_libraries(threads: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()  # the pipeline's own display shows progress
    transformers.utils.logging.set_verbosity_error()  # warnings about a new head are expected
