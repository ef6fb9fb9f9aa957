"""Settings of the reward components and of the orchestrator that combines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.errors import SettingsError, nearest
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import DEFAULTS, is_open
from rl_core.settings.verifiers import (
    CodeSettings,
    ExactSettings,
    JudgeSettings,
    MathSettings,
    NumericSettings,
    RegexSettings,
    check_pattern,
)

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
    """Curiosity reward: prediction error of a forward model over the policy's states."""

    hidden: int = setting(64, ge=1, le=65_536, doc="width of the forward model's hidden layer")
    learning_rate: float = setting(1e-3, gt=0, le=1, doc="constant Adam learning rate of the forward model")
    steps: int = setting(4, ge=1, doc="Adam steps per batch of transitions, after scoring it")


@dataclass(frozen=True, kw_only=True)
class CoherenceSettings(Settings):
    """Coherence reward: similarity band of consecutive turns, penalties for repetition and contradiction."""

    low: float = setting(0.2, ge=-1, le=1, doc="cosine similarity below which turns count as unrelated")
    high: float = setting(0.98, ge=-1, le=1, doc="cosine similarity above which a turn counts as repetition")
    repetition: float = setting(0.5, ge=0, doc="penalty per turn that repeats an earlier action")
    contradiction: float = setting(0.5, ge=0, doc="penalty per answer that differs from the one stated before")

    def check(self) -> None:
        """The band must not be empty."""
        if self.low >= self.high:
            raise SettingsError(f"low: {self.low} must be below high {self.high}")


@dataclass(frozen=True, kw_only=True)
class ToolUseSettings(Settings):
    """Tool-use reward: penalties and bonuses of tool calls."""

    misuse: float = setting(1.0, ge=0, doc="penalty per turn with misuse of a tool")
    max_calls: int | None = setting(None, ge=0, doc="calls without penalty; default: any number")
    excess: float = setting(0.5, ge=0, doc="penalty per call beyond max_calls")
    bonus: float = setting(0.0, ge=0, doc="bonus per distinct successful call")
    max_bonus: float = setting(1.0, ge=0, doc="maximum total bonus")


@dataclass(frozen=True, kw_only=True)
class FormatSettings(Settings):
    """Format reward: well-formed turns, beyond being parsed by the environment."""

    pattern: str | None = setting(
        None,
        doc="regular expression for the full text of every action ('.' matches line breaks); a turn that takes longer "
        "than a second of processor time to match counts as malformed",
    )

    def check(self) -> None:
        """The pattern must compile."""
        check_pattern(self.pattern)


@dataclass(frozen=True, kw_only=True)
class LengthSettings(Settings):
    """Length penalty."""

    free: int = setting(DEFAULTS["LengthSettings.free"], ge=0, doc="sampled tokens per episode without penalty")
    limit: int = setting(
        DEFAULTS["LengthSettings.limit"], ge=1, doc="sampled tokens at which the reward reaches -1; linear in between"
    )

    def check(self) -> None:
        """`free` must be below `limit`."""
        if is_open(self.free) or is_open(self.limit):
            return
        if self.free >= self.limit:
            raise SettingsError(f"free: {self.free} must be below limit {self.limit}")


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Settings):
    """Normalisation and clipping of components, failure handling of user functions, options per component."""

    normalise: tuple[str, ...] = setting(
        (), doc="components normalised to mean 0, std 1 by running statistics (learned and curiosity always are)"
    )
    clip: float | None = setting(None, gt=0, doc="components are clipped to +-this before weighting; default: none")
    max_failed_share: float = setting(
        0.1,
        ge=0,
        le=1,
        doc="share of samples on which user functions may raise, hang or give no finite number, or the judge give no "
        "judgement (counted over ten iterations and at least 50 samples); they carry no loss. Beyond it the stage "
        "stops; 0: at the first, 1: only if all fail",
    )
    timeout_s: float | None = setting(
        120.0, gt=0, doc="timeout in seconds of one call of a user function; none: no limit, hangs go undetected"
    )
    cache: tuple[str, ...] = setting(
        (),
        doc="user functions, by the names that they have in `rewards`, whose values are kept, not computed again, "
        "as you declare them pure: a value follows from the sample's own texts, tools, outcome and row alone. They are "
        "kept in memory and in checkpoints",
    )
    cache_entries: int = setting(
        100_000, ge=1, le=10_000_000, doc="values kept of each, 24 bytes a value; the oldest go"
    )
    window: int = setting(20, ge=3, le=1_000_000, doc="iterations over which reward and true success are compared")
    alarm_margin: float = setting(
        0.05,
        gt=0,
        doc="alarm: over the window success fell by this and the reward rose by this many standard deviations",
    )
    curiosity: CuriositySettings = setting(CuriositySettings(), doc="options of component curiosity")
    coherence: CoherenceSettings = setting(CoherenceSettings(), doc="options of component coherence")
    tool_use: ToolUseSettings = setting(ToolUseSettings(), doc="options of component tool_use")
    format: FormatSettings = setting(FormatSettings(), doc="of the component format")
    length: LengthSettings = setting(LengthSettings(), doc="of the component length")
    exact: ExactSettings = setting(ExactSettings(), doc="of the component exact")
    numeric: NumericSettings = setting(NumericSettings(), doc="of the component numeric")
    regex: RegexSettings = setting(RegexSettings(), doc="of the component regex")
    math: MathSettings = setting(MathSettings(), doc="of the component math")
    code: CodeSettings = setting(CodeSettings(), doc="of the component code")
    judge: JudgeSettings = setting(JudgeSettings(), doc="of the component judge")

    def check_components(self, rewards: Mapping[str, float]) -> None:
        """Raises: SettingsError for options of components that the policy's rewards do not have."""
        for name in self.normalise:
            if name not in rewards:
                raise SettingsError(f"reward_options.normalise: '{name}' is no component of rewards")
        for name in self.cache:
            if name not in rewards and rewards != {"task": 1.0}:  # else functions may be handed in (Python)
                raise SettingsError(
                    f"reward_options.cache: '{name}' is no component of rewards; {nearest(name, rewards)}"
                )
