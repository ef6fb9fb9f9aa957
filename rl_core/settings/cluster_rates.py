"""Durations and sizes of a training run on workers, for its simulation (`posttrain plan --simulate`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ClusterRates", "LogNormalSpread"]


@dataclass(frozen=True, kw_only=True)
class LogNormalSpread(Settings):
    """A log-normal quantity: many small values, few very large ones."""

    mean: float = setting(0.0, ge=0, doc="mean, before `most` cuts it")
    sigma: float = setting(0.0, ge=0, le=4, doc="standard deviation of the logarithm; 0 = always the mean")
    most: float | None = setting(None, gt=0, doc="upper limit: larger values become this one")

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent values, float64 of this shape."""
        found = self.mean * generator.lognormal(-(self.sigma**2) / 2, self.sigma, shape)
        return found if self.most is None else found.clip(max=self.most)


@dataclass(frozen=True, kw_only=True)
class ClusterRates(Settings):
    """Durations of one worker, one trainer and the weights between them, and the sizes of a rollout."""

    step_seconds: float = setting(0.008, ge=0, doc="a decoding step of one worker, without its rows")
    row_seconds: float = setting(7e-5, ge=0, doc="added to that step by each sequence that is decoded")
    turn_seconds: float = setting(0.0, ge=0, doc="reading a prompt or an observation of one sequence")
    join_seconds: float = setting(
        0.0, ge=0, doc="added to that whenever sequences begin or go on, however many do so at once"
    )
    update_seconds: float = setting(0.0, ge=0, doc="an update and its rewards, without the tokens")
    token_seconds: float = setting(1.2e-4, ge=0, doc="added to that by each sampled token, on one training GPU")
    publish_seconds: float = setting(0.0, ge=0, doc="pause of the trainer for a weight update")
    verify_seconds: float = setting(
        0.0, ge=0, doc="more of that pause: the trainer's own answers to the probe, while workers load"
    )
    call_seconds: float = setting(0.0, ge=0, doc="handing a task to a worker and its result back (max_staleness 0)")
    group_seconds: float = setting(0.0, ge=0, doc="added to that by each group")
    load_seconds: float = setting(1.0, ge=0, doc="pause of a worker for a weight update")
    switch_seconds: float = setting(0.0, ge=0, doc="a GPU's change between rollouts and updates, where it does both")
    turns: int = setting(1, ge=1, doc="actions of an episode")
    tokens: LogNormalSpread = setting(
        LogNormalSpread(mean=4000, sigma=0.9, most=32768), doc="sampled tokens of an action"
    )
    tools: LogNormalSpread = setting(LogNormalSpread(), doc="seconds of a tool call, between two actions")

    def check(self) -> None:
        """Nothing takes no time at all."""
        if not self.step_seconds + self.row_seconds or not self.tokens.mean:
            raise SettingsError("tokens: rollouts have to take some time: step_seconds or row_seconds, and tokens.mean")
        if self.tools.mean and self.turns == 1:
            raise SettingsError("tools: an episode of one action waits for no tool; set turns, or leave tools out")
