"""Settings of ready-made verifiers: answers compared with a column of the data, by rule, by tests or by a judge.

Settings of the reward components and of the orchestrator that combines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import MODEL_DEFAULTS, is_unresolved

AnswerLocation = Literal["auto", "whole", "tag", "boxed", "hashes", "last_line", "last_number"]

_FIND_DOC = (
    "where the answer stands in the text after the thought: tag (<answer>...</answer>), boxed (\\boxed{...}), hashes "
    "(after ####), last_line, last_number, whole; auto: the first of tag, boxed, hashes that is there, else whole"
)
_SCORE_PATTERN = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
_COLUMN_DOC = "column of the right answer; default: the environment's target"


def check_pattern(pattern: str | None) -> None:
    """Raises SettingsError unless the setting `pattern`, where there is one, is a regular expression."""
    if not pattern:
        return
    import regex  # here, as a check of a configuration without patterns needs none of it

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise SettingsError(f"pattern: {pattern!r} is not a regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ExactSettings(Settings):
    """Verifier exact: the answer equals the target."""

    find: AnswerLocation = setting("auto", doc=_FIND_DOC)
    column: str | None = setting(None, doc=_COLUMN_DOC)
    ignore_case: bool = setting(True, doc="case counts for nothing; white space never does")


@dataclass(frozen=True, kw_only=True)
class NumericSettings(Settings):
    """Verifier numeric: the answer's number equals the target's."""

    find: AnswerLocation = setting(
        "auto", doc=f"{_FIND_DOC}; of several numbers found the last one counts"
    )
    column: str | None = setting(
        None, doc=f"{_COLUMN_DOC}; after #### where it has that, as in GSM8K"
    )
    tolerance: float = setting(
        0.0, ge=0, doc="largest difference, as a share of the target; 0: equal"
    )


@dataclass(frozen=True, kw_only=True)
class RegexSettings(Settings):
    """Verifier regex: the text after the thought matches a pattern."""

    pattern: str | None = setting(
        None, doc="regular expression; default: the column holds one for each row"
    )
    column: str | None = setting(None, doc="column of patterns; default: the environment's target")
    whole: bool = setting(False, doc="the whole text must match; default: any part of it")

    def check(self) -> None:
        """The pattern must compile."""
        check_pattern(self.pattern)


@dataclass(frozen=True, kw_only=True)
class MathSettings(Settings):
    """Verifier math: the answer is mathematically equal to the target, by the package math-verify."""

    column: str | None = setting(None, doc=_COLUMN_DOC)
    timeout_s: float = setting(
        10.0, gt=0, doc="limit of one comparison in seconds; beyond it the answer is wrong"
    )
    workers: int = setting(2, ge=1, doc="child processes")
    memory_gib: float = setting(2.0, gt=0, doc="address space of a child process in GiB")


@dataclass(frozen=True, kw_only=True)
class CodeSettings(Settings):
    """Verifier code: the program in the answer passes the row's tests, in child processes with limits (no sandbox)."""

    column: str = setting(
        "tests",
        doc='column of tests: Python statements as text or a list of them, or [{"input": ..., "output": ...}]',
    )
    partial: bool = setting(False, doc="share of the tests that pass; default: 1 if all do, else 0")
    timeout_s: float = setting(10.0, gt=0, doc="limit of one program in seconds")
    memory_gib: float = setting(1.0, gt=0, doc="address space of a program in GiB")
    workers: int = setting(2, ge=1, doc="programs that run at once")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """Judge: a model behind an OpenAI-compatible URL that scores answers."""

    url: str | None = setting(None, doc="address of the server, as http://127.0.0.1:8000/v1")
    model: str | None = setting(None, doc="name that the server knows the model by")
    prompt: str = setting(
        "Question:\n{prompt}\n\nReference answer:\n{target}\n\nAnswer to grade:\n{completion}\n\n"
        "Grade the answer from 0 (wrong) to 10 (right and complete). End with a line 'score: NUMBER'.",
        doc="what the judge is asked; {prompt}, {completion}, {target} and the row's columns by name",
    )
    system: str = setting("", doc="system message of the judge")
    lowest: float = setting(0.0, doc="score that becomes reward 0")
    highest: float = setting(10.0, doc="score that becomes reward 1")
    pattern: str = setting(
        _SCORE_PATTERN,
        doc="regular expression whose first group is the score; its last match counts",
    )
    max_tokens: int = setting(512, ge=1, doc="length of a judgement")
    temperature: float = setting(0.0, ge=0, doc="temperature of the judge")
    concurrency: int = setting(8, ge=1, le=256, doc="requests at once")
    timeout_s: float = setting(
        60.0, gt=0, doc="limit of one request in seconds, however it trickles in"
    )
    retries: int = setting(
        3, ge=0, le=20, doc="further tries of a request that failed, or whose reply has no score"
    )
    retry_delay_s: float = setting(
        1.0, gt=0, doc="wait before the first further try; doubled each time"
    )
    key_variable: str | None = setting(
        None, doc="environment variable that holds the API key; the key itself is never stored"
    )
    cache: str | None = setting(
        None,
        doc="folder of judgements, found again by content; default: posttrain/judgements in the user's cache",
    )

    def check(self) -> None:
        """The scale must not be empty, and the pattern needs a group."""
        if self.lowest >= self.highest:
            raise SettingsError(f"lowest: {self.lowest} must be below highest {self.highest}")
        if self.pattern == _SCORE_PATTERN:
            return
        import regex  # as in `check_pattern`

        try:
            groups = regex.compile(self.pattern).groups
        except regex.error as error:
            raise SettingsError(
                f"pattern: {self.pattern!r} is not a regular expression: {error}"
            ) from None
        if groups < 1:
            raise SettingsError(
                f"pattern: {self.pattern!r} has no group; write the score's part in brackets"
            )


