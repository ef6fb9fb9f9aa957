"""The choice of a sweep's winner: fresh episodes are played by the finalists in a worker process, and compared.

The flow of a sweep: trials in worker processes, the winner on fresh episodes, the report, the promotion gate.

The pipeline's lock is held until the winner is chosen, so no other run of the pipeline writes meanwhile; trials share
finished stages by the stages' own locks. Killed at any time, the same command goes on: trials with an outcome are not
run again, the others resume from their checkpoints.
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
    get_progress_display,
    open_local_session,
    report_message,
)
from flows.runtime import prefect_outage, stopping
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.flow_run_states import mark_flow_run_stopped
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
    SweepChoice,
    compare_finalists,
    rank_configurations,
    select_finalists,
)
from rl_core.errors import Stopped, WorkerFailed
from rl_core.machine_memory import measure_free_memory
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings, dump_settings, load_settings
from tasks.lifecycle.crashed_runs import close_crashed_runs
from tasks.stage_registry import list_stage_names
from tasks.stages.evaluate import read_evaluation
from tasks.tracking import RunTracker, Tracking, shorten_result

logger = logging.getLogger(__name__)

CHOICE_FILE = "choice.json"
NEEDED_STAGES = ("prepare_data", "evaluate")
_FINALISTS_NUMBER = (
    9999  # folder of the run that plays the fresh episodes, among those of the trials
)


def choose_winner(
    plan: SweepPlan,
    base: PipelineSettings,
    record: SweepRecord,
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
) -> tuple[SweepChoice | None, PipelineSettings | None]:
    """The winner with its figures, and the settings of its run at the gate; (None, None) without a finished trial.

    Args:
        job: makes a job of (number, seed, settings, ...). player: the process that plays them.
    """
    ranked = rank_configurations(record.outcomes, plan)
    if not ranked:
        return None, None
    winner = ranked[0]
    finalists = select_finalists(ranked, plan, _read_base_params(plan))
    equal = sum(one.interval.rate == winner.interval.rate for one in ranked) - 1
    choice = SweepChoice(
        winner.number, winner.params, plan.metric, winner.interval.rate, CHOICE_METHOD, equal=equal
    )
    settings = plan.load_trial_settings(winner.params, winner.best_seed)
    if plan.metric not in EVALUATION_METRICS:
        choice = dataclasses.replace(choice, why=f"{plan.metric} is no outcome of episodes")
    elif (evaluation := base.stages.evaluate) is not None:
        report_message(f"{len(finalists)} configurations play fresh held-out episodes")
        fresh = dataclasses.replace(evaluation, episodes_draw=evaluation.episodes_draw + 1)
        models = {
            format_trial_name(one.number, seed): folder
            for one in finalists
            for seed, folder in one.models.items()
        }
        folder, why = _play_fresh_episodes(
            _replace_evaluation(base, fresh), models, build_job, worker
        )
        if folder is None:
            choice = dataclasses.replace(choice, why=f"no fresh episodes ({why})")
        else:
            choice = _add_fresh_results(
                choice, winner, finalists, folder, models, plan, base.seed, fresh.episodes_draw
            )
            own = settings.stages.evaluate
            assert own is not None
            settings = _replace_evaluation(
                settings, dataclasses.replace(own, episodes_draw=fresh.episodes_draw)
            )
    write_json_atomic(record.home / CHOICE_FILE, choice.to_json())
    inject_fault("sweep.chosen")
    return choice, settings


def _read_base_params(plan: SweepPlan) -> dict[str, str]:
    """The values that the configuration itself has for what varies, as far as a trial has the same text."""
    base = load_settings(plan.config, plan.overrides)
    found = {}
    for dimension in plan.dimensions:
        value: Any = base
        for part in dimension.key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        texts = [text for text in dimension.choices if _is_same_value(text, value)]
        found[dimension.key] = texts[0] if texts else str(value)
    return found


def _is_same_value(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except (TypeError, ValueError):
        return text == str(value)


def _replace_evaluation(settings: PipelineSettings, evaluation: Any) -> PipelineSettings:
    return dataclasses.replace(
        settings, stages=dataclasses.replace(settings.stages, evaluate=evaluation)
    )


def _play_fresh_episodes(
    settings: PipelineSettings,
    models: Mapping[str, str],
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
) -> tuple[Path | None, str]:
    """Folder of the evaluation of these models; None with a reason where fresh episodes cannot be played."""
    skip = [name for name in list_stage_names() if name not in NEEDED_STAGES]
    name = f"{settings.name} · finalists on fresh episodes"
    work = build_job(_FINALISTS_NUMBER, 0, settings, name=name, models=dict(models), skip=skip)
    try:
        fields = worker.run_job(work, lambda value: True, lambda *_: None)
    except WorkerFailed as error:
        fields = {"why": str(error)}
    except BaseException:
        worker.request_stop()
        raise
    finally:
        worker.close_process()
    if "folder" not in fields:
        logger.warning("the sweep's finalists played no fresh episodes: %s", fields["why"])
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
    """The choice with what the evaluation in `folder` says."""
    played = {name: read_evaluation(folder, name) for name in models}
    episodes = {
        name: {episode.key: float(getattr(episode, plan.metric)) for episode in found.episodes}
        for name, found in played.items()
    }
    fresh, comparisons = compare_finalists(
        winner.number, finalists, episodes, metric=plan.metric, seed=seed
    )
    return dataclasses.replace(choice, draw=draw, fresh=fresh, comparisons=comparisons)


_POLL_SECONDS = 0.2
_MEMORY_POLL_SECONDS = 2.0  # between two looks at the free memory
_MAX_LOST_NODES = 3  # by one trial, which then has failed


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep."""

    rows: list[dict[str, Any]]
    choice: SweepChoice | None  # None = no configuration has a result
    text: str  # table, verdict and files, for the terminal
    pipeline: PipelineResult | None = None  # the winner's own run, with the gate

    @property
    def ok(self) -> bool:
        """True = there is a winner, and its run went through."""
        return self.choice is not None and (self.pipeline is None or self.pipeline.ok)


