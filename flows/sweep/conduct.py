"""The flow of a sweep: trials in worker processes, the winner on fresh episodes, the report, the promotion gate.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.post_training import PipelineResult, display_progress, execute, say, watched
from flows.runtime import outlived, stopping
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.stopped_state import name_stopped
from flows.sweep.confirm import choose
from flows.sweep.plan import SweepPlan, label_of
from flows.sweep.pool import LocalTrials, Worker, free_memory, trial_bytes
from flows.sweep.ray_trials import RayTrials, TrialResources
from flows.sweep.record import SweepRecord, TrialOutcome
from flows.sweep.schedule import Schedule, Unit
from flows.sweep.search import make_search
from flows.sweep.space import grid
from flows.sweep.sweep_report import FILES, markdown, outcome_line, rows_of, table, write_files
from flows.sweep.trial import TrialJob
from flows.sweep.trial_process import NodeLost
from flows.sweep.winner import SweepChoice
from rl_core.errors import Stopped, WorkerFailed
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings, resolve
from tasks.lifecycle.dead_runs import close_dead_runs
from tasks.tracking import RunTracker, Tracking, result_text

__all__ = ["SweepResult", "run_sweep", "sweep"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_MEMORY_SECONDS = 2.0  # between two looks at the free memory
_NODES_LOST = 3  # by one trial, which then has failed


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
class _SweepJob:
    """A sweep as its flow gets it: Prefect stores a flow's parameters, and settings may hold secrets."""

    plan: SweepPlan
    base: PipelineSettings
    parallel: int
    gate: bool
    place: LocalTrials | RayTrials


_asked: contextvars.ContextVar[_SweepJob | None] = contextvars.ContextVar("_asked", default=None)


def run_sweep(
    plan: SweepPlan, *, parallel: int = 1, gate: bool = True, quiet: bool = False, ray: str | None = None,
    resources: TrialResources | None = None,
) -> SweepResult:  # fmt: skip
    """Run the flow in this process, with live progress.

    Args:
        parallel: trials at a time, in processes of their own.
        gate: offer the winner to the promotion gate, where the pipeline has one.
        ray: address of the Ray cluster that trials run on, see `RayTrials`; None = this machine.
        resources: of a trial on the cluster; memory as counted.
    Raises: SettingsError before anything runs; FolderBusy; Stopped with the state saved.
    """
    base = plan.base()
    plan.check_settings()
    place: LocalTrials | RayTrials = LocalTrials(parallel)
    if ray is not None:
        place = RayTrials(ray, parallel, resources or TrialResources())
    place.open(base)
    token = _asked.set(_SweepJob(plan, base, parallel, gate, place))
    try:
        with watched(base, quiet=quiet):
            result: SweepResult = outlived.run(lambda: sweep(base.name, [label_of(_shown(plan))]))
    finally:
        _asked.reset(token)
        place.close()
    return result


def _shown(plan: SweepPlan) -> dict[str, str]:
    return {one.key: ",".join(one.choices) or f"{one.low:g}..{one.high:g}" for one in plan.dimensions}


@flow(
    name="sweep",
    flow_run_name="{pipeline} · sweep",
    validate_parameters=False,
    persist_result=False,
    on_failure=[name_stopped],
    on_crashed=[name_stopped],
)
def sweep(pipeline: str, varied: list[str]) -> SweepResult:
    """Run trials of one pipeline that differ in some settings; called by `run_sweep`."""
    asked = _asked.get()
    assert asked is not None, f"a sweep of {pipeline} over {varied} is started by run_sweep"
    with outlived.noted() as outcome:
        outcome.result = _Sweep(asked).run()
    result: SweepResult = outcome.result
    return result


