"""Flow of a sweep: trials in worker processes, the winner on fresh episodes, the report, the promotion gate.

The pipeline's lock is held until the winner is chosen, so that no other run of the pipeline writes meanwhile. Trials
share finished stages through the stages' locks. After a kill at any time the same command resumes: trials with an
outcome are not run again, the others resume from their checkpoints.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.post_training import (
    execute_pipeline,
    report_message,
    run_local_flow,
)
from flows.runtime import prefect_outage, stopping
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.flow_run_states import mark_flow_run_stopped
from flows.runtime.prefect_home import exempt_loopback_in_calls
from flows.runtime.run_request import RunRequest, find_request
from flows.runtime.run_summary import PipelineResult
from flows.sweep.plan import SweepPlan, format_configuration
from flows.sweep.ray_trials import RayTrialPool, TrialResources
from flows.sweep.report import (
    REPORT_FILES,
    build_report_rows,
    format_outcome,
    format_report_table,
    render_markdown,
    write_report_files,
)
from flows.sweep.schedule import (
    ScheduledTrial,
    SweepRecord,
    TrialOutcome,
    TrialSchedule,
)
from flows.sweep.search import build_grid, create_search
from flows.sweep.trial import TrialJob
from flows.sweep.trial_process import LocalTrialPool, NodeLost, TrialWorker, estimate_trial_bytes
from flows.sweep.winner import SweepChoice, choose_winner
from rl_core.errors import Stopped, WorkerFailed
from rl_core.machine_memory import measure_free_memory
from rl_core.storage.locks import FolderLock
from tasks.command_hints import format_posttrain_command
from tasks.config import PipelineSettings, dump_settings
from tasks.lifecycle.crashed_runs import close_crashed_runs
from tasks.tracking import RunTracker, Tracking, shorten_result

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_MEMORY_POLL_SECONDS = 2.0
_MAX_LOST_NODES = 3  # by one trial, which then fails


@dataclass(frozen=True)
class SweepResult:
    """Finished sweep."""

    rows: list[dict[str, Any]]
    choice: SweepChoice | None  # None = no configuration has a result
    text: str  # table, verdict and files, for the terminal
    pipeline: PipelineResult | None = None  # the winner's run through the gate

    @property
    def ok(self) -> bool:
        """True if there is a winner, and its run succeeded."""
        return self.choice is not None and (self.pipeline is None or self.pipeline.ok)


@dataclass(frozen=True)
class _SweepRequest:
    """Arguments of a sweep's flow; part of its `RunRequest`, because settings may hold secrets."""

    plan: SweepPlan
    base: PipelineSettings
    parallel: int
    gate: bool
    pool: LocalTrialPool | RayTrialPool


def run_sweep(
    plan: SweepPlan,
    base: PipelineSettings,
    *,
    parallel: int = 1,
    gate: bool = True,
    quiet: bool = False,
    ray: str | None = None,
    resources: TrialResources | None = None,
) -> SweepResult:
    """Run the flow in this process, with live progress.

    Args:
        base: the plan's settings without the varied ones.
        parallel: trials at a time, each in a separate process.
        gate: submit the winner to the promotion gate, if the pipeline has one.
        ray: address of the Ray cluster that runs the trials, see `RayTrialPool`; None = this machine.
        resources: of a trial on the cluster; its memory is estimated.
    Raises: SettingsError before anything runs; FolderBusy; Stopped with the state saved.
    """
    plan.validate_trial_settings()
    pool: LocalTrialPool | RayTrialPool = LocalTrialPool(parallel)
    if ray is not None:
        pool = RayTrialPool(ray, parallel, resources or TrialResources())
    pool.open_pool(base)
    request = RunRequest(settings=base, sweep=_SweepRequest(plan, base, parallel, gate, pool))
    try:
        return run_local_flow(
            lambda _: sweep(base.name, [format_configuration(_describe_dimensions(plan))]),
            request,
            quiet=quiet,
        )
    finally:
        pool.close_pool()


def _describe_dimensions(plan: SweepPlan) -> dict[str, str]:
    return {
        dimension.key: ",".join(dimension.choices) or f"{dimension.low:g}..{dimension.high:g}"
        for dimension in plan.dimensions
    }