@dataclass(frozen=True, kw_only=True)
class CuriositySettings(Settings):
    """Curiosity reward: prediction error of a forward model over the policy's states."""

    hidden: int = setting(64, ge=1, le=65_536, doc="width of the forward model's hidden layer")
    learning_rate: float = setting(
        1e-3, gt=0, le=1, doc="constant Adam learning rate of the forward model"
    )
    steps: int = setting(4, ge=1, doc="Adam steps per batch of transitions, after scoring it")


@dataclass(frozen=True, kw_only=True)
class CoherenceSettings(Settings):
    """Coherence reward: similarity band of consecutive turns, penalties for repetition and contradiction."""

    low: float = setting(
        0.2, ge=-1, le=1, doc="cosine similarity below which turns count as unrelated"
    )
    high: float = setting(
        0.98, ge=-1, le=1, doc="cosine similarity above which a turn counts as repetition"
    )
    repetition: float = setting(0.5, ge=0, doc="penalty per turn that repeats an earlier action")
    contradiction: float = setting(
        0.5, ge=0, doc="penalty per answer that differs from the one stated before"
    )

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

    free: int = setting(
        MODEL_DEFAULTS["LengthSettings.free"],
        ge=0,
        doc="sampled tokens per episode without penalty",
    )
    limit: int = setting(
        MODEL_DEFAULTS["LengthSettings.limit"],
        ge=1,
        doc="sampled tokens at which the reward reaches -1; linear in between",
    )

    def check(self) -> None:
        """`free` must be below `limit`."""
        if is_unresolved(self.free) or is_unresolved(self.limit):
            return
        if self.free >= self.limit:
            raise SettingsError(f"free: {self.free} must be below limit {self.limit}")


@dataclass(frozen=True, kw_only=True)
class RewardSettings(Settings):
    """Normalisation and clipping of components, failure handling of user functions, options per component."""

    normalise: tuple[str, ...] = setting(
        (),
        doc="components normalised to mean 0, std 1 by running statistics (learned and curiosity always are)",
    )
    clip: float | None = setting(
        None, gt=0, doc="components are clipped to +-this before weighting; default: none"
    )
    max_failed_share: float = setting(
        0.1,
        ge=0,
        le=1,
        doc="share of samples on which user functions may raise, hang or give no finite number, or the judge give no "
        "judgement (counted over ten iterations and at least 50 samples); they carry no loss. Beyond it the stage "
        "stops; 0: at the first, 1: only if all fail",
    )
    timeout_s: float | None = setting(
        120.0,
        gt=0,
        doc="timeout in seconds of one call of a user function; none: no limit, hangs go undetected",
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
    window: int = setting(
        20, ge=3, le=1_000_000, doc="iterations over which reward and true success are compared"
    )
    alarm_margin: float = setting(
        0.05,
        gt=0,
        doc="alarm: over the window success fell by this and the reward rose by this many standard deviations",
    )
    curiosity: CuriositySettings = setting(
        CuriositySettings(), doc="options of component curiosity"
    )
    coherence: CoherenceSettings = setting(
        CoherenceSettings(), doc="options of component coherence"
    )
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
                raise SettingsError(
                    f"reward_options.normalise: '{name}' is no component of rewards"
                )
        for name in self.cache:
            if name not in rewards and rewards != {
                "task": 1.0
            }:  # else functions may be handed in (Python)
                raise SettingsError(
                    f"reward_options.cache: '{name}' is no component of rewards; {suggest_name(name, rewards)}"
                )
