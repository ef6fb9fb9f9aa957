"""Settings of the comparison of trainer and sampler after weight updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_core.settings.base import Settings, setting

__all__ = ["NumericsGateSettings", "decisive_numerics", "rounding_bound"]


def rounding_bound(is_float32: bool) -> float:
    """Largest difference of a token's log-probability that rounding explains, nats; False = bfloat16 or float16."""
    return 1e-3 if is_float32 else 0.5


@dataclass(frozen=True, kw_only=True)
class NumericsGateSettings(Settings):
    """Comparison of trainer and sampler on fixed prompts after weight updates (docs/reliability.md)."""

    every: int = setting(
        16,
        ge=0,
        le=1_000_000,
        doc="iterations between two comparisons, the first one after the first update; 1 = after every update; 0 = "
        "never. Rollout workers are compared after every transfer in any case",
    )
    bound: float | None = setting(
        None,
        gt=0,
        doc="largest difference of a token's log-probability, nats; default: 0.001 in float32, 0.5 in bfloat16 and "
        "float16, none with `importance`, `importance_mask` or a `sampler_kl_max`, which allow for other samplers",
    )
    action: Literal["refuse", "rollback"] = setting(
        "refuse",
        doc="beyond the bound. refuse: the run ends, and nothing of the iteration is saved; rollback: training goes "
        "back to the weights of the last comparison that passed (a copy of model and optimizer in memory and in "
        "checkpoints)",
    )


def decisive_numerics(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of these settings, as plain values, that decides numbers: a comparison alone does not."""
    return settings if settings["action"] == "rollback" and settings["every"] else {}
