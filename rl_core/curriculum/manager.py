"""Rollback watch: detects that a metric is worse than its reference level at the entry of a curriculum stage.

Safeguards against oscillation: the change has to exceed a margin for a patience; a restarted stage is compared with the
level of its first entry, not with the dropped one; a rollback is followed by a cool-down; and each stage causes a
bounded number of rollbacks in total, however often it is entered.

Curriculum: stages of level mixes with exit conditions, and rollback when performance is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_core.curriculum.conditions import (
    ConditionStatus,
    check_custom_statistic,
    check_metric,
    evaluate_condition,
    expand_metric_name,
)
from rl_core.errors import ResumeRefused, SettingsError
from rl_core.metric_history import MetricHistory
from rl_core.settings import CurriculumStage, ExitCondition, RollbackSettings

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class RollbackDecision:
    """Reaction to a drop in the current stage."""

    action: Literal["rollback", "unwatched", "stop"]
    target: int  # stage whose entry is restored; for `unwatched` the current one, and nothing is restored
    reason: str
    metrics: dict[str, float]  # the watched metric now, and its level at entry


class RollbackMonitor:
    """Compares one metric of the current stage with its level at entry."""

    def __init__(self, settings: Sequence[RollbackSettings | None]) -> None:
        """`settings`: of each curriculum stage; None = not watched."""
        self.settings = tuple(settings)
        # by stage: reference level at the entry that would be restored
        self.levels: dict[int, float] = {}
        self.rollbacks = [0] * len(self.settings)  # that each stage caused
        self.unwatched: list[int] = []  # stages that continued after their last rollback
        self.below = (
            0  # consecutive iterations in which the current stage was too far below its level
        )
        self.cooldown = 0  # remaining iterations without a check

    @property
    def longest_window(self) -> int:
        """Observations that a history must keep."""
        return max(
            (settings.window for settings in self.settings if settings is not None), default=1
        )

    def find_restorable_stages(self, index: int) -> set[int]:
        """Stages whose entry may still have to be restored, seen from the stage at `index`."""
        own, following = (
            self.settings[index],
            self.settings[index + 1] if index + 1 < len(self.settings) else None,
        )
        is_needed = own is not None and (own.max_rollbacks > 0 or own.on_exhausted == "stop")
        places = {index} if is_needed or _can_restore_previous(following) else set()
        while index > 0 and _can_restore_previous(self.settings[index]):
            index -= 1
            places.add(index)
        return places

    def enter_stage(self, index: int, before: MetricHistory) -> None:
        """Enter a later stage, with a new reference level. `before`: the history of the stage that was left."""
        self.below = 0
        self.levels.pop(index, None)
        settings = self.settings[index]
        if settings is None or settings.level != "before":
            return
        name = expand_metric_name(settings.metric)
        if before.is_full(name, settings.window):
            level = before.compute_mean(name, settings.window)
            assert level is not None
            self.levels[index] = level

    def check_iteration(
        self, index: int, history: MetricHistory, known: Iterable[str] = ()
    ) -> RollbackDecision | None:
        """Check one iteration of the stage at `index`; None = no drop.

        Args:
            history: of this stage since it was entered or restarted.
        Raises: SettingsError when the watched metric does not exist.
        """
        settings = self.settings[index]
        if settings is None or index in self.unwatched:
            return None
        name = check_metric(settings.metric, history, known)
        value = history.compute_mean(name, settings.window)
        if value is None or not history.is_full(name, settings.window):
            return None
        level = self.levels.setdefault(index, value)
        worse = level - value if settings.better == "higher" else value - level
        self.below = self.below + 1 if worse > settings.margin else 0
        if self.below < settings.patience:
            return None
        self.below = 0
        side = "below" if settings.better == "higher" else "above"
        why = (
            f"{settings.metric} {value:.4g} over {settings.window} is more than {settings.margin:g} {side} "
            f"{level:.4g} at entry, {settings.patience} times in a row"
        )
        return self._decide_rollback(
            index, settings, why, {settings.metric: value, f"{settings.metric} at entry": level}
        )

    def _decide_rollback(
        self, index: int, settings: RollbackSettings, why: str, metrics: dict[str, float]
    ) -> RollbackDecision:
        if self.rollbacks[index] < settings.max_rollbacks:
            self.rollbacks[index] += 1
            self.cooldown = settings.cooldown
            target = index - 1 if settings.to == "previous" and index > 0 else index
            number = f"rollback {self.rollbacks[index]} of {settings.max_rollbacks}"
            return RollbackDecision("rollback", target, f"{why} ({number})", metrics)
        self.unwatched.append(index)
        after = f"after {self.rollbacks[index]} rollbacks"
        if settings.on_exhausted == "stop":
            return RollbackDecision("stop", index, f"{why}, {after}", metrics)
        return RollbackDecision("unwatched", index, f"{why}, {after}: going on", metrics)

    def collect_metrics(self, index: int, history: MetricHistory) -> dict[str, float]:
        """Scalars for tracking; {} for a curriculum without rollbacks. `history`: as for `check`."""
        if not any(self.settings):
            return {}
        values = {
            "curriculum/rollbacks": float(sum(self.rollbacks)),
            "curriculum/below_entry": float(self.below),
            "curriculum/cooldown": float(self.cooldown),
        }
        if index in self.levels:
            values["curriculum/entry_level"] = self.levels[index]
        settings = self.settings[index]
        if settings is not None and index not in self.unwatched:
            value = history.compute_mean(expand_metric_name(settings.metric), settings.window)
            if value is not None:
                values["curriculum/watched"] = value
        return values

    def state_dict(self) -> dict[str, Any]:
        """State that later decisions depend on."""
        return {
            "levels": [[index, level] for index, level in sorted(self.levels.items())],
            "rollbacks": list(self.rollbacks),
            "unwatched": list(self.unwatched),
            "below": self.below,
            "cooldown": self.cooldown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.levels = {int(index): float(level) for index, level in state["levels"]}
        self.rollbacks = [int(count) for count in state["rollbacks"]]
        self.unwatched = [int(index) for index in state["unwatched"]]
        self.below = int(state["below"])
        self.cooldown = int(state["cooldown"])


def _can_restore_previous(settings: RollbackSettings | None) -> bool:
    return settings is not None and settings.to == "previous" and settings.max_rollbacks > 0


logger = logging.getLogger(__name__)

END_STAGE = "(end)"  # target of leaving the last stage

# advance: to the next stage; rollback: a stage is restarted from its entry; after the last rollback allowed, another
# drop is either ignored from then on (unwatched) or ends the curriculum (stop).
MoveKind = Literal["advance", "rollback", "unwatched", "stop"]


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
        self.stages = tuple(stages) or (
            CurriculumStage(name="all", levels=dict.fromkeys(levels, 1.0)),
        )
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise SettingsError(f"curriculum: two stages have the same name, in {names}")
        if END_STAGE in names:
            raise SettingsError(f"curriculum: a stage cannot be named {END_STAGE}")
        self.early_stop = early_stop
        self.index = 0
        self.iteration = 0  # iterations observed in all
        self.stage_iterations = 0  # of these, in the present stage
        self.finished: str | None = None  # reason for the end; None = not finished
        self.history: list[dict[str, Any]] = []  # moves: kind, iteration, from, to, why, metrics
        self.on_move: Callable[[list[dict[str, Any]]], None] | None = (
            None  # called with the history after each move
        )
        self.rollback_monitor = RollbackMonitor(
            [stage.rollback or rollback for stage in self.stages]
        )
        self._streaks: list[int] = []  # consecutive iterations in which each current condition held
        conditions = [condition for stage in self.stages for condition in stage.exit_conditions]
        conditions += [early_stop] if early_stop else []
        for condition in conditions:
            check_custom_statistic(condition)
        windows = [condition.window for condition in conditions]
        self._metric_history = MetricHistory(
            limit=max([*windows, self.rollback_monitor.longest_window])
        )

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
    def restorable_stages(self) -> set[int]:
        """Stages whose snapshots a rollback may need."""
        return self.rollback_monitor.find_restorable_stages(self.index)

    def observe_iteration(
        self, metrics: Mapping[str, float], *, known: Iterable[str] = ()
    ) -> int | None:
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
        self._metric_history.record_values(metrics, self.iteration)
        if self.rollback_monitor.cooldown:
            self.rollback_monitor.cooldown -= 1
            return None
        names = [*metrics, *known]
        target = self._check_rollback(names)
        if target is None:
            self._advance_if_done(metrics, names)
        return target

    def collect_metrics(self) -> dict[str, float]:
        """Progress of the curriculum as `curriculum/...`; averages are those that the next move depends on."""
        values = {
            "curriculum/stage": float(self.index),
            "curriculum/stage_iterations": float(self.stage_iterations),
            "curriculum/moves": float(len(self.history)),
        }
        statuses = [
            evaluate_condition(condition, self._metric_history, [condition.metric])
            for condition in self._list_conditions()
        ]
        if statuses:
            values["curriculum/window_filled"] = min(status.filled_share for status in statuses)
        for status in statuses:
            if status.value is not None:
                values[f"curriculum/{status.metric}"] = status.value
        return values | self.rollback_monitor.collect_metrics(self.index, self._metric_history)

    def export_history(self) -> list[dict[str, Any]]:
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
            "history": self.export_history(),
            "window": self._metric_history.state_dict(),
            "streaks": list(self._streaks),
            "rollback": self.rollback_monitor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ResumeRefused when it was saved by another curriculum."""
        names = [stage.name for stage in self.stages]
        if list(state["stages"]) != names:
            raise ResumeRefused(
                f"curriculum: saved with stages {list(state['stages'])}, now they are {names}"
            )
        self.index = int(state["index"])
        self.iteration = int(state["iteration"])
        self.stage_iterations = int(state["stage_iterations"])
        self.finished = state["finished"]
        self.history = [dict(move) for move in state["history"]]
        self._metric_history.load_state_dict(state["window"])
        self._streaks = [int(streak) for streak in state["streaks"]]
        self.rollback_monitor.load_state_dict(state["rollback"])

    def _list_conditions(self) -> list[ExitCondition]:
        """Exit conditions of the current stage; in the last one followed by early_stop."""
        last = [self.early_stop] if self.is_last and self.early_stop is not None else []
        return [*self.stage.exit_conditions, *last]

    def _check_rollback(self, names: Sequence[str]) -> int | None:
        """Index of the stage to restore if the rollback watch decides so; None = none."""
        decision = self.rollback_monitor.check_iteration(self.index, self._metric_history, names)
        if decision is None:
            return None
        here = self.stage.name
        if decision.action == "unwatched":
            self._record_move("unwatched", here, here, decision.reason, decision.metrics)
            return None
        if decision.action == "stop":
            self._record_move("stop", here, END_STAGE, decision.reason, decision.metrics)
            self.finished = f"curriculum stopped in stage '{here}': {decision.reason}"
            return decision.target
        self._record_move(
            "rollback", here, self.stages[decision.target].name, decision.reason, decision.metrics
        )
        self.index = decision.target
        self._restart_windows()
        return decision.target

    def _advance_if_done(self, metrics: Mapping[str, float], names: Sequence[str]) -> None:
        """Leave the stage when its exit conditions hold."""
        statuses = self._evaluate_conditions(metrics, names)
        count = len(self.stage.exit_conditions)
        why = self._find_exit_reason(statuses[:count])
        if why is not None:
            statuses = statuses[:count]
        elif len(statuses) > count and statuses[-1].is_met:
            statuses, why = statuses[-1:], f"early_stop: {statuses[-1]}"
        if why is not None:
            self._leave_stage(why, statuses)

    def _evaluate_conditions(
        self, metrics: Mapping[str, float], names: Sequence[str]
    ) -> list[ConditionStatus]:
        """Status of every condition. A streak pauses while its metric is not observed (a level not drawn)."""
        conditions = self._list_conditions()
        streaks = self._streaks or [0] * len(conditions)
        statuses = [
            evaluate_condition(
                condition,
                self._metric_history,
                names,
                streak=streak - _is_missing(condition, metrics),
            )
            for condition, streak in zip(conditions, streaks, strict=True)
        ]
        self._streaks = [status.streak for status in statuses]
        return statuses

    def _find_exit_reason(self, statuses: Sequence[ConditionStatus]) -> str | None:
        stage = self.stage
        if stage.max_iterations is not None and self.stage_iterations >= stage.max_iterations:
            return f"max_iterations: {stage.max_iterations} reached"
        if not statuses or self.stage_iterations < stage.min_iterations:
            return None
        met = [status for status in statuses if status.is_met]
        enough = len(met) == len(statuses) if stage.require == "all" else bool(met)
        return "; ".join(str(status) for status in met) if enough else None

    def _leave_stage(self, reason: str, statuses: Sequence[ConditionStatus]) -> None:
        values = {status.label: status.value for status in statuses}
        target = END_STAGE if self.is_last else self.stages[self.index + 1].name
        self._record_move("advance", self.stage.name, target, reason, values)
        if self.is_last:
            self.finished = f"curriculum finished: {reason}"
            return
        self.index += 1
        self.rollback_monitor.enter_stage(self.index, self._metric_history)
        self._restart_windows()

    def _restart_windows(self) -> None:
        """Windows and patience start empty in every stage."""
        self.stage_iterations = 0
        self._streaks = []
        self._metric_history.clear_metrics()

    def _record_move(
        self,
        kind: MoveKind,
        source: str,
        target: str,
        reason: str,
        values: Mapping[str, float | None],
    ) -> None:
        move = {
            "kind": kind,
            "iteration": self.iteration,
            "from": source,
            "to": target,
            "why": reason,
        }
        self.history.append({**move, "metrics": dict(values)})
        log = logger.info if kind == "advance" else logger.warning
        log(
            "curriculum: %s: %s -> %s after iteration %d (%s)",
            kind,
            source,
            target,
            self.iteration,
            reason,
        )
        if self.on_move is not None:
            self.on_move(self.export_history())


def _is_missing(condition: ExitCondition, metrics: Mapping[str, float]) -> bool:
    """True = the iteration did not observe the condition's metric."""
    return condition.function is None and expand_metric_name(condition.metric) not in metrics
