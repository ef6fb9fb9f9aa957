"""Folder of a sweep, and the order of its trials, shared by the threads that run them.

<output>/<pipeline>/sweeps/<sweep>/
    sweep.json                 the plan for people, the requested configurations in order, threads of a trial
    trials/<number>-s<seed>/   home of one trial: lock, run.json, runs/ (tasks/pipeline/pipeline_run.py)
        rungs.json             metric at each rung of successive halving that it reached
        trial.json             its outcome; a trial that has one is not run again, unless it failed
    choice.json, sweep.csv, results.json, sweep.png
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.sweep.plan import SweepPlan
from flows.sweep.search import ConfigurationSearch, Params, PriorConfiguration
from rl_core.errors import CheckpointError, SettingsError
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.faults import inject_fault
from tasks.config import PipelineSettings

SWEEP_FILE = "sweep.json"
TRIAL_FILE = "trial.json"
RUNGS_FILE = "rungs.json"


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """Outcome of one trial."""

    number: int  # of the configuration, from 0
    seed: int  # from 0
    params: Params
    status: Literal["finished", "pruned", "failed"]
    value: float | None = None  # of the metric; None = it has none
    why: str = ""  # reason of a failure
    metrics: dict[str, float] = field(default_factory=dict)
    rungs: list[float] = field(default_factory=list)
    # Folder, key, cached and seconds by stage.
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    policy: str = ""  # stage of the newest policy
    model: str = ""  # its folder
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    run_id: str = ""

    @property
    def name(self) -> str:
        """Name of the trial's folder."""
        return format_trial_name(self.number, self.seed)


def format_trial_name(number: int, seed: int) -> str:
    """Return the name of a trial's folder."""
    return f"{number:04d}-s{seed}"


