"""The folder of a sweep: what was asked for, and what came of it.

<output>/<pipeline>/sweeps/<sweep>/
    sweep.json                 the plan for people, the configurations asked for in their order, threads of a trial
    trials/<number>-s<seed>/   home of one trial: lock, run.json, runs/ (tasks/pipeline/pipeline_run.py)
        rungs.json             metric at each rung of successive halving that it reached
        trial.json             its outcome; a trial that has one is not run again, unless it failed
    choice.json, sweep.csv, results.json, sweep.png

Order of the trials of a sweep: which comes next, shared by the threads that run them.
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

SWEEP_FILE, TRIAL_FILE, RUNGS_FILE = "sweep.json", "trial.json", "rungs.json"


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The end of one trial."""

    number: int  # of the configuration, from 0
    seed: int  # from 0
    params: Params
    status: Literal["finished", "pruned", "failed"]
    value: float | None = None  # of the metric; None = it has none
    why: str = ""  # it failed
    metrics: dict[str, float] = field(default_factory=dict)
    rungs: list[float] = field(default_factory=list)
    stages: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # folder, key, cached, seconds by stage
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
    """Name of a trial's folder."""
    return f"{number:04d}-s{seed}"


class SweepRecord:
    """Reads and writes a sweep's folder; the sweep holds the pipeline's lock."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.values: dict[str, Any] = {"params": []}
        self.outcomes: dict[tuple[int, int], TrialOutcome] = {}

    def open_folder(self, description: dict[str, Any]) -> bool:
        """Read what is there, and note the plan; returns True for a sweep that goes on.

        about: for people, and what has to stay as it was: what the folder says already counts.
        Raises: CheckpointError where the folder holds something else.
        """
        make_folder(self.home / "trials")
        path = self.home / SWEEP_FILE
        known = path.is_file()
        if known:
            try:
                self.values = json.loads(path.read_text())
                assert isinstance(self.values["params"], list)
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                raise CheckpointError(
                    f"{path}: is no record of a sweep; remove {self.home} to begin anew"
                ) from error
            self._read_outcomes()
        self.values = {**description, **self.values}
        self._write_values()
        inject_fault("sweep.begun")
        return known

    def _read_outcomes(self) -> None:
        names = {field.name for field in dataclasses.fields(TrialOutcome)}
        for path in sorted((self.home / "trials").glob(f"*/{TRIAL_FILE}")):
            try:
                row = json.loads(path.read_text())
                outcome = TrialOutcome(
                    **{name: value for name, value in row.items() if name in names}
                )
            except (OSError, ValueError, TypeError):
                continue  # it runs again, from finished stages
            if outcome.status != "failed" and outcome.params == self._find_params(outcome.number):
                self.outcomes[outcome.number, outcome.seed] = outcome

    def _find_params(self, number: int) -> Params | None:
        return self.params[number] if number < len(self.params) else None

    @property
    def params(self) -> list[Params]:
        """Configurations in the order in which they were asked for."""
        found: list[Params] = self.values["params"]
        return found

    def list_configurations(self, seeds: int) -> list[PriorConfiguration]:
        """Configurations so far, as a search has to know them. seeds: trials of each."""
        return [
            self._build_configuration(number, params, seeds)
            for number, params in enumerate(self.params)
        ]

    def _build_configuration(self, number: int, params: Params, seeds: int) -> PriorConfiguration:
        of_it = [
            self.outcomes[number, seed] for seed in range(seeds) if (number, seed) in self.outcomes
        ]
        pruned = any(outcome.status == "pruned" for outcome in of_it)
        values = [
            outcome.value
            for outcome in of_it
            if outcome.value is not None and outcome.status == "finished"
        ]
        return PriorConfiguration(
            params, values, self.read_rungs(number, 0), pruned or len(of_it) == seeds, pruned
        )

    def add_configuration(self, params: Params) -> int:
        """Note a configuration before any trial of it begins; returns its number."""
        self.params.append(params)
        self._write_values()
        inject_fault("sweep.asked")
        return len(self.params) - 1

    def record_outcome(self, outcome: TrialOutcome) -> None:
        """Note the end of a trial."""
        folder = make_folder(self.locate_trial_folder(outcome.number, outcome.seed))
        write_json_atomic(folder / TRIAL_FILE, dataclasses.asdict(outcome))
        self.outcomes[outcome.number, outcome.seed] = outcome
        inject_fault("sweep.told")

    def locate_trial_folder(self, number: int, seed: int) -> Path:
        """Home of one trial."""
        return self.home / "trials" / format_trial_name(number, seed)

    def read_rungs(self, number: int, seed: int) -> list[float]:
        """Metric at each rung that a trial has reached."""
        try:
            found = json.loads((self.locate_trial_folder(number, seed) / RUNGS_FILE).read_text())
        except (OSError, ValueError):
            return []
        return [float(value) for value in found] if isinstance(found, list) else []

    def record_rung(self, number: int, seed: int, value: float) -> None:
        """Note the metric of the next rung, before anything is decided by it."""
        values = [*self.read_rungs(number, seed), value]
        write_json_atomic(make_folder(self.locate_trial_folder(number, seed)) / RUNGS_FILE, values)
        inject_fault("sweep.rung")

    def update_values(self, **values: Any) -> None:
        """Note facts of the whole sweep."""
        self.values |= values
        self._write_values()

    def _write_values(self) -> None:
        write_json_atomic(self.home / SWEEP_FILE, self.values)


@dataclass(frozen=True)
class ScheduledTrial:
    """One trial that is to be run."""

    number: int
    seed: int
    params: Params
    settings: PipelineSettings


class TrialSchedule:
    """Hands out trials; those of one configuration follow each other, and successive halving decides by the first."""

    def __init__(
        self,
        plan: SweepPlan,
        record: SweepRecord,
        search: ConfigurationSearch,
        stop: threading.Event,
        on_outcome: Callable[[TrialOutcome], None],
    ) -> None:
        """tell: is told of every end of a trial."""
        self._plan, self._record, self._search, self._stop, self._on_outcome = (
            plan,
            record,
            search,
            stop,
            on_outcome,
        )
        self._changed = threading.Condition()
        self._running: set[tuple[int, int]] = set()
        self._reported_numbers: set[int] = {
            number
            for number, asked in enumerate(record.list_configurations(plan.seeds))
            if asked.is_finished
        }  # configurations that the search knows the end of
        self.is_exhausted = False  # the search has no other configuration

    @property
    def num_running(self) -> int:
        """Trials that run now."""
        return len(self._running)

    def take_next_trial(self) -> ScheduledTrial | None:
        """The next trial; None = all are done, or the sweep stops. Waits while it depends on one that runs."""
        with self._changed:
            while not self._stop.is_set():
                unit = self._resume_configuration() or self._start_configuration()
                if unit is not None:
                    return unit
                if not self._running:
                    return None
                self._changed.wait(0.5)
            return None

    def _resume_configuration(self) -> ScheduledTrial | None:
        """A trial of a configuration that was asked for before."""
        for number, params in enumerate(self._record.params):
            for seed in range(self._plan.seeds):
                if (number, seed) in self._record.outcomes or (number, seed) in self._running:
                    continue
                if not self._can_begin(number, seed):
                    break
                unit = self._start_trial(number, seed, params)
                if unit is not None:
                    return unit
        return None

    def _can_begin(self, number: int, seed: int) -> bool:
        """False for a further seed of a configuration that successive halving gave up, or has yet to decide about."""
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
            unit = self._start_trial(number, 0, params)
            if unit is not None:
                return unit
        return None

    def _start_trial(self, number: int, seed: int, params: Params) -> ScheduledTrial | None:
        """The trial, now running; None where its settings are wrong, which is its outcome."""
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

    def should_continue(self, unit: ScheduledTrial, value: float) -> bool:
        """The search's decision at a rung."""
        with self._changed:
            rung = len(self._record.read_rungs(unit.number, unit.seed))
            self._record.record_rung(unit.number, unit.seed, value)
            return self._search.should_continue(unit.number, rung, value)

    def finish_trial(self, outcome: TrialOutcome) -> None:
        """Note the end of a trial."""
        with self._changed:
            self._running.discard((outcome.number, outcome.seed))
            self._record_outcome(outcome)
            self._changed.notify_all()

    def release_trial(self, unit: ScheduledTrial) -> None:
        """Note that a trial was stopped; it goes on when the sweep does."""
        with self._changed:
            self._running.discard((unit.number, unit.seed))
            self._changed.notify_all()

    def _record_outcome(self, outcome: TrialOutcome) -> None:
        self._record.record_outcome(outcome)
        self._on_outcome(outcome)
        asked = self._record.list_configurations(self._plan.seeds)[outcome.number]
        if asked.is_finished and outcome.number not in self._reported_numbers:
            self._reported_numbers.add(outcome.number)
            value = sum(asked.values) / len(asked.values) if asked.values else None
            self._search.observe(outcome.number, value, pruned=asked.is_pruned)
