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
from collections.abc import Callable, Mapping, Sequence
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
from flows.sweep.plan import EVALUATION_METRICS, SweepPlan, format_configuration
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
    format_trial_name,
)
from flows.sweep.search import build_grid, create_search
from flows.sweep.trial import TrialJob
from flows.sweep.trial_process import LocalTrialPool, NodeLost, TrialWorker, estimate_trial_bytes
from flows.sweep.winner import (
    CHOICE_METHOD,
    RankedConfiguration,
    StartModelResult,
    SweepChoice,
    compare_finalists,
    compare_with_start_model,
    rank_configurations,
    select_finalists,
)
from rl_core.errors import Stopped, WorkerFailed
from rl_core.machine_memory import measure_free_memory
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from tasks.command_hints import format_posttrain_command
from tasks.config import PipelineSettings, dump_settings
from tasks.lifecycle.crashed_runs import close_crashed_runs
from tasks.stage_registry import START_MODEL, list_stage_names
from tasks.stages.evaluate import read_evaluation
from tasks.tracking import RunTracker, Tracking, shorten_result

logger = logging.getLogger(__name__)

CHOICE_FILE = "choice.json"
NEEDED_STAGES = ("prepare_data", "evaluate")
# Numbers of the folders of the fresh episodes and of the start model, among those of the trials.
_FINALISTS_NUMBER, _START_MODEL_NUMBER = 9999, 9998
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


def choose_winner(
    plan: SweepPlan,
    base: PipelineSettings,
    record: SweepRecord,
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
) -> tuple[SweepChoice | None, PipelineSettings | None]:
    """Choose the winner; return it with its figures, and the settings of its run at the gate.

    Args:
        build_job: builds a job from (number, seed, settings, ...).
        worker: the process that plays fresh episodes.
    Returns: (None, None) without a finished trial.
    """
    ranked = rank_configurations(record.outcomes, plan)
    if not ranked:
        return None, None
    winner = ranked[0]
    finalists = select_finalists(ranked, plan, _read_base_params(plan, base))
    num_equal = sum(other.interval.rate == winner.interval.rate for other in ranked) - 1
    choice = SweepChoice(
        winner.number,
        winner.params,
        plan.metric,
        winner.interval.rate,
        CHOICE_METHOD,
        equal=num_equal,
    )
    settings = plan.load_trial_settings(winner.params, winner.best_seed)
    if plan.metric not in EVALUATION_METRICS:
        choice = dataclasses.replace(choice, why=f"{plan.metric} is not measured on episodes")
    elif base.stages.evaluate is not None:
        report_message(f"{len(finalists)} configurations play fresh held-out episodes")
        evaluation = base.stages.evaluate
        fresh = dataclasses.replace(evaluation, episodes_draw=evaluation.episodes_draw + 1)
        choice = dataclasses.replace(
            choice, start=_measure_start_model(plan, base, build_job, worker)
        )
        models = {START_MODEL: choice.start.path} if choice.start is not None else {}
        models |= {
            format_trial_name(finalist.number, seed): folder
            for finalist in finalists
            for seed, folder in finalist.models.items()
        }
        folder, problem = _play_episodes(
            _replace_evaluation(base, fresh),
            models,
            build_job,
            worker,
            _FINALISTS_NUMBER,
            "finalists on fresh episodes",
        )
        if folder is None:
            choice = dataclasses.replace(choice, why=f"no fresh episodes ({problem})")
        else:
            choice = _add_fresh_results(
                choice, winner, finalists, folder, models, plan, base.seed, fresh.episodes_draw
            )
            winner_evaluation = settings.stages.evaluate
            assert winner_evaluation is not None
            settings = _replace_evaluation(
                settings,
                dataclasses.replace(winner_evaluation, episodes_draw=fresh.episodes_draw),
            )
    write_json_atomic(record.home / CHOICE_FILE, choice.to_json())
    inject_fault("sweep.chosen")
    return choice, settings


def _read_base_params(plan: SweepPlan, base: PipelineSettings) -> dict[str, str]:
    """Return the configuration's own values of the varied settings, in the text of a trial if there is one."""
    params = {}
    for dimension in plan.dimensions:
        value: Any = base
        for part in dimension.key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        texts = [text for text in dimension.choices if _is_same_value(text, value)]
        params[dimension.key] = texts[0] if texts else str(value)
    return params


def _is_same_value(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except (TypeError, ValueError):
        return text == str(value)


def _replace_evaluation(settings: PipelineSettings, evaluation: Any) -> PipelineSettings:
    return dataclasses.replace(
        settings, stages=dataclasses.replace(settings.stages, evaluate=evaluation)
    )


def _measure_start_model(
    plan: SweepPlan,
    base: PipelineSettings,
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
) -> StartModelResult | None:
    """Play the episodes of the choice with the model that all trials start from; None if there is none."""
    path = base.model.path
    if path is None or any(dimension.key.startswith("model.") for dimension in plan.dimensions):
        return None
    folder, _ = _play_episodes(
        base, {START_MODEL: path}, build_job, worker, _START_MODEL_NUMBER, "start model"
    )
    if folder is None:
        return None
    episodes = _read_outcomes(folder, START_MODEL, plan.metric)
    return StartModelResult(path, sum(episodes.values()) / len(episodes)) if episodes else None


def _read_outcomes(folder: Path, name: str, metric: str) -> dict[Any, float]:
    """Read the outcome of each episode that a model played."""
    episodes = read_evaluation(folder, name).episodes
    return {episode.key: float(getattr(episode, metric)) for episode in episodes}


def _play_episodes(
    settings: PipelineSettings,
    models: Mapping[str, str],
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
    number: int,
    label: str,
) -> tuple[Path | None, str]:
    """Return the folder of the evaluation of these models, or None with a reason if it failed."""
    skip = [name for name in list_stage_names() if name not in NEEDED_STAGES]
    name = f"{settings.name} · {label}"
    job = build_job(number, 0, settings, name=name, models=dict(models), skip=skip)
    try:
        fields = worker.run_job(job, lambda value: True, lambda *_: None)
    except WorkerFailed as error:
        fields = {"why": str(error)}
    except BaseException:
        worker.request_stop()
        raise
    if "folder" not in fields:
        logger.warning("%s: no episodes were played: %s", label, fields["why"])
        return None, str(fields["why"])
    return Path(fields["folder"]), ""


def _add_fresh_results(
    choice: SweepChoice,
    winner: RankedConfiguration,
    finalists: Sequence[RankedConfiguration],
    folder: Path,
    models: Mapping[str, str],
    plan: SweepPlan,
    seed: int,
    draw: int,
) -> SweepChoice:
    """Add the results of the evaluation in `folder` to the choice."""
    episodes = {name: _read_outcomes(folder, name, plan.metric) for name in models}
    fresh, comparisons = compare_finalists(
        winner.number, finalists, episodes, metric=plan.metric, seed=seed
    )
    start = choice.start
    if start is not None and episodes[START_MODEL]:
        winner_episodes = [
            episodes[format_trial_name(winner.number, model_seed)] for model_seed in winner.models
        ]
        start = compare_with_start_model(start, winner_episodes, episodes[START_MODEL], seed=seed)
    return dataclasses.replace(choice, draw=draw, fresh=fresh, comparisons=comparisons, start=start)
