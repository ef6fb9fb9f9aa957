"""Settings of the reward's components and of the orchestrator that weighs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import DEFAULTS, is_open

__all__ = [
    "CoherenceSettings",
    "CuriositySettings",
    "FormatSettings",
    "LengthSettings",
    "RewardSettings",
    "ToolUseSettings",
]


@dataclass(frozen=True, kw_only=True)
class CuriositySettings(Settings):
    """The forward model over the policy's states whose error is the reward."""

    hidden: int = setting(64, ge=1, doc="width of the forward model's hidden layer")
    learning_rate: float = setting(1e-3, gt=0, le=1, doc="Adam of the forward model; constant")
    steps: int = setting(4, ge=1, doc="Adam steps on each batch of transitions, after it was scored")


@dataclass(frozen=True, kw_only=True)
class CoherenceSettings(Settings):
    """How alike consecutive turns should be, and what repetition and contradiction cost."""

    low: float = setting(0.2, ge=-1, le=1, doc="cosine similarity below which turns do not follow from each other")
    high: float = setting(0.98, ge=-1, le=1, doc="cosine similarity above which a turn says the same again")
    repetition: float = setting(0.5, ge=0, doc="off for each turn whose action was written before")
    contradiction: float = setting(0.5, ge=0, doc="off for each answer that differs from the one stated before it")

    def check(self) -> None:
        """A band has a width."""
        if self.low >= self.high:
            raise SettingsError(f"low: {self.low} must be below high {self.high}")


@dataclass(frozen=True, kw_only=True)
class ToolUseSettings(Settings):
    """What tool calls cost and bring."""

    misuse: float = setting(1.0, ge=0, doc="off for each turn that misused a tool")
    max_calls: int | None = setting(None, ge=0, doc="calls that are free; left out: any number")
    excess: float = setting(0.5, ge=0, doc="off for each call beyond max_calls")
    bonus: float = setting(0.0, ge=0, doc="for each different call that worked")
    max_bonus: float = setting(1.0, ge=0, doc="what these add up to at most")


@dataclass(frozen=True, kw_only=True)
class FormatSettings(Settings):
    """What a well-formed turn is, besides one that the environment could read."""

    pattern: str | None = setting(
        None, doc="regular expression that the whole text of every action has to match ('.' takes line breaks too)"
    )

    def check(self) -> None:
        """The pattern has to be one."""
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise SettingsError(f"pattern: {self.pattern!r} is no regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class LengthSettings(Settings):
    """Where length begins to cost."""

    free: int = setting(DEFAULTS["LengthSettings.free"], ge=0, doc="sampled tokens of an episode that cost nothing")
    limit: int = setting(
        DEFAULTS["LengthSettings.limit"], ge=1, doc="sampled tokens from which on the reward is -1; linear in between"
    )

    def check(self) -> None:
        """The reward falls over some distance."""
        if is_open(self.free) or is_open(self.limit):
            return
        if self.free >= self.limit:
            raise SettingsError(f"free: {self.free} must be below limit {self.limit}")


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Settings):
    """How components are normalised and clipped, what a failing function leads to, and each component's own."""

    normalise: tuple[str, ...] = setting(
        (), doc="components brought to mean 0 and deviation 1 by what they gave so far (learned and curiosity always)"
    )
    clip: float | None = setting(None, gt=0, doc="every part lies within +-this before it is weighed; left out: none")
    on_error: Literal["stop", "mask"] = setting(
        "stop", doc="when your function fails on a sample. mask: that sample carries no loss"
    )
    max_masked_rate: float = setting(
        0.1,
        gt=0,
        le=0.5,
        doc="with mask: share of the rollouts scored at once beyond which the stage stops",
    )
    timeout_s: float | None = setting(
        120.0, gt=0, doc="seconds that one call of your function may take; none: no limit, and a hang is never noticed"
    )
    window: int = setting(20, ge=3, doc="iterations over which rewards are compared with true success")
    alarm_margin: float = setting(
        0.05, gt=0, doc="alarm: success fell by this over the window, the reward rose by this many of its deviations"
    )
    curiosity: CuriositySettings = setting(CuriositySettings(), doc="of the component curiosity")
    coherence: CoherenceSettings = setting(CoherenceSettings(), doc="of the component coherence")
    tool_use: ToolUseSettings = setting(ToolUseSettings(), doc="of the component tool_use")
    format: FormatSettings = setting(FormatSettings(), doc="of the component format")
    length: LengthSettings = setting(LengthSettings(), doc="of the component length")
