"""Settings of credit assignment: the critic, and advantages by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import MODEL_DEFAULTS


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """Value function of PPO and of REINFORCE with a learned baseline."""

    kind: Literal["separate", "shared"] = setting(
        "separate",
        doc="separate: a copy of the initial model; shared: a head on the policy's hidden states",
    )
    learning_rate: float | None = setting(
        None,
        gt=0,
        le=1,
        doc="learning rate of a separate critic; unset: the policy's if that is set, else "
        + MODEL_DEFAULTS["CriticSettings.learning_rate"].describe_values(),
    )
    value_coef: float = setting(
        0.5, gt=0, doc="weight of a shared head's value loss (arXiv:1707.06347)"
    )
    value_clip_eps: float | None = setting(
        None, gt=0, doc="value clipping around the old values; default: none"
    )
    warmup_iterations: int = setting(0, ge=0, doc="initial iterations that train only the critic")
    bootstrap_limits: bool = setting(
        False,
        doc="true: a rollout cut by the limits of `sampling` bootstraps from the critic, so a "
        "policy can gain reward by running into the limit; false: it is terminal",
    )

    def check(self) -> None:
        """Check that critic warm-up has a separate critic."""
        if self.kind == "shared" and self.warmup_iterations:
            raise SettingsError(
                "warmup_iterations: needs a separate critic; a shared head trains with the policy"
            )


@dataclass(frozen=True, kw_only=True)
class TurnCreditSettings(Settings):
    """Advantages by turn: the rollout's, plus that of the discounted return from the turn on among compared turns."""

    compare: Literal["states", "turns", "group"] = setting(
        "states",
        doc="turns of a group whose returns are compared; states: those taken in the same state, known by the "
        "environment's `Step.state` or the text of the last observation (GiGPO, arXiv:2505.10978); turns: those of "
        "the same number; group: all",
    )
    gamma: float = setting(
        0.95, ge=0, le=1, doc="discount of later turns' rewards in the return, per turn"
    )
    episode_weight: float = setting(
        1.0, ge=0, le=1e6, doc="weight of the rollout's advantage; 0 = the returns by turn alone"
    )
    step_weight: float = setting(
        1.0, gt=0, le=1e6, doc="weight of the turn's advantage, omega (arXiv:2505.10978)"
    )