@dataclass(frozen=True)
class _SweepRequest:
    """A sweep as its flow gets it: Prefect stores a flow's parameters, and settings may hold secrets."""

    plan: SweepPlan
    base: PipelineSettings
    parallel: int
    gate: bool
    pool: LocalTrialPool | RayTrialPool


_requested_sweep: contextvars.ContextVar[_SweepRequest | None] = contextvars.ContextVar(
    "_asked", default=None
)


def run_sweep(
    plan: SweepPlan,
    *,
    parallel: int = 1,
    gate: bool = True,
    quiet: bool = False,
    ray: str | None = None,
    resources: TrialResources | None = None,
) -> SweepResult:
    """Run the flow in this process, with live progress.

    Args:
        parallel: trials at a time, in processes of their own.
        gate: offer the winner to the promotion gate, where the pipeline has one.
        ray: address of the Ray cluster that trials run on, see `RayTrialPool`; None = this machine.
        resources: of a trial on the cluster; memory as counted.
    Raises: SettingsError before anything runs; FolderBusy; Stopped with the state saved.
    """
    base = plan.load_base_settings()
    plan.validate_trial_settings()
    place: LocalTrialPool | RayTrialPool = LocalTrialPool(parallel)
    if ray is not None:
        place = RayTrialPool(ray, parallel, resources or TrialResources())
    place.open_pool(base)
    token = _requested_sweep.set(_SweepRequest(plan, base, parallel, gate, place))
    try:
        with open_local_session(base, quiet=quiet):
            result: SweepResult = prefect_outage.run_flow(
                lambda: sweep(base.name, [format_configuration(_describe_dimensions(plan))])
            )
    finally:
        _requested_sweep.reset(token)
        place.close_pool()
    return result


def _describe_dimensions(plan: SweepPlan) -> dict[str, str]:
    return {
        one.key: ",".join(one.choices) or f"{one.low:g}..{one.high:g}" for one in plan.dimensions
    }


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
    asked = _requested_sweep.get()
    assert asked is not None, f"a sweep of {pipeline} over {varied} is started by run_sweep"
    with prefect_outage.capture_outcome() as outcome:
        outcome.result = _SweepRun(asked).run_sweep()
    result: SweepResult = outcome.result
    return result