class _Sweep:
    """One sweep under way."""

    def __init__(self, asked: _SweepJob) -> None:
        self.plan, self.base, self.parallel, self.gate = asked.plan, asked.base, asked.parallel, asked.gate
        self.place = asked.place
        self.home = self.plan.home(self.base)
        self.record = SweepRecord(self.home)
        self.tracking = Tracking(self.base.tracking.uri, Path(self.base.output), self.base.experiment)
        self.stop = threading.Event()
        self.peak = trial_bytes(self.base)
        self.workers = [self._worker(index) for index in range(self.parallel)]
        self.errors: list[BaseException] = []
        self.running: dict[int, str] = {}  # lane -> what it does
        self.shown: tuple[int, int, str] | None = None  # on the terminal

    def run(self) -> SweepResult:
        """Everything in its order."""
        pipeline_home = self.home.parent.parent
        with FolderLock(pipeline_home / ".lock", wait_s=self.base.run.wait_seconds):
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            known = self.record.open({"started": started, "varied": _shown(self.plan), "threads": self._threads()})
            if known:
                done = len(self.record.outcomes)
                say(f"going on with the sweep of {self.record.values['started']}: {done} trials are done")
            close_dead_runs(self.tracking, self.home)
            self.tracking.replay_all(self.home)
            if self.base.model.path is not None:  # before trials would look for it side by side
                self.tracking.resolve_model(self.base.model.path, pipeline_home / "base_models")
            run = self._open_run()
            try:
                result, winner = self._conduct(run)
            except BaseException as error:
                run.close("KILLED" if isinstance(error, Stopped | KeyboardInterrupt | SystemExit) else "FAILED")
                raise
            run.close("FINISHED")
            self.tracking.replay_all(self.home)
        if winner is None or not self.gate or self.base.stages.promote is None:
            return result
        return self._offer(result, winner)

    def _threads(self) -> int | None:
        """Threads of a trial; noted with the sweep, as sums depend on them."""
        return self.place.threads if self.base.threads is None else None

    def _open_run(self) -> RunTracker:
        """The sweep's run in the tracking store, above those of its trials."""
        name = f"{self.base.name} · sweep {self.record.values['started']}"
        run = self.tracking.start_run(
            name, self.home, tags={"kind": "sweep", "pipeline": self.base.name, "sweep": self.home.name},
            params={"varied": _shown(self.plan), "method": self.plan.method, "metric": self.plan.metric},
            description="The sweep is running; its result will stand here.",
        )  # fmt: skip
        self.record.note(run_id=run.run_id)
        return run

    # -- trials -------------------------------------------------------------------------------------------------

    def _conduct(self, run: RunTracker) -> tuple[SweepResult, PipelineSettings | None]:
        options = {"trials": self.plan.trials, "seed": self.base.seed, "minimize": self.plan.minimize}
        search = make_search(self.plan.method, self.plan.dimensions, self.record.asked(self.plan.seeds), options)
        schedule = Schedule(self.plan, self.record, search, self.stop, self._told)
        self._run_lanes(schedule)
        choice, winner = choose(self.plan, self.base, self.record, self._job, self.workers[0])
        rows = rows_of(self.record, self.plan, choice)
        write_files(self.record, self.plan, rows, choice)
        verdict = choice.sentence(label_of(choice.params)) if choice is not None else "no configuration has a result"
        self._publish(run, rows, choice, verdict)
        files = "\n".join(f"{name:<14}{self.home / name}" for name in FILES)
        page = self.tracking.run_url(run.run_id or "")
        text = f"{table(rows, self.plan)}\n{verdict}\n\n{files}" + (f"\nMLflow run    {page}" if page else "")
        return SweepResult(rows, choice, text), winner

    def _run_lanes(self, schedule: Schedule) -> None:
        lanes = []
        for index in range(self.parallel):
            context = contextvars.copy_context()  # Prefect's: a trial is a task of this flow run
            lanes.append(threading.Thread(target=context.run, args=(self._lane, schedule, index), name=f"lane-{index}"))
        for lane in lanes:
            lane.start()
        try:
            while any(lane.is_alive() for lane in lanes):
                for lane in lanes:
                    lane.join(_LOOK_SECONDS)
                if stopping.asked.is_set():
                    self._stop_all()
                self._show(schedule)
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
            worker.ask_to_stop()

    def _lane(self, schedule: Schedule, index: int) -> None:
        """Run trials one after the other in one worker process."""
        try:
            while (unit := schedule.next()) is not None:
                if not self._has_memory(schedule, index):
                    schedule.leave(unit)
                    return
                self._run_unit(schedule, unit, index)
        except BaseException as error:
            self.errors.append(error)
            self._stop_all()
        finally:
            self.workers[index].close()

    def _has_memory(self, schedule: Schedule, index: int) -> bool:
        """Wait until another trial fits; False = the sweep stops. One alone always begins."""
        said = False
        while self.place.shares_memory and index > 0 and schedule.running > 1 and free_memory() < self.peak:
            if not said:
                logger.warning(
                    "a trial waits: %.1f GiB are free, it takes %.1f", free_memory() / 2**30, self.peak / 2**30
                )
            said = True
            if self.stop.wait(_MEMORY_SECONDS):
                return False
        return True

    def _run_unit(self, schedule: Schedule, unit: Unit, index: int) -> None:
        label = f"{label_of(unit.params)}, seed {unit.seed}"
        tags = {f"sweep.{key}"[:250]: value[:250] for key, value in unit.params.items()}

        def progress(stage: str, done: int, total: int, message: str) -> None:
            self.running[index] = f"{label_of(unit.params)} s{unit.seed} {stage} {done}/{total}"

        @task(name="trial", task_run_name=label, cache_policy=NO_CACHE, persist_result=False)
        def trial() -> dict[str, Any]:
            for left in reversed(range(_NODES_LOST)):  # the job anew each time: it knows the rungs that were reached
                job = self._job(unit.number, unit.seed, unit.settings, tags=tags)
                try:
                    return self.workers[index].run(job, lambda value: schedule.goes_on(unit, value), progress)
                except NodeLost as lost:
                    what = "it goes on elsewhere, from its checkpoints" if left else "it is given up"
                    say(f"{label}: the node of the trial was lost ({lost}); {what}")
            raise WorkerFailed(f"the node of the trial was lost {_NODES_LOST} times")

        try:
            fields = trial()
        except WorkerFailed as error:
            fields = {"status": "failed", "why": str(error)}
        except BaseException:
            schedule.leave(unit)
            raise
        finally:
            self.running.pop(index, None)
        self.peak = max(self.peak, int(fields.get("peak_bytes", 0)))
        rungs = self.record.rungs(unit.number, unit.seed)
        schedule.done(
            TrialOutcome(number=unit.number, seed=unit.seed, params=unit.params, **{**fields, "rungs": rungs})
        )

    def _worker(self, index: int) -> Worker:
        """The worker of a lane."""
        log = self.home / f"worker-{index}.log"
        return Worker(log, lambda: self.place.start(index, self.home, log, self.stop), self.stop)

    def _job(
        self, number: int, seed: int, settings: PipelineSettings, *, tags: Mapping[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        """A trial for the process that runs it."""
        if settings.threads is None and (threads := self.record.values.get("threads")):
            settings = dataclasses.replace(settings, threads=threads)
        halved = self.plan.method == "halving" and seed == 0
        job = TrialJob(
            home=str(self.record.folder(number, seed)),
            name=f"{self.base.name} · trial {number}, seed {seed}",
            settings=resolve(settings),
            metric=self.plan.metric,
            rungs=len(self.record.rungs(number, seed)) if halved else None,
            parent_folder=str(self.home),
            tags={"sweep": self.home.name, "sweep.trial": str(number), "sweep.seed": str(seed), **(tags or {})},
            models={},
        )
        return {**vars(job), **more}

    # -- what people see ----------------------------------------------------------------------------------------

    def _told(self, outcome: TrialOutcome) -> None:
        say(outcome_line(outcome, self.plan))

    def _show(self, schedule: Schedule) -> None:
        total = self.plan.seeds * max(len(self.record.params), self._configurations())
        now = (len(self.record.outcomes), total, "; ".join(dict(self.running).values())[:100])
        show: Callable[..., None] | None = display_progress()
        if show is not None and now != self.shown:
            self.shown = now
            show("sweep", *now)

    def _configurations(self) -> int:
        return len(grid(self.plan.dimensions)) if self.plan.method == "grid" else self.plan.trials

    def _publish(self, run: RunTracker, rows: list[dict[str, Any]], choice: SweepChoice | None, verdict: str) -> None:
        run.set_description(markdown(rows, self.plan, verdict))
        run.set_tag("result", result_text(verdict))
        for name in FILES:
            run.log_artifact(self.home / name, "sweep")
        metrics = {"sweep/trials": float(len(self.record.outcomes))}
        if choice is not None:
            metrics["sweep/chosen_by"] = choice.chosen_by
            if (found := choice.interval) is not None:
                metrics["sweep/fresh"] = found.rate
        run.log_metrics(metrics, 0)

    def _offer(self, result: SweepResult, winner: PipelineSettings) -> SweepResult:
        """The winner's own run of the whole pipeline: training is cached, the gate plays the fresh episodes."""
        say("the winner goes to the promotion gate")
        tags = {"sweep": self.home.name, "sweep.winner": label_of(result.choice.params)[:250] if result.choice else ""}
        pipeline = run_with_approval(
            winner, lambda: execute(winner, tags=tags, on_drift="beside"), say
        )  # fmt: skip
        return dataclasses.replace(result, pipeline=pipeline)
