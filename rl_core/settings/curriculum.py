"""Settings of the curriculum: its stages, when one is left, and when one is begun again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["CurriculumStage", "ExitCondition", "RollbackSettings"]


@dataclass(frozen=True, kw_only=True)
class ExitCondition(Settings):
    """One test on a moving average or a slope; it can only hold when its window is full."""

    metric: str = setting("success_rate", doc="name of a metric of the policy stage")
    statistic: Literal["mean", "slope"] = setting(
        "mean", doc="what is compared; slope: least squares over the window, per iteration (a plateau: <= a small one)"
    )
    window: int = setting(10, ge=1, doc="iterations averaged, or fitted")
    comparison: Literal[">=", ">", "<=", "<"] = setting(">=", doc="mean or slope on the left, threshold on the right")
    threshold: float = setting(0.8, doc="what the mean or slope is compared with")
    patience: int = setting(1, ge=1, doc="iterations in a row in which it has to hold")

    def check(self) -> None:
        """A line needs two points."""
        if self.statistic == "slope" and self.window < 2:
            raise SettingsError(f"window: {self.window} point has no slope; use at least 2")


@dataclass(frozen=True, kw_only=True)
class RollbackSettings(Settings):
    """When a stage of the curriculum has lost what it could do, and what happens then.

    Weights, optimizer, KL controller, reward normalisers, replay and random generators go back together; iterations,
    the learning-rate schedule and the draws of episodes go on.
    """

    metric: str = setting("success_rate", doc="the metric that must not fall; higher has to be better")
    window: int = setting(10, ge=1, doc="iterations averaged, for the level at entry and for the present one")
    level: Literal["first_window", "before"] = setting(
        "first_window",
        doc="the level at entry: over the first full window in the stage, or over the last one before it (which is "
        "comparable only for metrics that do not depend on the mix, success_rate_by_level for one)",
    )
    margin: float = setting(0.2, gt=0, doc="how far below the level at entry is too far")
    patience: int = setting(5, ge=1, doc="iterations in a row that have to be too far below")
    to: Literal["entry", "previous"] = setting(
        "entry", doc="begin this stage again, or the one before it; each as it was when the stage was entered"
    )
    max_rollbacks: int = setting(2, ge=0, doc="rollbacks that one stage may cause")
    on_exhausted: Literal["continue", "stop"] = setting(
        "continue", doc="when it falls once more: go on unwatched, or end the training with the stage's entry weights"
    )
    cooldown: int = setting(10, ge=0, doc="iterations after a rollback in which neither exit nor rollback is judged")
    learning_rate_factor: float = setting(
        0.5, gt=0, le=1, doc="multiplies the learning rate at each rollback, for the rest of the training"
    )


@dataclass(frozen=True, kw_only=True)
class CurriculumStage(Settings):
    """One stage of the curriculum."""

    name: str = setting(doc="shown in logs and metrics")
    levels: dict[str, float] = setting(doc="environment levels and their weights in the mix")
    exit_conditions: tuple[ExitCondition, ...] = setting((), doc="() = stay until the iterations end")
    require: Literal["all", "any"] = setting("all", doc="how many exit conditions must hold")
    min_iterations: int = setting(1, ge=1, doc="stay at least this long")
    max_iterations: int | None = setting(None, ge=1, doc="leave after this many, whatever the metrics say")
    rewards: dict[str, float] = setting(
        {}, doc="weights of reward components while in this stage; those not named keep the policy stage's"
    )
    group_size: int | None = setting(
        None, ge=1, doc="rollouts of one prompt here; prompts_per_iteration stays; left out: the policy stage's"
    )
    temperature: float | None = setting(
        None, gt=0, le=5, doc="of the rollouts here; left out: the policy stage's sampling.temperature"
    )
    rollback: RollbackSettings | None = setting(None, doc="of this stage; left out: the policy stage's")

    def check(self) -> None:
        """Levels need positive weights; limits must not cross."""
        if not self.levels or any(weight <= 0 for weight in self.levels.values()):
            raise SettingsError(f"levels: {self.levels} must name at least one level, each with a weight above 0")
        if self.max_iterations is not None and self.max_iterations < self.min_iterations:
            raise SettingsError(f"max_iterations: {self.max_iterations} is below min_iterations {self.min_iterations}")