@exempt_loopback_in_calls
@flow(
    name="sweep",
    flow_run_name="{pipeline} · sweep",
    validate_parameters=False,
    persist_result=False,
    on_failure=[mark_flow_run_stopped],
    on_crashed=[mark_flow_run_stopped],
)
def sweep(pipeline: str, varied: list[str]) -> SweepResult:
    """Run trials of one pipeline that differ in some settings; called by `run_sweep`."""
    request = find_request().sweep
    assert isinstance(request, _SweepRequest), (
        f"a sweep of {pipeline} over {varied} is started by run_sweep"
    )
    with prefect_outage.capture_outcome() as outcome:
        outcome.result = _SweepRun(request).run_sweep()
    result: SweepResult = outcome.result
    return result


class _SweepRun:
    """Sweep in progress."""

    def __init__(self, request: _SweepRequest) -> None:
        self.plan, self.base, self.pool = request.plan, request.base, request.pool
        self.parallel, self.gate = request.parallel, request.gate
        self.home = self.plan.locate_folder(self.base)
        self.record = SweepRecord(self.home)
        self.tracking = Tracking(
            self.base.tracking.uri, Path(self.base.output), self.base.experiment
        )
        self.stop = threading.Event()
        self.peak = estimate_trial_bytes(self.base)
        self.workers = [self._create_worker(index) for index in range(self.parallel)]
        self.errors: list[BaseException] = []
        self.running: dict[int, str] = {}  # lane: its current trial
        self.last_progress: tuple[int, int, str] | None = None  # on the terminal

    def run_sweep(self) -> SweepResult:
        """Run the trials, choose the winner, write the report, submit the winner to the gate."""
        pipeline_home = self.home.parent.parent
        with FolderLock(pipeline_home / ".lock", wait_s=self.base.run.wait_seconds):
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            is_resumed = self.record.open_folder(
                {
                    "started": started,
                    "varied": _describe_dimensions(self.plan),
                    "threads": self._resolve_trial_threads(),
                }
            )
            if is_resumed:
                num_done = len(self.record.outcomes)
                started = self.record.values["started"]
                report_message(f"resuming the sweep of {started}: {num_done} trials are done")
            close_crashed_runs(self.tracking, self.home)
            self.tracking.deliver_all_journals(self.home)
            if self.base.model.path is not None:  # before trials resolve it concurrently
                self.tracking.resolve_model(self.base.model.path, pipeline_home / "base_models")
            run = self._start_tracked_run()
            try:
                result, winner = self._run_trials_and_choose(run)
            except BaseException as error:
                is_stopped = isinstance(error, Stopped | KeyboardInterrupt | SystemExit)
                run.close("KILLED" if is_stopped else "FAILED")
                raise
            run.close("FINISHED")
            self.tracking.deliver_all_journals(self.home)
        if winner is None or not self.gate or self.base.stages.promote is None:
            return result
        return self._run_promotion_gate(result, winner)

    def _resolve_trial_threads(self) -> int | None:
        """Return the threads of a trial; recorded with the sweep, because sums depend on them."""
        return self.pool.threads if self.base.threads is None else None

    def _start_tracked_run(self) -> RunTracker:
        """Start the sweep's run in the tracking store, the parent of its trials."""
        name = f"{self.base.name} · sweep {self.record.values['started']}"
        run = self.tracking.start_run(
            name,
            self.home,
            tags={"kind": "sweep", "pipeline": self.base.name, "sweep": self.home.name},
            params={
                "varied": _describe_dimensions(self.plan),
                "method": self.plan.method,
                "metric": self.plan.metric,
            },
            description="The sweep is running; its result will appear here.",
        )
        self.record.update_values(run_id=run.run_id)
        return run

    def _run_trials_and_choose(
        self, run: RunTracker
    ) -> tuple[SweepResult, PipelineSettings | None]:
        options = {
            "trials": self.plan.trials,
            "seed": self.base.seed,
            "minimize": self.plan.minimize,
        }
        search = create_search(
            self.plan.method,
            self.plan.dimensions,
            self.record.list_configurations(self.plan.seeds),
            options,
        )
        schedule = TrialSchedule(self.plan, self.record, search, self.stop, self._report_outcome)
        self._run_lanes(schedule)
        try:
            choice, winner = choose_winner(
                self.plan, self.base, self.record, self._build_job, self.workers[0]
            )
        finally:
            self.workers[0].close_process()
        rows = build_report_rows(self.record, self.plan, choice)
        write_report_files(self.record, self.plan, rows, choice)
        verdict = "no configuration has a result"
        if choice is not None:
            verdict = choice.describe_choice(format_configuration(choice.params))
        self._publish_report(run, rows, choice, verdict)
        files = "\n".join(f"{name:<14}{self.home / name}" for name in REPORT_FILES)
        page = self.tracking.build_run_url(run.run_id or "")
        text = f"{format_report_table(rows, self.plan, choice)}\n{verdict}\n\n{files}"
        if page:
            text += f"\nMLflow run    {page}"
        elif not self.tracking.serves_pages:
            text += f"\nMLflow run    {format_posttrain_command('ui', self.tracking.output)}    shows it"
        return SweepResult(rows, choice, text), winner

    def _run_lanes(self, schedule: TrialSchedule) -> None:
        lanes = []
        for index in range(self.parallel):
            context = contextvars.copy_context()  # Prefect's: a trial is a task of this flow run
            arguments = (self._run_lane, schedule, index)
            lane = threading.Thread(target=context.run, args=arguments, name=f"lane-{index}")
            lanes.append(lane)
        for lane in lanes:
            lane.start()
        try:
            while any(lane.is_alive() for lane in lanes):
                for lane in lanes:
                    lane.join(_POLL_SECONDS)
                if stopping.stop_requested.is_set():
                    self._stop_all()
                self._show_progress(schedule)
        finally:  # on an interrupt, too, workers save and stop
            if any(lane.is_alive() for lane in lanes):
                self._stop_all()
                for lane in lanes:
                    lane.join(10.0)
        if self.errors:
            raise self.errors[0]

    def _stop_all(self) -> None:
        self.stop.set()
        for worker in self.workers:
            worker.request_stop()

    def _run_lane(self, schedule: TrialSchedule, index: int) -> None:
        """Run trials one after another in one worker process."""
        try:
            while (trial := schedule.take_next_trial()) is not None:
                if not self._wait_for_memory(schedule, index):
                    schedule.release_trial(trial)
                    return
                self._run_trial(schedule, trial, index)
        except BaseException as error:
            self.errors.append(error)
            self._stop_all()
        finally:
            self.workers[index].close_process()

    def _wait_for_memory(self, schedule: TrialSchedule, index: int) -> bool:
        """Wait until another trial fits; return False if the sweep stops. A single trial always starts."""
        if not self.pool.shares_memory or index == 0:
            return True
        has_warned = False
        while schedule.num_running > 1:
            free = measure_free_memory()
            if free >= self.peak:
                break
            if not has_warned:
                logger.warning(
                    "a trial waits: %.1f GiB are free, it takes %.1f",
                    free / 2**30,
                    self.peak / 2**30,
                )
            has_warned = True
            if self.stop.wait(_MEMORY_POLL_SECONDS):
                return False
        return True

    def _run_trial(self, schedule: TrialSchedule, scheduled: ScheduledTrial, index: int) -> None:
        label = f"{format_configuration(scheduled.params)}, seed {scheduled.seed}"
        tags = {f"sweep.{key}"[:250]: value[:250] for key, value in scheduled.params.items()}

        def show_progress(stage: str, done: int, total: int, message: str) -> None:
            configuration = format_configuration(scheduled.params)
            self.running[index] = f"{configuration} s{scheduled.seed} {stage} {done}/{total}"

        @task(name="trial", task_run_name=label, cache_policy=NO_CACHE, persist_result=False)
        def trial() -> dict[str, Any]:
            for retries_left in reversed(range(_MAX_LOST_NODES)):
                # Rebuild the job each time: it contains the rungs reached so far.
                job = self._build_job(
                    scheduled.number, scheduled.seed, scheduled.settings, tags=tags
                )
                try:
                    return self.workers[index].run_job(
                        job, lambda value: schedule.should_continue(scheduled, value), show_progress
                    )
                except NodeLost as lost:
                    consequence = "the trial fails"
                    if retries_left:
                        consequence = "it resumes on another node from its checkpoints"
                    report_message(
                        f"{label}: the node of the trial was lost ({lost}); {consequence}"
                    )
            raise WorkerFailed(f"the node of the trial was lost {_MAX_LOST_NODES} times")

        try:
            fields = trial()
        except WorkerFailed as error:
            fields = {"status": "failed", "why": str(error)}
        except BaseException:
            schedule.release_trial(scheduled)
            raise
        finally:
            self.running.pop(index, None)
        self.peak = max(self.peak, int(fields.get("peak_bytes", 0)))
        rungs = self.record.read_rungs(scheduled.number, scheduled.seed)
        schedule.finish_trial(
            TrialOutcome(
                number=scheduled.number,
                seed=scheduled.seed,
                params=scheduled.params,
                **{**fields, "rungs": rungs},
            )
        )

    def _create_worker(self, index: int) -> TrialWorker:
        """Create the worker of a lane."""
        log = self.home / f"worker-{index}.log"
        return TrialWorker(
            log, lambda: self.pool.start_process(index, self.home, log, self.stop), self.stop
        )

    def _build_job(
        self,
        number: int,
        seed: int,
        settings: PipelineSettings,
        *,
        tags: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Build the job of a trial for the process that runs it."""
        threads = self.record.values.get("threads")
        if settings.threads is None and threads:
            settings = dataclasses.replace(settings, threads=threads)
        uses_rungs = self.plan.method == "halving" and seed == 0
        job = TrialJob(
            home=str(self.record.locate_trial_folder(number, seed)),
            name=f"{self.base.name} · trial {number}, seed {seed}",
            settings=dump_settings(settings),
            metric=self.plan.metric,
            rungs=len(self.record.read_rungs(number, seed)) if uses_rungs else None,
            parent_folder=str(self.home),
            tags={
                "sweep": self.home.name,
                "sweep.trial": str(number),
                "sweep.seed": str(seed),
                **(tags or {}),
            },
            models={},
        )
        return {**vars(job), **fields}

    def _report_outcome(self, outcome: TrialOutcome) -> None:
        report_message(format_outcome(outcome, self.plan))

    def _show_progress(self, schedule: TrialSchedule) -> None:
        total = self.plan.seeds * max(len(self.record.params), self._count_configurations())
        progress = (len(self.record.outcomes), total, "; ".join(dict(self.running).values())[:100])
        display = find_request().display
        if display is not None and progress != self.last_progress:
            self.last_progress = progress
            display("sweep", *progress)

    def _count_configurations(self) -> int:
        if self.plan.method == "grid":
            return len(build_grid(self.plan.dimensions))
        return self.plan.trials

    def _publish_report(
        self, run: RunTracker, rows: list[dict[str, Any]], choice: SweepChoice | None, verdict: str
    ) -> None:
        run.set_description(render_markdown(rows, self.plan, verdict, choice))
        run.set_tag("result", shorten_result(verdict))
        for name in REPORT_FILES:
            run.log_artifact(self.home / name, "sweep")
        metrics = {"sweep/trials": float(len(self.record.outcomes))}
        if choice is not None:
            metrics["sweep/chosen_by"] = choice.chosen_by
            if choice.interval is not None:
                metrics["sweep/fresh"] = choice.interval.rate
        run.log_metrics(metrics, 0)

    def _run_promotion_gate(self, result: SweepResult, winner: PipelineSettings) -> SweepResult:
        """Run the whole pipeline of the winner: training is cached, the gate evaluates on the fresh episodes."""
        report_message("the winner is submitted to the promotion gate")
        configuration = format_configuration(result.choice.params) if result.choice else ""
        tags = {"sweep": self.home.name, "sweep.winner": configuration[:250]}
        pipeline = run_with_approval(
            winner, lambda: execute_pipeline(winner, tags=tags, on_drift="beside"), report_message
        )
        return dataclasses.replace(result, pipeline=pipeline)
