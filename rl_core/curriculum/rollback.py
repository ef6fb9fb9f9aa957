"""Rollback watch: detects that a metric is worse than its reference level at the entry of a curriculum stage.

Safeguards against oscillation: the change has to exceed a margin for a patience; a restarted stage is compared with the
level of its first entry, not with the dropped one; a rollback is followed by a cool-down; and each stage causes a
bounded number of rollbacks in total, however often it is entered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.curriculum.conditions import check_metric, metric_name
from rl_core.metrics import MetricHistory
from rl_core.settings import RollbackSettings

__all__ = ["RollbackWatch", "RollbackDecision"]


@dataclass(frozen=True, slots=True)
class RollbackDecision:
    """Reaction to a drop in the current stage."""

    action: Literal["rollback", "unwatched", "stop"]
    target: int  # stage whose entry is restored; for `unwatched` the current one, and nothing is restored
    why: str
    metrics: dict[str, float]  # the watched metric now, and its level at entry


class RollbackWatch:
    """Compares one metric of the current stage with its level at entry."""

    def __init__(self, settings: Sequence[RollbackSettings | None]) -> None:
        """`settings`: of each curriculum stage; None = not watched."""
        self.settings = tuple(settings)
        self.levels: dict[int, float] = {}  # by stage: reference level at the entry that would be restored
        self.rollbacks = [0] * len(self.settings)  # that each stage caused
        self.unwatched: list[int] = []  # stages that continued after their last rollback
        self.below = 0  # consecutive iterations in which the current stage was too far below its level
        self.cooldown = 0  # remaining iterations without a check

    @property
    def longest_window(self) -> int:
        """Observations that a history must keep."""
        return max((settings.window for settings in self.settings if settings is not None), default=1)

    def reachable(self, index: int) -> set[int]:
        """Stages whose entry may still have to be restored, seen from the stage at `index`."""
        own, following = self.settings[index], self.settings[index + 1] if index + 1 < len(self.settings) else None
        is_needed = own is not None and (own.max_rollbacks > 0 or own.on_exhausted == "stop")
        places = {index} if is_needed or _goes_to_previous(following) else set()
        while index > 0 and _goes_to_previous(self.settings[index]):
            index -= 1
            places.add(index)
        return places

    def enter(self, index: int, before: MetricHistory) -> None:
        """Enter a later stage, with a new reference level. `before`: the history of the stage that was left."""
        self.below = 0
        self.levels.pop(index, None)
        settings = self.settings[index]
        if settings is None or settings.level != "before":
            return
        name = metric_name(settings.metric)
        if before.is_full(name, settings.window):
            level = before.mean(name, settings.window)
            assert level is not None
            self.levels[index] = level

    def check(self, index: int, history: MetricHistory, known: Iterable[str] = ()) -> RollbackDecision | None:
        """Check one iteration of the stage at `index`; None = no drop.

        Args:
            history: of this stage since it was entered or restarted.
        Raises: SettingsError when the watched metric does not exist.
        """
        settings = self.settings[index]
        if settings is None or index in self.unwatched:
            return None
        name = check_metric(settings.metric, history, known)
        value = history.mean(name, settings.window)
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
        return self._decide(index, settings, why, {settings.metric: value, f"{settings.metric} at entry": level})

    def _decide(self, index: int, settings: RollbackSettings, why: str, metrics: dict[str, float]) -> RollbackDecision:
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

    def metrics(self, index: int, history: MetricHistory) -> dict[str, float]:
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
            value = history.mean(metric_name(settings.metric), settings.window)
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


def _goes_to_previous(settings: RollbackSettings | None) -> bool:
    return settings is not None and settings.to == "previous" and settings.max_rollbacks > 0