class _SweepRun:
    """One sweep under way."""

    def __init__(self, request: _SweepRequest) -> None:
        self.plan, self.base, self.parallel, self.gate = (
            request.plan,
            request.base,
            request.parallel,
            request.gate,
        )
        self.pool = request.pool
        self.home = self.plan.locate_folder(self.base)
        self.record = SweepRecord(self.home)
        self.tracking = Tracking(
            self.base.tracking.uri, Path(self.base.output), self.base.experiment
        )
        self.stop = threading.Event()
        self.peak = estimate_trial_bytes(self.base)
        self.workers = [self._create_worker(index) for index in range(self.parallel)]
        self.errors: list[BaseException] = []
        self.running: dict[int, str] = {}  # lane -> what it does
        self.last_progress: tuple[int, int, str] | None = None  # on the terminal

    def run_sweep(self) -> SweepResult:
        """Everything in its order."""
        pipeline_home = self.home.parent.parent
        with FolderLock(pipeline_home / ".lock", wait_s=self.base.run.wait_seconds):
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            known = self.record.open_folder(
                {
                    "started": started,
                    "varied": _describe_dimensions(self.plan),
                    "threads": self._resolve_trial_threads(),
                }
            )
            if known:
                done = len(self.record.outcomes)
                report_message(
                    f"going on with the sweep of {self.record.values['started']}: {done} trials are done"
                )
            close_crashed_runs(self.tracking, self.home)
            self.tracking.deliver_all_journals(self.home)
            if self.base.model.path is not None:  # before trials would look for it side by side
                self.tracking.resolve_model(self.base.model.path, pipeline_home / "base_models")
            run = self._start_tracked_run()
            try:
                result, winner = self._run_trials_and_choose(run)
            except BaseException as error:
                run.close(
                    "KILLED"
                    if isinstance(error, Stopped | KeyboardInterrupt | SystemExit)
                    else "FAILED"
                )
                raise
            run.close("FINISHED")
            self.tracking.deliver_all_journals(self.home)
        if winner is None or not self.gate or self.base.stages.promote is None:
            return result
        return self._run_promotion_gate(result, winner)

    def _resolve_trial_threads(self) -> int | None:
        """Threads of a trial; noted with the sweep, as sums depend on them."""
        return self.pool.threads if self.base.threads is None else None

    def _start_tracked_run(self) -> RunTracker:
        """The sweep's run in the tracking store, above those of its trials."""
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
            description="The sweep is running; its result will stand here.",
        )
        self.record.update_values(run_id=run.run_id)
        return run

    # -- trials -------------------------------------------------------------------------------------------------

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
        choice, winner = choose_winner(
            self.plan, self.base, self.record, self._build_job, self.workers[0]
        )
        rows = build_report_rows(self.record, self.plan, choice)
        write_report_files(self.record, self.plan, rows, choice)
        verdict = (
            choice.describe_choice(format_configuration(choice.params))
            if choice is not None
            else "no configuration has a result"
        )
        self._publish_report(run, rows, choice, verdict)
        files = "\n".join(f"{name:<14}{self.home / name}" for name in REPORT_FILES)
        page = self.tracking.build_run_url(run.run_id or "")
        text = f"{format_report_table(rows, self.plan)}\n{verdict}\n\n{files}" + (
            f"\nMLflow run    {page}" if page else ""
        )
        return SweepResult(rows, choice, text), winner

    def _run_lanes(self, schedule: TrialSchedule) -> None:
        lanes = []
        for index in range(self.parallel):
            context = contextvars.copy_context()  # Prefect's: a trial is a task of this flow run
            lanes.append(
                threading.Thread(
                    target=context.run, args=(self._run_lane, schedule, index), name=f"lane-{index}"
                )
            )
        for lane in lanes:
            lane.start()
        try:
            while any(lane.is_alive() for lane in lanes):
                for lane in lanes:
                    lane.join(_POLL_SECONDS)
                if stopping.stop_requested.is_set():
                    self._stop_all()
                self._show_progress(schedule)
        finally:  # also an interrupt: workers save and stop
            self._stop_all_unless_done(lanes)
        if self.errors:
            raise self.errors[0]

    def _stop_all_unless_done(self, lanes: list[threading.Thread]) -> None:
        if any(lane.is_alive() for lane in lanes):
            self._stop_all()
            for lane in lanes:
                lane.join(10.0)

    def _stop_all(self) -> None:
        self.stop.set()
        for worker in self.workers:
            worker.request_stop()

    def _run_lane(self, schedule: TrialSchedule, index: int) -> None:
        """Run trials one after the other in one worker process."""
        try:
            while (unit := schedule.take_next_trial()) is not None:
                if not self._wait_for_memory(schedule, index):
                    schedule.release_trial(unit)
                    return
                self._run_trial(schedule, unit, index)
        except BaseException as error:
            self.errors.append(error)
            self._stop_all()
        finally:
            self.workers[index].close_process()

    def _wait_for_memory(self, schedule: TrialSchedule, index: int) -> bool:
        """Wait until another trial fits; False = the sweep stops. One alone always begins."""
        said = False
        while (
            self.pool.shares_memory
            and index > 0
            and schedule.num_running > 1
            and measure_free_memory() < self.peak
        ):
            if not said:
                logger.warning(
                    "a trial waits: %.1f GiB are free, it takes %.1f",
                    measure_free_memory() / 2**30,
                    self.peak / 2**30,
                )
            said = True
            if self.stop.wait(_MEMORY_POLL_SECONDS):
                return False
        return True

    def _run_trial(self, schedule: TrialSchedule, scheduled: ScheduledTrial, index: int) -> None:
        label = f"{format_configuration(scheduled.params)}, seed {scheduled.seed}"
        tags = {f"sweep.{key}"[:250]: value[:250] for key, value in scheduled.params.items()}

        def progress(stage: str, done: int, total: int, message: str) -> None:
            self.running[index] = (
                f"{format_configuration(scheduled.params)} s{scheduled.seed} {stage} {done}/{total}"
            )

        @task(name="trial", task_run_name=label, cache_policy=NO_CACHE, persist_result=False)
        def trial() -> dict[str, Any]:
            for left in reversed(
                range(_MAX_LOST_NODES)
            ):  # the job anew each time: it knows the rungs that were reached
                job = self._build_job(
                    scheduled.number, scheduled.seed, scheduled.settings, tags=tags
                )
                try:
                    return self.workers[index].run_job(
                        job, lambda value: schedule.should_continue(scheduled, value), progress
                    )
                except NodeLost as lost:
                    what = (
                        "it goes on elsewhere, from its checkpoints" if left else "it is given up"
                    )
                    report_message(f"{label}: the node of the trial was lost ({lost}); {what}")
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
        """The worker of a lane."""
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
        **more: Any,
    ) -> dict[str, Any]:
        """A trial for the process that runs it."""
        if settings.threads is None and (threads := self.record.values.get("threads")):
            settings = dataclasses.replace(settings, threads=threads)
        halved = self.plan.method == "halving" and seed == 0
        job = TrialJob(
            home=str(self.record.locate_trial_folder(number, seed)),
            name=f"{self.base.name} · trial {number}, seed {seed}",
            settings=dump_settings(settings),
            metric=self.plan.metric,
            rungs=len(self.record.read_rungs(number, seed)) if halved else None,
            parent_folder=str(self.home),
            tags={
                "sweep": self.home.name,
                "sweep.trial": str(number),
                "sweep.seed": str(seed),
                **(tags or {}),
            },
            models={},
        )
        return {**vars(job), **more}

    # -- what people see ----------------------------------------------------------------------------------------

    def _report_outcome(self, outcome: TrialOutcome) -> None:
        report_message(format_outcome(outcome, self.plan))

    def _show_progress(self, schedule: TrialSchedule) -> None:
        total = self.plan.seeds * max(len(self.record.params), self._count_configurations())
        now = (len(self.record.outcomes), total, "; ".join(dict(self.running).values())[:100])
        show: Callable[..., None] | None = get_progress_display()
        if show is not None and now != self.last_progress:
            self.last_progress = now
            show("sweep", *now)

    def _count_configurations(self) -> int:
        return (
            len(build_grid(self.plan.dimensions))
            if self.plan.method == "grid"
            else self.plan.trials
        )

    def _publish_report(
        self, run: RunTracker, rows: list[dict[str, Any]], choice: SweepChoice | None, verdict: str
    ) -> None:
        run.set_description(render_markdown(rows, self.plan, verdict))
        run.set_tag("result", shorten_result(verdict))
        for name in REPORT_FILES:
            run.log_artifact(self.home / name, "sweep")
        metrics = {"sweep/trials": float(len(self.record.outcomes))}
        if choice is not None:
            metrics["sweep/chosen_by"] = choice.chosen_by
            if (found := choice.interval) is not None:
                metrics["sweep/fresh"] = found.rate
        run.log_metrics(metrics, 0)

    def _run_promotion_gate(self, result: SweepResult, winner: PipelineSettings) -> SweepResult:
        """The winner's own run of the whole pipeline: training is cached, the gate plays the fresh episodes."""
        report_message("the winner goes to the promotion gate")
        tags = {
            "sweep": self.home.name,
            "sweep.winner": format_configuration(result.choice.params)[:250]
            if result.choice
            else "",
        }
        pipeline = run_with_approval(
            winner, lambda: execute_pipeline(winner, tags=tags, on_drift="beside"), report_message
        )
        return dataclasses.replace(result, pipeline=pipeline)
