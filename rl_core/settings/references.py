"""Settings of reference models: frozen ones that policies are held against, and reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.settings.base import Settings, setting

__all__ = ["Precision", "ReferenceSettings"]

Precision = Literal["full", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(Settings):
    """Precision of reference models, and how many of them stay in memory."""

    precision: Literal["auto", "full", "int8", "int4"] = setting(
        "auto",
        doc="weights of linear layers: as they are, 8 bits with a scale a row, or 4 bits with a scale for 32 inputs; "
        "auto: int8 where the package torchao is installed, else full",
    )
    max_models: int = setting(2, ge=1, le=1024, doc="models kept; the one that was used longest ago goes first")
    memory_share: float = setting(
        0.5, gt=0, le=1, doc="of the memory (of the GPU, where models are on one) that all of them may take together"
    )
    own_process_gib: float = setting(
        8.0, ge=0, doc="a larger model is computed by a process of its own, which gives all its memory back at its end"
    )
    pass_tokens: int = setting(16_384, ge=1, le=1_073_741_824, doc="padded tokens of one pass")
