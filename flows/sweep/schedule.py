"""Order of the trials of a sweep: which comes next, shared by the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from flows.sweep.plan import SweepPlan
from flows.sweep.record import SweepRecord, TrialOutcome
from flows.sweep.search import Search
from flows.sweep.space import Params
from rl_core.errors import SettingsError
from tasks.config import PipelineSettings

__all__ = ["Schedule", "Unit"]


@dataclass(frozen=True)
class Unit:
    """One trial that is to be run."""

    number: int
    seed: int
    params: Params
    settings: PipelineSettings


class Schedule:
    """Hands out trials; those of one configuration follow each other, and successive halving decides by the first."""

    def __init__(
        self, plan: SweepPlan, record: SweepRecord, search: Search, stop: threading.Event,
        tell: Callable[[TrialOutcome], None],
    ) -> None:  # fmt: skip
        """tell: is told of every end of a trial."""
        self._plan, self._record, self._search, self._stop, self._tell = plan, record, search, stop, tell
        self._changed = threading.Condition()
        self._running: set[tuple[int, int]] = set()
        self._told: set[int] = {
            number for number, asked in enumerate(record.asked(plan.seeds)) if asked.is_over
        }  # configurations that the search knows the end of
        self.is_exhausted = False  # the search has no other configuration

    @property
    def running(self) -> int:
        """Trials that run now."""
        return len(self._running)

    def next(self) -> Unit | None:
        """The next trial; None = all are done, or the sweep stops. Waits while it depends on one that runs."""
        with self._changed:
            while not self._stop.is_set():
                unit = self._begun() or self._new()
                if unit is not None:
                    return unit
                if not self._running:
                    return None
                self._changed.wait(0.5)
            return None

    def _begun(self) -> Unit | None:
        """A trial of a configuration that was asked for before."""
        for number, params in enumerate(self._record.params):
            for seed in range(self._plan.seeds):
                if (number, seed) in self._record.outcomes or (number, seed) in self._running:
                    continue
                if not self._may_begin(number, seed):
                    break
                unit = self._unit(number, seed, params)
                if unit is not None:
                    return unit
        return None

    def _may_begin(self, number: int, seed: int) -> bool:
        """False for a further seed of a configuration that successive halving gave up, or has yet to decide about."""
        if self._plan.method != "halving" or seed == 0:
            return True
        first = self._record.outcomes.get((number, 0))
        return first is not None and first.status == "finished"

    def _new(self) -> Unit | None:
        while not self.is_exhausted:
            params = self._search.ask()
            if params is None:
                self.is_exhausted = True
                return None
            number = self._record.add(params)
            unit = self._unit(number, 0, params)
            if unit is not None:
                return unit
        return None

    def _unit(self, number: int, seed: int, params: Params) -> Unit | None:
        """The trial, now running; None where its settings are wrong, which is its outcome."""
        try:
            settings = self._plan.settings_of(params, seed)
        except SettingsError as error:
            self._end(TrialOutcome(number=number, seed=seed, params=params, status="failed", why=str(error)))
            return None
        self._running.add((number, seed))
        return Unit(number, seed, params, settings)

    def goes_on(self, unit: Unit, value: float) -> bool:
        """The search's decision at a rung."""
        with self._changed:
            rung = len(self._record.rungs(unit.number, unit.seed))
            self._record.note_rung(unit.number, unit.seed, value)
            return self._search.goes_on(unit.number, rung, value)

    def done(self, outcome: TrialOutcome) -> None:
        """Note the end of a trial."""
        with self._changed:
            self._running.discard((outcome.number, outcome.seed))
            self._end(outcome)
            self._changed.notify_all()

    def leave(self, unit: Unit) -> None:
        """Note that a trial was stopped; it goes on when the sweep does."""
        with self._changed:
            self._running.discard((unit.number, unit.seed))
            self._changed.notify_all()

    def _end(self, outcome: TrialOutcome) -> None:
        self._record.tell(outcome)
        self._tell(outcome)
        asked = self._record.asked(self._plan.seeds)[outcome.number]
        if asked.is_over and outcome.number not in self._told:
            self._told.add(outcome.number)
            value = sum(asked.values) / len(asked.values) if asked.values else None
            self._search.tell(outcome.number, value, pruned=asked.is_pruned)
