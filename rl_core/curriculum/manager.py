"""Curriculum: stages of level mixes with exit conditions, and rollback when performance is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rl_core.curriculum.conditions import ConditionStatus, check_condition, metric_name
from rl_core.curriculum.own_statistic import check_function
from rl_core.curriculum.rollback import RollbackWatch
from rl_core.errors import ResumeRefused, SettingsError
from rl_core.metrics import MetricHistory
from rl_core.settings import CurriculumStage, ExitCondition, RollbackSettings

if TYPE_CHECKING:
    import numpy as np

__all__ = ["END", "CurriculumManager"]

logger = logging.getLogger(__name__)

END = "(end)"  # target of leaving the last stage

# advance: to the next stage; rollback: a stage is restarted from its entry; after the last rollback allowed, another
# drop is either ignored from then on (unwatched) or ends the curriculum (stop).
Kind = Literal["advance", "rollback", "unwatched", "stop"]


class CurriculumManager:
    """Draws levels, evaluates the exit conditions and rollback of the current stage, and moves between stages.

    A stage is left when all (or any) of its exit conditions hold, not before min_iterations, and at max_iterations
    whatever the metrics say. Windows are filled within the stage: its history starts empty. Leaving the last stage, or
    `early_stop` holding there, finishes the curriculum (`finished`). With a rollback configured, a stage whose watched
    metric dropped too far is restarted from its entry, or from that of the stage before it (see `rollback`).
    """

    def __init__(
        self,
        stages: Sequence[CurriculumStage],
        levels: Sequence[str],
        *,
        early_stop: ExitCondition | None = None,
        rollback: RollbackSettings | None = None,
    ) -> None:
        """`levels`: those of the environment; without stages, they form one stage with equal weights.

        rollback: of the stages that have none of their own.
        """
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
        self.finished: str | None = None  # reason for the end; None = not finished
        self.history: list[dict[str, Any]] = []  # moves: kind, iteration, from, to, why, metrics
        self.on_move: Callable[[list[dict[str, Any]]], None] | None = None  # called with the history after each move
        self.watch = RollbackWatch([stage.rollback or rollback for stage in self.stages])
        self._streaks: list[int] = []  # consecutive iterations in which each current condition held
        conditions = [condition for stage in self.stages for condition in stage.exit_conditions]
        conditions += [early_stop] if early_stop else []
        for condition in conditions:
            check_function(condition)
        windows = [condition.window for condition in conditions]
        self._window = MetricHistory(limit=max([*windows, self.watch.longest_window]))

    @property
    def stage(self) -> CurriculumStage:
        """The current stage."""
        return self.stages[self.index]

    @property
    def is_last(self) -> bool:
        """True = no stage follows."""
        return self.index == len(self.stages) - 1

    def draw_level(self, rng: np.random.Generator) -> str:
        """One level, with the probabilities of the current stage's mix."""
        import numpy as np  # here, as a check of a configuration needs none of it

        names = list(self.stage.levels)
        weights = np.array([self.stage.levels[name] for name in names], dtype=np.float64)
        return names[int(rng.choice(len(names), p=weights / weights.sum()))]

    @property
    def restorable(self) -> set[int]:
        """Stages whose snapshots a rollback may need."""
        return self.watch.reachable(self.index)

    def observe(self, metrics: Mapping[str, float], *, known: Iterable[str] = ()) -> int | None:
        """Add one iteration's metrics; advance when the stage is done, roll back when performance dropped.

        Args:
            known: metrics that other iterations have (a level that was not drawn in this one).
        Returns: the index of the stage whose entry has to be restored now; None = none.
        Raises: SettingsError when a condition names a metric that does not exist.
        """
        if self.finished is not None:
            return None
        self.iteration += 1
        self.stage_iterations += 1
        self._window.observe(metrics, self.iteration)
        if self.watch.cooldown:
            self.watch.cooldown -= 1
            return None
        names = [*metrics, *known]
        target = self._check_rollback(names)
        if target is None:
            self._advance(metrics, names)
        return target

    def metrics(self) -> dict[str, float]:
        """Progress of the curriculum as `curriculum/...`; averages are those that the next move depends on."""
        values = {
            "curriculum/stage": float(self.index),
            "curriculum/stage_iterations": float(self.stage_iterations),
            "curriculum/moves": float(len(self.history)),
        }
        statuses = [check_condition(condition, self._window, [condition.metric]) for condition in self._conditions()]
        if statuses:
            values["curriculum/window_filled"] = min(status.filled for status in statuses)
        for status in statuses:
            if status.value is not None:
                values[f"curriculum/{status.metric}"] = status.value
        return values | self.watch.metrics(self.index, self._window)

    def history_json(self) -> list[dict[str, Any]]:
        """Moves and rollbacks: kind, iteration, source and target stage, reason, and the metrics at that moment."""
        return [dict(move) for move in self.history]

    def state_dict(self) -> dict[str, Any]:
        """State that later moves depend on."""
        return {
            "stages": [stage.name for stage in self.stages],
            "index": self.index,
            "iteration": self.iteration,
            "stage_iterations": self.stage_iterations,
            "finished": self.finished,
            "history": self.history_json(),
            "window": self._window.state_dict(),
            "streaks": list(self._streaks),
            "rollback": self.watch.state_dict(),
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
        self._streaks = [int(streak) for streak in state["streaks"]]
        self.watch.load_state_dict(state["rollback"])

    def _conditions(self) -> list[ExitCondition]:
        """Exit conditions of the current stage; in the last one followed by early_stop."""
        last = [self.early_stop] if self.is_last and self.early_stop is not None else []
        return [*self.stage.exit_conditions, *last]

    def _check_rollback(self, names: Sequence[str]) -> int | None:
        """Index of the stage to restore if the rollback watch decides so; None = none."""
        decision = self.watch.check(self.index, self._window, names)
        if decision is None:
            return None
        here = self.stage.name
        if decision.action == "unwatched":
            self._record("unwatched", here, here, decision.why, decision.metrics)
            return None
        if decision.action == "stop":
            self._record("stop", here, END, decision.why, decision.metrics)
            self.finished = f"curriculum stopped in stage '{here}': {decision.why}"
            return decision.target
        self._record("rollback", here, self.stages[decision.target].name, decision.why, decision.metrics)
        self.index = decision.target
        self._restart_windows()
        return decision.target

    def _advance(self, metrics: Mapping[str, float], names: Sequence[str]) -> None:
        """Leave the stage when its exit conditions hold."""
        statuses = self._condition_statuses(metrics, names)
        count = len(self.stage.exit_conditions)
        why = self._exit_reason(statuses[:count])
        if why is not None:
            statuses = statuses[:count]
        elif len(statuses) > count and statuses[-1].is_met:
            statuses, why = statuses[-1:], f"early_stop: {statuses[-1]}"
        if why is not None:
            self._leave_stage(why, statuses)

    def _condition_statuses(self, metrics: Mapping[str, float], names: Sequence[str]) -> list[ConditionStatus]:
        """Status of every condition. A streak pauses while its metric is not observed (a level not drawn)."""
        conditions = self._conditions()
        streaks = self._streaks or [0] * len(conditions)
        statuses = [
            check_condition(condition, self._window, names, streak=streak - _is_missing(condition, metrics))
            for condition, streak in zip(conditions, streaks, strict=True)
        ]
        self._streaks = [status.streak for status in statuses]
        return statuses

    def _exit_reason(self, statuses: Sequence[ConditionStatus]) -> str | None:
        stage = self.stage
        if stage.max_iterations is not None and self.stage_iterations >= stage.max_iterations:
            return f"max_iterations: {stage.max_iterations} reached"
        if not statuses or self.stage_iterations < stage.min_iterations:
            return None
        met = [status for status in statuses if status.is_met]
        enough = len(met) == len(statuses) if stage.require == "all" else bool(met)
        return "; ".join(str(status) for status in met) if enough else None

    def _leave_stage(self, why: str, statuses: Sequence[ConditionStatus]) -> None:
        values = {status.label: status.value for status in statuses}
        target = END if self.is_last else self.stages[self.index + 1].name
        self._record("advance", self.stage.name, target, why, values)
        if self.is_last:
            self.finished = f"curriculum finished: {why}"
            return
        self.index += 1
        self.watch.enter(self.index, self._window)
        self._restart_windows()

    def _restart_windows(self) -> None:
        """Windows and patience start empty in every stage."""
        self.stage_iterations = 0
        self._streaks = []
        self._window.clear()

    def _record(self, kind: Kind, source: str, target: str, why: str, values: Mapping[str, float | None]) -> None:
        move = {"kind": kind, "iteration": self.iteration, "from": source, "to": target, "why": why}
        self.history.append({**move, "metrics": dict(values)})
        log = logger.info if kind == "advance" else logger.warning
        log("curriculum: %s: %s -> %s after iteration %d (%s)", kind, source, target, self.iteration, why)
        if self.on_move is not None:
            self.on_move(self.history_json())


def _is_missing(condition: ExitCondition, metrics: Mapping[str, float]) -> bool:
    """True = the iteration did not observe the condition's metric."""
    return condition.function is None and metric_name(condition.metric) not in metrics
