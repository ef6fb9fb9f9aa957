"""The curriculum: stages of level mixes, left when the policy is ready."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_core.curriculum.conditions import ConditionStatus, check_condition
from rl_core.errors import ResumeRefused, SettingsError
from rl_core.metrics import MetricHistory
from rl_core.settings import CurriculumStage, ExitCondition

__all__ = ["END", "CurriculumManager"]

logger = logging.getLogger(__name__)

END = "(end)"  # where leaving the last stage leads


class CurriculumManager:
    """Draws levels, watches the metrics of the present stage, and moves on.

    A stage is left when all (or any) of its exit conditions hold, not before min_iterations, and at max_iterations
    whatever the metrics say. Windows are filled within the stage: its history starts empty. Leaving the last stage, or
    `early_stop` holding there, finishes the curriculum (`finished`).
    """

    def __init__(
        self, stages: Sequence[CurriculumStage], levels: Sequence[str], *, early_stop: ExitCondition | None = None
    ) -> None:
        """`levels`: those of the environment; without stages, they form one stage with equal weights."""
        self.stages = tuple(stages) or (CurriculumStage(name="all", levels=dict.fromkeys(levels, 1.0)),)
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise SettingsError(f"curriculum: two stages have the same name, in {names}")
        if END in names:
            raise SettingsError(f"curriculum: a stage cannot be named {END}")
        self.early_stop = early_stop
        self.index = 0
        self.iteration = 0  # iterations observed in all
        self.stage_iterations = 0  # of these, in the present stage
        self.finished: str | None = None  # why there is nothing left to practise
        self.history: list[dict[str, Any]] = []  # moves: iteration, from, to, why, metrics
        conditions = [condition for stage in self.stages for condition in stage.exit_conditions]
        windows = [condition.window for condition in [*conditions, *([early_stop] if early_stop else [])]]
        self._window = MetricHistory(limit=max(windows, default=1))

    @property
    def stage(self) -> CurriculumStage:
        """The present stage."""
        return self.stages[self.index]

    @property
    def is_last(self) -> bool:
        """Whether no stage follows."""
        return self.index == len(self.stages) - 1

    def draw_level(self, rng: np.random.Generator) -> str:
        """One level, with the probabilities of the present stage's mix."""
        names = list(self.stage.levels)
        weights = np.array([self.stage.levels[name] for name in names], dtype=np.float64)
        return names[int(rng.choice(len(names), p=weights / weights.sum()))]

    def observe(self, metrics: Mapping[str, float], *, known: Iterable[str] = ()) -> None:
        """Take in one iteration's metrics; move on when the stage is done.

        Args:
            known: metrics that other iterations have (a level that was not drawn in this one).
        Raises: SettingsError when a condition names a metric that does not exist.
        """
        if self.finished is not None:
            return
        self.iteration += 1
        self.stage_iterations += 1
        self._window.observe(metrics, self.iteration)
        names = [*metrics, *known]
        statuses = [check_condition(condition, self._window, names) for condition in self.stage.exit_conditions]
        why = self._why_leave(statuses)
        if why is None and self.is_last and self.early_stop is not None:
            status = check_condition(self.early_stop, self._window, names)
            statuses = [status]
            why = f"early_stop: {status}" if status.holds else None
        if why is not None:
            self._leave(why, statuses)

    def metrics(self) -> dict[str, float]:
        """Where the curriculum stands, named `curriculum/...`; averages are those that the next move depends on."""
        values = {
            "curriculum/stage": float(self.index),
            "curriculum/stage_iterations": float(self.stage_iterations),
            "curriculum/moves": float(len(self.history)),
        }
        conditions = list(self.stage.exit_conditions)
        if self.is_last and self.early_stop is not None:
            conditions.append(self.early_stop)
        statuses = [check_condition(condition, self._window, [condition.metric]) for condition in conditions]
        if statuses:
            values["curriculum/window_filled"] = min(status.filled for status in statuses)
        for status in statuses:
            if status.average is not None:
                values[f"curriculum/average/{status.condition.metric}"] = status.average
        return values

    def history_json(self) -> list[dict[str, Any]]:
        """Every move: at which iteration, from and to which stage, why, and the averages at that moment."""
        return [dict(move) for move in self.history]

    def state_dict(self) -> dict[str, Any]:
        """Everything that later moves depend on."""
        return {
            "stages": [stage.name for stage in self.stages],
            "index": self.index,
            "iteration": self.iteration,
            "stage_iterations": self.stage_iterations,
            "finished": self.finished,
            "history": self.history_json(),
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ResumeRefused when it was saved by another curriculum."""
        names = [stage.name for stage in self.stages]
        if list(state["stages"]) != names:
            raise ResumeRefused(f"curriculum: saved with stages {list(state['stages'])}, now they are {names}")
        self.index = int(state["index"])
        self.iteration = int(state["iteration"])
        self.stage_iterations = int(state["stage_iterations"])
        self.finished = state["finished"]
        self.history = [dict(move) for move in state["history"]]
        self._window.load_state_dict(state["window"])

    def _why_leave(self, statuses: Sequence[ConditionStatus]) -> str | None:
        stage = self.stage
        if stage.max_iterations is not None and self.stage_iterations >= stage.max_iterations:
            return f"max_iterations: {stage.max_iterations} reached"
        if not statuses or self.stage_iterations < stage.min_iterations:
            return None
        holding = [status for status in statuses if status.holds]
        enough = len(holding) == len(statuses) if stage.require == "all" else bool(holding)
        return "; ".join(str(status) for status in holding) if enough else None

    def _leave(self, why: str, statuses: Sequence[ConditionStatus]) -> None:
        source, target = self.stage.name, END if self.is_last else self.stages[self.index + 1].name
        averages = {status.condition.metric: status.average for status in statuses}
        self.history.append(
            {"iteration": self.iteration, "from": source, "to": target, "why": why, "metrics": averages}
        )
        logger.info("curriculum: %s -> %s after iteration %d (%s)", source, target, self.iteration, why)
        if self.is_last:
            self.finished = f"curriculum finished: {why}"
            return
        self.index += 1
        self.stage_iterations = 0
        self._window.clear()
