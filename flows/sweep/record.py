"""The folder of a sweep: what was asked for, and what came of it.

<output>/<pipeline>/sweeps/<sweep>/
    sweep.json                 the plan for people, the configurations asked for in their order, threads of a trial
    trials/<number>-s<seed>/   home of one trial: lock, run.json, runs/ (tasks/pipeline/run.py)
        rungs.json             metric at each rung of successive halving that it reached
        trial.json             its outcome; a trial that has one is not run again, unless it failed
    choice.json, sweep.csv, results.json, sweep.png
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.sweep.search import Asked
from flows.sweep.space import Params
from rl_core.errors import CheckpointError
from rl_core.storage.faults import fault
from rl_core.storage.single_files import make_folder, write_json_atomic

__all__ = ["TrialOutcome", "SweepRecord"]

SWEEP, TRIAL, RUNGS = "sweep.json", "trial.json", "rungs.json"


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
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)  # folder, key, cached, seconds by stage
    policy: str = ""  # stage of the newest policy
    model: str = ""  # its folder
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    run_id: str = ""

    @property
    def name(self) -> str:
        """Name of the trial's folder."""
        return trial_name(self.number, self.seed)


def trial_name(number: int, seed: int) -> str:
    """Name of a trial's folder."""
    return f"{number:04d}-s{seed}"


class SweepRecord:
    """Reads and writes a sweep's folder; the sweep holds the pipeline's lock."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.values: dict[str, Any] = {"params": []}
        self.outcomes: dict[tuple[int, int], TrialOutcome] = {}

    def open(self, about: dict[str, Any]) -> bool:
        """Read what is there, and note the plan; returns True for a sweep that goes on.

        about: for people, and what has to stay as it was: what the folder says already counts.
        Raises: CheckpointError where the folder holds something else.
        """
        make_folder(self.home / "trials")
        path = self.home / SWEEP
        known = path.is_file()
        if known:
            try:
                self.values = json.loads(path.read_text())
                assert isinstance(self.values["params"], list)
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                raise CheckpointError(f"{path}: is no record of a sweep; remove {self.home} to begin anew") from error
            self._read_outcomes()
        self.values = {**about, **self.values}
        self._write()
        fault("sweep.begun")
        return known

    def _read_outcomes(self) -> None:
        names = {field.name for field in dataclasses.fields(TrialOutcome)}
        for path in sorted((self.home / "trials").glob(f"*/{TRIAL}")):
            try:
                row = json.loads(path.read_text())
                outcome = TrialOutcome(**{name: value for name, value in row.items() if name in names})
            except (OSError, ValueError, TypeError):
                continue  # it runs again, from finished stages
            if outcome.status != "failed" and outcome.params == self._params(outcome.number):
                self.outcomes[outcome.number, outcome.seed] = outcome

    def _params(self, number: int) -> Params | None:
        return self.params[number] if number < len(self.params) else None

    @property
    def params(self) -> list[Params]:
        """Configurations in the order in which they were asked for."""
        found: list[Params] = self.values["params"]
        return found

    def asked(self, seeds: int) -> list[Asked]:
        """Configurations so far, as a search has to know them. seeds: trials of each."""
        return [self._asked(number, params, seeds) for number, params in enumerate(self.params)]

    def _asked(self, number: int, params: Params, seeds: int) -> Asked:
        of_it = [self.outcomes[number, seed] for seed in range(seeds) if (number, seed) in self.outcomes]
        pruned = any(outcome.status == "pruned" for outcome in of_it)
        values = [outcome.value for outcome in of_it if outcome.value is not None and outcome.status == "finished"]
        return Asked(params, values, self.rungs(number, 0), pruned or len(of_it) == seeds, pruned)

    def add(self, params: Params) -> int:
        """Note a configuration before any trial of it begins; returns its number."""
        self.params.append(params)
        self._write()
        fault("sweep.asked")
        return len(self.params) - 1

    def tell(self, outcome: TrialOutcome) -> None:
        """Note the end of a trial."""
        folder = make_folder(self.folder(outcome.number, outcome.seed))
        write_json_atomic(folder / TRIAL, dataclasses.asdict(outcome))
        self.outcomes[outcome.number, outcome.seed] = outcome
        fault("sweep.told")

    def folder(self, number: int, seed: int) -> Path:
        """Home of one trial."""
        return self.home / "trials" / trial_name(number, seed)

    def rungs(self, number: int, seed: int) -> list[float]:
        """Metric at each rung that a trial has reached."""
        try:
            found = json.loads((self.folder(number, seed) / RUNGS).read_text())
        except (OSError, ValueError):
            return []
        return [float(value) for value in found] if isinstance(found, list) else []

    def note_rung(self, number: int, seed: int, value: float) -> None:
        """Note the metric of the next rung, before anything is decided by it."""
        values = [*self.rungs(number, seed), value]
        write_json_atomic(make_folder(self.folder(number, seed)) / RUNGS, values)
        fault("sweep.rung")

    def note(self, **values: Any) -> None:
        """Note facts of the whole sweep."""
        self.values |= values
        self._write()

    def _write(self) -> None:
        write_json_atomic(self.home / SWEEP, self.values)
