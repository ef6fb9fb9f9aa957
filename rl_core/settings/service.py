"""Settings of the training service's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["ServiceEngineSettings"]


@dataclass(frozen=True, kw_only=True)
class ServiceEngineSettings(Settings):
    """Base models of the engine, their precision, and the size of passes."""

    bases: dict[str, Any] = setting({}, doc="base models: name -> model folder or hub name; loaded at first use")
    dtype: Literal["float32", "bfloat16"] = setting("float32", doc="dtype of base models; adapters are float32")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", doc="auto: GPU if available")
    batch_runs: Literal["exact", "always", "never"] = setting(
        "exact",
        doc="rows of several training runs in one pass; exact: where no number of a run depends on it, to the last "
        "bit; always: also where they agree to rounding alone, so replay after a crash may differ in the last bits",
    )
    micro_batch_tokens: int = setting(
        8192, ge=1, le=1_073_741_824, doc="tokens of one run in a pass; a change changes the order of its sums"
    )
    pass_tokens: int = setting(
        32768, ge=1, le=1_073_741_824, doc="tokens of all runs together in a pass; changes no number"
    )
    slots: int = setting(128, ge=1, le=65_536, doc="sequences sampled together")
    max_runs: int = setting(64, ge=1, le=1_048_576, doc="training runs in memory")
    max_samplers: int = setting(1024, ge=1, le=1_048_576, doc="samplers in memory")
    max_rank: int = setting(512, ge=1, le=65_536, doc="largest rank of an adapter")
    max_data: int = setting(4096, ge=1, le=1_048_576, doc="sequences of one request")
    max_samples: int = setting(1024, ge=1, le=1_048_576, doc="samples of one request")
    max_top: int = setting(64, ge=1, le=65_536, doc="most likely tokens, or target tokens, at one position")

    def check(self) -> None:
        """Every base model has a name and a place."""
        for name, place in self.bases.items():
            if not isinstance(place, str) or not place or not name:
                raise SettingsError(f"bases: {name!r}: {place!r} is no model folder or hub name")
