"""Settings of the banded controller of a KL coefficient."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["KLBandSettings"]


@dataclass(frozen=True, kw_only=True)
class KLBandSettings(Settings):
    """Band around kl_target, factors outside of it, and bounds of the coefficient (`losses.kl.banded_kl_coef`)."""

    width: float = setting(0.2, ge=0, lt=1, doc="half-width of the band, as a share of kl_target")
    increase: float = setting(1.2, ge=1, doc="factor of kl_coef after an iteration whose KL is above the band")
    decrease: float = setting(1.2, ge=1, doc="divisor of kl_coef after one whose KL is below it")
    minimum: float = setting(1e-4, gt=0, doc="least kl_coef")
    maximum: float = setting(1.0, gt=0, doc="largest kl_coef")

    def check(self) -> None:
        """The bounds leave room."""
        if self.minimum > self.maximum:
            raise SettingsError(f"minimum: {self.minimum} is above maximum {self.maximum}")

    def check_start(self, kl_coef: float) -> None:
        """Raises: SettingsError for a coefficient that the first step of the controller would move into the bounds."""
        if not self.minimum <= kl_coef <= self.maximum:
            raise SettingsError(
                f"kl_coef: {kl_coef} must lie between kl_band.minimum {self.minimum} and kl_band.maximum {self.maximum}"
            )
