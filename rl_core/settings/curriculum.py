"""Curriculum settings: stages, exit conditions, rollback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ExitCondition(Settings):
    """Threshold test on a moving average or slope; holds only once its window is full."""

    metric: str = setting("success_rate", doc="name of a metric of the policy stage")
    statistic: Literal["mean", "slope"] = setting(
        "mean",
        doc="tested statistic; slope: least squares over the window, per iteration (plateau: <= a small value)",
    )
    window: int = setting(10, ge=1, le=1_000_000, doc="iterations averaged, or fitted")
    comparison: Literal[">=", ">", "<=", "<"] = setting(
        ">=", doc="mean or slope on the left, threshold on the right"
    )
    threshold: float = setting(0.8, doc="threshold of the mean or slope")
    patience: int = setting(1, ge=1, doc="consecutive iterations for which it must hold")
    function: str | None = setting(
        None,
        is_code=True,
        doc="a custom statistic instead of metric and statistic: import path or file of a function",
    )
    options: dict[str, Any] = setting({}, doc="keyword arguments of that function")

    def check(self) -> None:
        """Check that a slope has at least two points, and that a custom function replaces metric and statistic."""
        if self.function is not None and (self.metric, self.statistic) != ("success_rate", "mean"):
            raise SettingsError("function: reads the metrics itself; remove metric and statistic")
        if self.options and self.function is None:
            raise SettingsError(
                "options: are passed to a custom function, and none is named; set function"
            )
        if self.statistic == "slope" and self.window < 2:
            raise SettingsError(f"window: {self.window} point has no slope; use at least 2")


@dataclass(frozen=True, kw_only=True)
class RollbackSettings(Settings):
    """Rollback of a curriculum stage after a performance drop.

    Weights, optimizer, KL controller, reward normalisers, replay buffer and random generators are restored together;
    the iteration count, the learning-rate schedule and episode sampling continue.
    """

    metric: str = setting("success_rate", doc="monitored metric")
    better: Literal["higher", "lower"] = setting(
        "higher",
        doc="direction of that metric; lower for policy/ref_kl, loop_rate, tool/misuse_rate and similar",
    )
    window: int = setting(
        10, ge=1, le=1_000_000, doc="iterations averaged for the reference and the current level"
    )
    level: Literal["first_window", "before"] = setting(
        "first_window",
        doc="reference level: mean over the first full window in the stage, or over the last window before it "
        "(comparable only for metrics that do not depend on the level mix, such as success_rate_by_level)",
    )
    margin: float = setting(0.2, gt=0, doc="allowed deterioration from the reference level")
    patience: int = setting(
        5, ge=1, doc="consecutive iterations beyond the margin that trigger a rollback"
    )
    to: Literal["entry", "previous"] = setting(
        "entry", doc="restart this stage or the previous one, from its entry snapshot"
    )
    max_rollbacks: int = setting(2, ge=0, doc="maximum rollbacks per stage")
    on_exhausted: Literal["continue", "stop"] = setting(
        "continue",
        doc="after max_rollbacks: continue unmonitored, or end the training with the stage's entry weights",
    )
    cooldown: int = setting(
        10, ge=0, doc="iterations after a rollback without exit or rollback checks"
    )
    learning_rate_factor: float = setting(
        0.5,
        gt=0,
        le=1,
        doc="learning-rate factor applied at each rollback, for the rest of the training",
    )


@dataclass(frozen=True, kw_only=True)
class CurriculumStage(Settings):
    """One stage of the curriculum."""

    name: str = setting(doc="shown in logs and metrics")
    levels: dict[str, float] = setting(doc="environment levels and their sampling weights")
    exit_conditions: tuple[ExitCondition, ...] = setting(
        (), doc="() = stay until the end of training"
    )
    require: Literal["all", "any"] = setting("all", doc="how many exit conditions must hold")
    min_iterations: int = setting(1, ge=1, doc="stay at least this long")
    max_iterations: int | None = setting(
        None, ge=1, doc="leave after this many iterations regardless of metrics"
    )
    rewards: dict[str, float] = setting(
        {}, doc="reward component weights in this stage; others are those of the policy stage"
    )
    group_size: int | None = setting(
        None,
        ge=1,
        le=65_536,
        doc="rollouts per prompt, prompts_per_iteration unchanged; default: the policy stage's",
    )
    temperature: float | None = setting(
        None,
        gt=0,
        le=5,
        doc="sampling temperature in this stage; default: the policy stage's sampling.temperature",
    )
    rollback: RollbackSettings | None = setting(
        None, doc="rollback of this stage; default: the policy stage's"
    )

    def check(self) -> None:
        """Check that level weights are positive and min_iterations <= max_iterations."""
        if not self.levels or any(weight <= 0 for weight in self.levels.values()):
            raise SettingsError(
                f"levels: {self.levels} must name at least one level, each with a weight above 0"
            )
        if self.max_iterations is not None and self.max_iterations < self.min_iterations:
            raise SettingsError(
                f"max_iterations: {self.max_iterations} is below min_iterations {self.min_iterations}"
            )
