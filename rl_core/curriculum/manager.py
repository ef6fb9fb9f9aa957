"""Curriculum: stages of level mixes with exit conditions, and rollback when performance drops.

A rollback happens when a metric is worse than its reference level at the entry of a stage. Safeguards against
oscillation: the drop must exceed a margin for a patience; a restarted stage is compared with the level of its first
entry, not with the dropped one; a rollback is followed by a cool-down; and each stage causes a limited number of
rollbacks in total, however often it is entered.
"""

from __future__ import annotations

import dataclasses
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

    from rl_core.environments.environment import Environment


logger = logging.getLogger(__name__)

END_STAGE = "(end)"  # target of leaving the last stage

# advance: to the next stage. rollback: restart a stage from its entry. After the last allowed rollback, another drop is
# either ignored from then on (unwatched) or ends the curriculum (stop).
MoveKind = Literal["advance", "rollback", "unwatched", "stop"]


@dataclass(frozen=True, slots=True)
class RollbackDecision:
    """Reaction to a drop in the current stage."""

    action: Literal["rollback", "unwatched", "stop"]
    target: int  # stage whose entry is restored; for `unwatched` the current one, without restoring
    reason: str
    metrics: dict[str, float]  # the watched metric and its level at entry


class RollbackMonitor:
    """Monitor that compares one metric of the current stage with its level at entry."""

    def __init__(self, settings: Sequence[RollbackSettings | None]) -> None:
        """Configure the monitor.

        Args:
            settings: of each curriculum stage; None = not watched.
        """
        self.settings = tuple(settings)
        self.levels: dict[int, float] = {}  # reference level at the entry to restore, by stage
        self.rollbacks = [0] * len(self.settings)  # caused by each stage
        self.unwatched: list[int] = []  # stages that continued after their last rollback
        self.below = 0  # consecutive iterations too far below the current stage's level
        self.cooldown = 0  # remaining iterations without a check

    @property
    def longest_window(self) -> int:
        """Number of observations that a history must keep."""
        windows = [settings.window for settings in self.settings if settings is not None]
        return max(windows, default=1)

    def find_restorable_stages(self, index: int) -> set[int]:
        """Return the stages whose entry may still have to be restored from the stage at `index`."""
        current = self.settings[index]
        following = self.settings[index + 1] if index + 1 < len(self.settings) else None
        is_needed = current is not None and (
            current.max_rollbacks > 0 or current.on_exhausted == "stop"
        )
        stages = {index} if is_needed or _can_restore_previous(following) else set()
        while index > 0 and _can_restore_previous(self.settings[index]):
            index -= 1
            stages.add(index)
        return stages

    def enter_stage(self, index: int, before: MetricHistory) -> None:
        """Enter a later stage with a new reference level.

        Args:
            before: history of the previous stage.
        """
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
        """Check one iteration of the stage at `index`; return None without a drop.

        Args:
            history: of this stage since it was entered or restarted.
        Raises: SettingsError if the watched metric does not exist.
        """
        settings = self.settings[index]
        if settings is None or index in self.unwatched:
            return None
        name = check_metric(settings.metric, history, known)
        value = history.compute_mean(name, settings.window)
        if value is None or not history.is_full(name, settings.window):
            return None
        level = self.levels.setdefault(index, value)
        drop = level - value if settings.better == "higher" else value - level
        self.below = self.below + 1 if drop > settings.margin else 0
        if self.below < settings.patience:
            return None
        self.below = 0
        side = "below" if settings.better == "higher" else "above"
        reason = (
            f"{settings.metric} {value:.4g} over {settings.window} is more than {settings.margin:g} {side} "
            f"{level:.4g} at entry, {settings.patience} times in a row"
        )
        metrics = {settings.metric: value, f"{settings.metric} at entry": level}
        return self._decide_rollback(index, settings, reason, metrics)

    def _decide_rollback(
        self, index: int, settings: RollbackSettings, reason: str, metrics: dict[str, float]
    ) -> RollbackDecision:
        if self.rollbacks[index] < settings.max_rollbacks:
            self.rollbacks[index] += 1
            self.cooldown = settings.cooldown
            target = index - 1 if settings.to == "previous" and index > 0 else index
            number = f"rollback {self.rollbacks[index]} of {settings.max_rollbacks}"
            return RollbackDecision("rollback", target, f"{reason} ({number})", metrics)
        self.unwatched.append(index)
        after = f"after {self.rollbacks[index]} rollbacks"
        if settings.on_exhausted == "stop":
            return RollbackDecision("stop", index, f"{reason}, {after}", metrics)
        return RollbackDecision("unwatched", index, f"{reason}, {after}: continuing", metrics)

    def collect_metrics(self, index: int, history: MetricHistory) -> dict[str, float]:
        """Return scalars for tracking; {} for a curriculum without rollbacks.

        Args:
            history: as for `check_iteration`.
        """
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
        """Return the state that later decisions depend on."""
        return {
            "levels": [[index, level] for index, level in sorted(self.levels.items())],
            "rollbacks": list(self.rollbacks),
            "unwatched": list(self.unwatched),
            "below": self.below,
            "cooldown": self.cooldown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`."""
        self.levels = {int(index): float(level) for index, level in state["levels"]}
        self.rollbacks = [int(count) for count in state["rollbacks"]]
        self.unwatched = [int(index) for index in state["unwatched"]]
        self.below = int(state["below"])
        self.cooldown = int(state["cooldown"])


def _can_restore_previous(settings: RollbackSettings | None) -> bool:
    return settings is not None and settings.to == "previous" and settings.max_rollbacks > 0


def expand_curriculum(
    stages: Sequence[CurriculumStage], environment: Environment
) -> list[CurriculumStage]:
    """Replace names of a mixture's environments in the stages' levels by their levels. Raises: SettingsError."""
    return [
        dataclasses.replace(stage, levels=environment.expand_levels(stage.levels))
        for stage in stages
    ]


class CurriculumManager:
    """Manager that draws levels, evaluates exit conditions and rollback of the current stage, and moves between stages.

    A stage is left when all (or any) of its exit conditions hold, but not before min_iterations, and at max_iterations
    in
    any case. Windows are filled within the stage: its history starts empty. Leaving the last stage, or `early_stop`
    holding
    there, finishes the curriculum (`finished`). With a rollback configured, a stage whose watched metric dropped too
    far is
    restarted from its entry or from that of the previous stage.
    """

    def __init__(
        self,
        stages: Sequence[CurriculumStage],
        levels: Sequence[str] | Mapping[str, float],
        *,
        early_stop: ExitCondition | None = None,
        rollback: RollbackSettings | None = None,
    ) -> None:
        """Start in the first stage.

        Args:
            levels: of the environment, with weights or equal ones; without stages they form one stage.
            rollback: for stages without a separate one.
        """
        weights = dict(levels) if isinstance(levels, Mapping) else dict.fromkeys(levels, 1.0)
        self.stages = tuple(stages) or (CurriculumStage(name="all", levels=weights),)
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise SettingsError(f"curriculum: two stages have the same name, in {names}")
        if END_STAGE in names:
            raise SettingsError(f"curriculum: a stage cannot be named {END_STAGE}")
        self.early_stop = early_stop
        self.index = 0
        self.iteration = 0  # observed in total
        self.stage_iterations = 0  # observed in the current stage
        self.finished: str | None = None  # reason for the end; None = not finished
        self.history: list[dict[str, Any]] = []  # moves: kind, iteration, from, to, why, metrics
        # Called with the history after each move.
        self.on_move: Callable[[list[dict[str, Any]]], None] | None = None
        self.rollback_monitor = RollbackMonitor(
            [stage.rollback or rollback for stage in self.stages]
        )
        self._streaks: list[int] = []  # consecutive iterations in which each current condition held
        conditions = [condition for stage in self.stages for condition in stage.exit_conditions]
        conditions += [early_stop] if early_stop else []
        for condition in conditions:
            check_custom_statistic(condition)
        windows = [condition.window for condition in conditions]
        longest_window = max([*windows, self.rollback_monitor.longest_window])
        self._metric_history = MetricHistory(limit=longest_window)

    @property
    def stage(self) -> CurriculumStage:
        """Current stage."""
        return self.stages[self.index]

    @property
    def is_last(self) -> bool:
        """True if the current stage is the last one."""
        return self.index == len(self.stages) - 1

    def draw_level(self, rng: np.random.Generator) -> str:
        """Draw one level with the probabilities of the current stage's mix."""
        import numpy as np  # imported here, because checking a configuration does not need it

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
        Returns: the index of the stage whose entry must be restored now, or None.
        Raises: SettingsError if a condition names a metric that does not exist.
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
        """Return the progress as `curriculum/...`; averages are those that the next move depends on."""
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
        """Return all moves: kind, iteration, source and target stage, reason, and the metrics at that time."""
        return [dict(move) for move in self.history]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later moves depend on."""
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
        """Load a state; inverse of `state_dict`. Raises: ResumeRefused if it was saved by a different curriculum."""
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
        """Return the exit conditions of the current stage; in the last stage followed by early_stop."""
        early_stop = [self.early_stop] if self.is_last and self.early_stop is not None else []
        return [*self.stage.exit_conditions, *early_stop]

    def _check_rollback(self, names: Sequence[str]) -> int | None:
        """Return the index of the stage to restore if the rollback monitor decides so, else None."""
        decision = self.rollback_monitor.check_iteration(self.index, self._metric_history, names)
        if decision is None:
            return None
        stage_name = self.stage.name
        if decision.action == "unwatched":
            self._record_move(
                "unwatched", stage_name, stage_name, decision.reason, decision.metrics
            )
            return None
        if decision.action == "stop":
            self._record_move("stop", stage_name, END_STAGE, decision.reason, decision.metrics)
            self.finished = f"curriculum stopped in stage '{stage_name}': {decision.reason}"
            return decision.target
        target_name = self.stages[decision.target].name
        self._record_move("rollback", stage_name, target_name, decision.reason, decision.metrics)
        self.index = decision.target
        self._restart_windows()
        return decision.target

    def _advance_if_done(self, metrics: Mapping[str, float], names: Sequence[str]) -> None:
        """Leave the stage if its exit conditions hold."""
        statuses = self._evaluate_conditions(metrics, names)
        count = len(self.stage.exit_conditions)
        reason = self._find_exit_reason(statuses[:count])
        if reason is not None:
            statuses = statuses[:count]
        elif len(statuses) > count and statuses[-1].is_met:
            statuses, reason = statuses[-1:], f"early_stop: {statuses[-1]}"
        if reason is not None:
            self._leave_stage(reason, statuses)

    def _evaluate_conditions(
        self, metrics: Mapping[str, float], names: Sequence[str]
    ) -> list[ConditionStatus]:
        """Return the status of every condition.

        A streak pauses while its metric is not observed (a level not drawn).
        """
        conditions = self._list_conditions()
        streaks = self._streaks or [0] * len(conditions)
        statuses = []
        for condition, streak in zip(conditions, streaks, strict=True):
            previous = streak - _is_missing(condition, metrics)
            status = evaluate_condition(condition, self._metric_history, names, streak=previous)
            statuses.append(status)
        self._streaks = [status.streak for status in statuses]
        return statuses

    def _find_exit_reason(self, statuses: Sequence[ConditionStatus]) -> str | None:
        stage = self.stage
        if stage.max_iterations is not None and self.stage_iterations >= stage.max_iterations:
            return f"max_iterations: {stage.max_iterations} reached"
        if not statuses or self.stage_iterations < stage.min_iterations:
            return None
        met = [status for status in statuses if status.is_met]
        is_done = len(met) == len(statuses) if stage.require == "all" else bool(met)
        return "; ".join(map(str, met)) if is_done else None

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
        """Clear windows and streaks, which start empty in every stage."""
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
    """Return whether the iteration did not observe the condition's metric."""
    return condition.function is None and expand_metric_name(condition.metric) not in metrics