class SweepRecord:
    """Reader and writer of a sweep's folder; the sweep holds the pipeline's lock."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.values: dict[str, Any] = {"params": []}
        self.outcomes: dict[tuple[int, int], TrialOutcome] = {}

    def open_folder(self, description: dict[str, Any]) -> bool:
        """Read the folder and record the plan; return True for a resumed sweep.

        Args:
            description: facts for people, and facts that must not change; those already in the folder take precedence.
        Raises: CheckpointError if the folder holds something else.
        """
        make_folder(self.home / "trials")
        path = self.home / SWEEP_FILE
        exists = path.is_file()
        if exists:
            try:
                self.values = json.loads(path.read_text())
                assert isinstance(self.values["params"], list)
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                raise CheckpointError(
                    f"{path}: is not the record of a sweep; remove {self.home} to start again"
                ) from error
            self._read_outcomes()
        self.values = {**description, **self.values}
        self._write_values()
        inject_fault("sweep.begun")
        return exists

    def _read_outcomes(self) -> None:
        names = {field.name for field in dataclasses.fields(TrialOutcome)}
        for path in sorted((self.home / "trials").glob(f"*/{TRIAL_FILE}")):
            try:
                row = json.loads(path.read_text())
                fields = {name: value for name, value in row.items() if name in names}
                outcome = TrialOutcome(**fields)
            except (OSError, ValueError, TypeError):
                continue  # it runs again, from finished stages
            if outcome.status != "failed" and outcome.params == self._find_params(outcome.number):
                self.outcomes[outcome.number, outcome.seed] = outcome

    def _find_params(self, number: int) -> Params | None:
        return self.params[number] if number < len(self.params) else None

    @property
    def params(self) -> list[Params]:
        """Configurations in the order in which they were requested."""
        params: list[Params] = self.values["params"]
        return params

    def list_configurations(self, seeds: int) -> list[PriorConfiguration]:
        """Return the configurations so far for a search.

        Args:
            seeds: trials of each.
        """
        return [
            self._build_configuration(number, params, seeds)
            for number, params in enumerate(self.params)
        ]

    def _build_configuration(self, number: int, params: Params, seeds: int) -> PriorConfiguration:
        outcomes = [
            self.outcomes[number, seed] for seed in range(seeds) if (number, seed) in self.outcomes
        ]
        is_pruned = any(outcome.status == "pruned" for outcome in outcomes)
        values = [
            outcome.value
            for outcome in outcomes
            if outcome.value is not None and outcome.status == "finished"
        ]
        is_finished = is_pruned or len(outcomes) == seeds
        return PriorConfiguration(
            params, values, self.read_rungs(number, 0), is_finished, is_pruned
        )

    def add_configuration(self, params: Params) -> int:
        """Record a configuration before any trial of it starts; return its number."""
        self.params.append(params)
        self._write_values()
        inject_fault("sweep.asked")
        return len(self.params) - 1

    def record_outcome(self, outcome: TrialOutcome) -> None:
        """Record the outcome of a trial."""
        folder = make_folder(self.locate_trial_folder(outcome.number, outcome.seed))
        write_json_atomic(folder / TRIAL_FILE, dataclasses.asdict(outcome))
        self.outcomes[outcome.number, outcome.seed] = outcome
        inject_fault("sweep.told")

    def locate_trial_folder(self, number: int, seed: int) -> Path:
        """Return the home of one trial."""
        return self.home / "trials" / format_trial_name(number, seed)

    def read_rungs(self, number: int, seed: int) -> list[float]:
        """Return the metric at each rung that a trial has reached."""
        try:
            values = json.loads((self.locate_trial_folder(number, seed) / RUNGS_FILE).read_text())
        except (OSError, ValueError):
            return []
        return [float(value) for value in values] if isinstance(values, list) else []

    def record_rung(self, number: int, seed: int, value: float) -> None:
        """Record the metric of the next rung, before any decision is based on it."""
        values = [*self.read_rungs(number, seed), value]
        write_json_atomic(make_folder(self.locate_trial_folder(number, seed)) / RUNGS_FILE, values)
        inject_fault("sweep.rung")

    def update_values(self, **values: Any) -> None:
        """Record facts of the whole sweep."""
        self.values |= values
        self._write_values()

    def _write_values(self) -> None:
        write_json_atomic(self.home / SWEEP_FILE, self.values)


@dataclass(frozen=True)
class ScheduledTrial:
    """Trial that is to be run."""

    number: int
    seed: int
    params: Params
    settings: PipelineSettings


class TrialSchedule:
    """Queue of trials. Those of one configuration follow each other, and successive halving decides by the first."""

    def __init__(
        self,
        plan: SweepPlan,
        record: SweepRecord,
        search: ConfigurationSearch,
        stop: threading.Event,
        on_outcome: Callable[[TrialOutcome], None],
    ) -> None:
        """Configure the schedule; `on_outcome` is called with the outcome of every trial."""
        self._plan, self._record, self._search = plan, record, search
        self._stop, self._on_outcome = stop, on_outcome
        self._changed = threading.Condition()
        self._running: set[tuple[int, int]] = set()
        # Configurations whose results the search knows.
        self._reported_numbers: set[int] = {
            number
            for number, configuration in enumerate(record.list_configurations(plan.seeds))
            if configuration.is_finished
        }
        self.is_exhausted = False  # the search has no further configuration

    @property
    def num_running(self) -> int:
        """Number of running trials."""
        return len(self._running)

    def take_next_trial(self) -> ScheduledTrial | None:
        """Return the next trial; None if all are done, or the sweep stops.

        Wait while the next trial depends on a running one.
        """
        with self._changed:
            while not self._stop.is_set():
                trial = self._resume_configuration() or self._start_configuration()
                if trial is not None:
                    return trial
                if not self._running:
                    return None
                self._changed.wait(0.5)
            return None

    def _resume_configuration(self) -> ScheduledTrial | None:
        """Return a trial of a configuration that was requested before."""
        for number, params in enumerate(self._record.params):
            for seed in range(self._plan.seeds):
                if (number, seed) in self._record.outcomes or (number, seed) in self._running:
                    continue
                if not self._can_begin(number, seed):
                    break
                trial = self._start_trial(number, seed, params)
                if trial is not None:
                    return trial
        return None

    def _can_begin(self, number: int, seed: int) -> bool:
        """Return False for a further seed of a configuration that successive halving stopped or has yet to judge."""
        if self._plan.method != "halving" or seed == 0:
            return True
        first = self._record.outcomes.get((number, 0))
        return first is not None and first.status == "finished"

    def _start_configuration(self) -> ScheduledTrial | None:
        while not self.is_exhausted:
            params = self._search.suggest()
            if params is None:
                self.is_exhausted = True
                return None
            number = self._record.add_configuration(params)
            trial = self._start_trial(number, 0, params)
            if trial is not None:
                return trial
        return None

    def _start_trial(self, number: int, seed: int, params: Params) -> ScheduledTrial | None:
        """Return the trial, now running; None if its settings are invalid, which is recorded as its outcome."""
        try:
            settings = self._plan.load_trial_settings(params, seed)
        except SettingsError as error:
            self._record_outcome(
                TrialOutcome(
                    number=number, seed=seed, params=params, status="failed", why=str(error)
                )
            )
            return None
        self._running.add((number, seed))
        return ScheduledTrial(number, seed, params, settings)

    def should_continue(self, trial: ScheduledTrial, value: float) -> bool:
        """Return the search's decision at a rung."""
        with self._changed:
            rung = len(self._record.read_rungs(trial.number, trial.seed))
            self._record.record_rung(trial.number, trial.seed, value)
            return self._search.should_continue(trial.number, rung, value)

    def finish_trial(self, outcome: TrialOutcome) -> None:
        """Record the outcome of a trial."""
        with self._changed:
            self._running.discard((outcome.number, outcome.seed))
            self._record_outcome(outcome)
            self._changed.notify_all()

    def release_trial(self, trial: ScheduledTrial) -> None:
        """Record that a trial was stopped; it resumes with the sweep."""
        with self._changed:
            self._running.discard((trial.number, trial.seed))
            self._changed.notify_all()

    def _record_outcome(self, outcome: TrialOutcome) -> None:
        self._record.record_outcome(outcome)
        self._on_outcome(outcome)
        configuration = self._record.list_configurations(self._plan.seeds)[outcome.number]
        if configuration.is_finished and outcome.number not in self._reported_numbers:
            self._reported_numbers.add(outcome.number)
            value = (
                sum(configuration.values) / len(configuration.values)
                if configuration.values
                else None
            )
            self._search.observe(outcome.number, value, pruned=configuration.is_pruned)
