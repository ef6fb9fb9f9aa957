"""Settings of the proof that a written model is the one that was trained and evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.settings.base import Settings, setting

__all__ = ["ExportSettings"]


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """Proof of export: the written model, loaded by transformers alone in a fresh process, has the same log-probs."""

    bound: float | None = setting(
        None,
        gt=0,
        doc="largest difference of a token's log-probability, nats; default: 0.001 in float32, 0.5 in bfloat16 and "
        "float16",
    )
    mean_bound: float | None = setting(
        None, gt=0, doc="largest mean difference over the tokens, nats; default: a fifth of the bound"
    )
    timeout_seconds: float = setting(1800.0, gt=0, doc="of the fresh process")
