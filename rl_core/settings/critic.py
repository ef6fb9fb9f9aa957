"""Settings of a value function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import DEFAULTS

__all__ = ["CriticSettings"]


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    """Value function of PPO and of REINFORCE with a learned baseline."""

    kind: Literal["separate", "shared"] = setting(
        "separate", doc="separate: a copy of the starting model; shared: a head on the policy's own hidden states"
    )
    learning_rate: float | None = setting(
        None,
        gt=0,
        le=1,
        doc="of a separate critic; left out: the policy's where that is set, else "
        + DEFAULTS["CriticSettings.learning_rate"].words(),
    )
    value_coef: float = setting(0.5, gt=0, doc="weight of a shared head's value loss (arXiv:1707.06347)")
    value_clip_eps: float | None = setting(None, gt=0, doc="value clipping around the old values; default: none")
    warmup_iterations: int = setting(0, ge=0, doc="initial iterations that train only the critic")
    bootstrap_limits: bool = setting(
        False,
        doc="true: a rollout cut by the limits of `sampling` bootstraps from the critic, as one truncated by the "
        "environment does; false: it is terminal. True lets a policy gain reward by running into the limit",
    )

    def check(self) -> None:
        """Critic warm-up needs a separate critic."""
        if self.kind == "shared" and self.warmup_iterations:
            raise SettingsError("warmup_iterations: needs a separate critic; a shared head trains with the policy")
