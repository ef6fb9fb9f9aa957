"""Settings of rewards: verifiers that check answers, other components, and the orchestrator that combines them.

Verifiers compare answers with a column of the data, by rule, by tests or by a judge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.base import Settings, setting
from rl_core.settings.defaults import MODEL_DEFAULTS, is_unresolved
from rl_core.settings.patterns import compile_pattern

JudgeMode = Literal["score", "rubric", "ranking", "pairwise"]
AnswerLocation = Literal["auto", "whole", "tag", "boxed", "hashes", "last_line", "last_number"]

_FIND_DOC = (
    "where the answer is in the text after the thought: tag (<answer>...</answer>), boxed (\\boxed{...}), hashes "
    "(after ####), last_line, last_number, whole; auto: the first of tag, boxed, hashes that occurs, else whole"
)
# Stands for the reader of scores in `rewards.judges.replies`, which reads more than the pattern says.
DEFAULT_SCORE_PATTERN = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
_COLUMN_DOC = "column of the right answer; default: the environment's target"


def check_pattern(pattern: str | None) -> None:
    """Raise SettingsError if the setting `pattern` is set and not a regular expression that can be compiled."""
    if not pattern:
        return
    try:
        compile_pattern(pattern)
    except SettingsError as error:
        raise SettingsError(f"pattern: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ExactSettings(Settings):
    """Verifier exact: the answer equals the target."""

    find: AnswerLocation = setting("auto", doc=_FIND_DOC)
    column: str | None = setting(None, doc=_COLUMN_DOC)
    ignore_case: bool = setting(True, doc="ignore case; white space is always ignored")


@dataclass(frozen=True, kw_only=True)
class NumericSettings(Settings):
    """Verifier numeric: the answer's number equals the target's."""

    find: AnswerLocation = setting(
        "auto", doc=f"{_FIND_DOC}; of several numbers the last one counts"
    )
    column: str | None = setting(
        None, doc=f"{_COLUMN_DOC}; the part after #### if there is one, as in GSM8K"
    )
    tolerance: float = setting(
        0.0, ge=0, doc="largest relative difference from the target; 0: equal"
    )


@dataclass(frozen=True, kw_only=True)
class RegexSettings(Settings):
    """Verifier regex: the text after the thought matches a pattern."""

    pattern: str | None = setting(
        None, doc="regular expression; default: the column contains one for each row"
    )
    column: str | None = setting(None, doc="column of patterns; default: the environment's target")
    whole: bool = setting(False, doc="the complete text must match; default: any part of it")

    def check(self) -> None:
        """Check that the pattern compiles."""
        check_pattern(self.pattern)


@dataclass(frozen=True, kw_only=True)
class MathSettings(Settings):
    """Verifier math: the answer is mathematically equal to the target, by the package math-verify."""

    column: str | None = setting(None, doc=_COLUMN_DOC)
    timeout_s: float = setting(
        10.0,
        gt=0,
        doc="time limit of one comparison in seconds; above it the answer counts as wrong",
    )
    workers: int = setting(2, ge=1, doc="child processes")
    memory_gib: float = setting(2.0, gt=0, doc="address space limit of a child process in GiB")


@dataclass(frozen=True, kw_only=True)
class CodeSettings(Settings):
    """Verifier code: the program in the answer passes the row's tests, in child processes with limits (no sandbox)."""

    column: str = setting(
        "tests",
        doc="column of tests: Python statements, pytest or unittest tests, HumanEval's check, pairs of input and "
        "output, calls of fn_name with inputs and outputs; as values or as JSON text",
    )
    partial: bool = setting(
        False, doc="reward the share of tests that pass; default: 1 if all pass, else 0"
    )
    timeout_s: float = setting(10.0, gt=0, doc="time limit of one program in seconds")
    memory_gib: float = setting(1.0, gt=0, doc="address space limit of a program in GiB")
    workers: int = setting(2, ge=1, doc="programs that run concurrently")


@dataclass(frozen=True, kw_only=True)
class JudgeCriterion(Settings):
    """Criterion of a rubric."""

    name: str = setting(doc="short name, in the judge's reply and in metrics")
    description: str = setting("", doc="what the judge is to look for")
    weight: float = setting(1.0, gt=0, doc="weight in the mean of the criteria")


DEFAULT_JUDGE_PROMPT = (
    "Question:\n{prompt}\n\nReference answer:\n{target}\n\nAnswer to grade:\n{completion}\n\n"
    "Grade the answer from 0 (wrong) to 10 (right and complete). End with a line 'score: NUMBER'."
)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """Judge: a model, behind an OpenAI-compatible URL or in this process, that scores or compares answers."""

    mode: JudgeMode = setting(
        "score",
        doc="score: one number for each answer, with `prompt`; rubric: one for each of `criteria`; ranking: all "
        "samples of a prompt ranked in one request; pairwise: two samples a request, in both orders",
    )
    url: str | None = setting(
        None,
        doc="base URL of the server, such as http://127.0.0.1:8000/v1; /v1 is added to one without a path",
    )
    model: str | None = setting(None, doc="the server's name for the model")
    path: str | None = setting(
        None,
        doc="folder or hub name of a judge that runs in this process, on the same engine as rollouts; instead of url",
    )
    prompt: str = setting(
        DEFAULT_JUDGE_PROMPT,
        doc="prompt of mode score; {prompt}, {completion}, {target} and the row's columns are replaced",
    )
    instructions: str = setting(
        "",
        doc="what makes an answer good, for the other modes; {target} and the row's columns are replaced",
    )
    criteria: tuple[JudgeCriterion, ...] = setting(
        (), doc="criteria of a rubric; the judge reads them in random order"
    )
    system: str = setting("", doc="system message of the judge")
    lowest: float = setting(0.0, doc="score that becomes reward 0 (score, rubric)")
    highest: float = setting(10.0, doc="score that becomes reward 1 (score, rubric)")
    pattern: str = setting(
        DEFAULT_SCORE_PATTERN,
        doc="regular expression whose first group is the score, in the text after the thought; its last match counts. "
        "The default stands for the last number after 'score:', with its sign and exponent",
    )
    orders: int = setting(
        1,
        ge=1,
        le=16,
        doc="requests that show the criteria or the samples in different random orders; their verdicts are averaged "
        "(rubric, ranking)",
    )
    opponents: int | None = setting(
        None,
        ge=1,
        doc="samples that each sample is compared with, rounded up to an even number (pairwise); default: all others",
    )
    structured: bool = setting(
        False,
        doc="the reply is the verdict alone, a JSON object of a fixed form (response_format of the server; in this "
        "process by the package llguidance): short, and never without a verdict, but also without reasons; a ranking "
        "is then by grades from 0 to 100",
    )
    max_calls: int | None = setting(
        None,
        ge=1,
        doc="budget of requests of a run, retries included; the stage stops with an error before it sends more. "
        "Cached judgements are free; default: no limit",
    )
    labels: str | None = setting(
        None,
        doc="file of human labels, preference pairs or scored answers (data.md); before training, the agreement of the "
        "judge with them is measured and printed",
    )
    min_agreement: float = setting(
        0.0,
        ge=0,
        le=1,
        doc="refuse to train on a judge whose agreement with `labels` is lower; 0: warn if its 95% interval includes "
        "0.5, chance",
    )
    max_tokens: int = setting(
        512,
        ge=1,
        doc="length of a judgement; a longer one is cut and does not count. Sent as max_completion_tokens to models "
        "that take only that",
    )
    temperature: float = setting(
        0.0, ge=0, doc="temperature of the judge; left out for models that refuse it"
    )
    concurrency: int = setting(
        8, ge=1, le=256, doc="concurrent requests; of a local judge, answers decoded together"
    )
    timeout_s: float = setting(
        60.0, gt=0, doc="time limit of one request in seconds, even if the answer arrives slowly"
    )
    retries: int = setting(
        3, ge=0, le=20, doc="retries of a request that failed or whose reply has no verdict"
    )
    retry_delay_s: float = setting(
        1.0, gt=0, doc="wait before the first retry; doubles with each retry"
    )
    key_variable: str | None = setting(
        None, doc="environment variable with the API key; the key itself is never stored"
    )
    cache: str | None = setting(
        None,
        doc="cache folder of judgements, keyed by content; default: posttrain/judgements in the user's cache",
    )
    cache_entries: int = setting(
        1_000_000, ge=1, doc="judgements in that folder; the oldest are deleted beyond it"
    )

    def check(self) -> None:
        """Check scale, pattern and criteria, and refuse settings that the mode or a local judge would ignore."""
        if self.lowest >= self.highest:
            raise SettingsError(f"lowest: {self.lowest} must be below highest {self.highest}")
        names = [criterion.name.strip().casefold() for criterion in self.criteria]
        if self.mode == "rubric" and not names:
            raise SettingsError(
                "criteria: a rubric needs at least one; write [{name: correct, description: ..., weight: 2}]"
            )
        if "" in names or len(set(names)) < len(names):
            raise SettingsError(f"criteria: names {names} must be different and not empty")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        used = {
            "prompt": ("score",),
            "pattern": ("score",),
            "lowest": ("score", "rubric"),
            "highest": ("score", "rubric"),
            "criteria": ("rubric",),
            "orders": ("rubric", "ranking"),
            "opponents": ("pairwise",),
            "instructions": ("rubric", "ranking", "pairwise"),
        }
        for name, modes in used.items():
            value = getattr(self, name)
            value = tuple(value) if isinstance(value, list) else value
            if self.mode not in modes and value != defaults[name]:
                raise SettingsError(
                    f"{name}: not used by mode {self.mode}, only by {', '.join(modes)}; remove it"
                )
        for name in (
            ("url", "model", "key_variable", "timeout_s", "retries", "retry_delay_s")
            if self.path is not None
            else ()
        ):
            if getattr(self, name) != defaults[name]:
                raise SettingsError(
                    f"{name}: not used by a judge in this process (path), only by one behind a url; remove one"
                )
        if self.min_agreement and self.labels is None:
            raise SettingsError("min_agreement: needs labels, a file of human labels")
        if self.structured and self.pattern != DEFAULT_SCORE_PATTERN:
            raise SettingsError(
                "pattern: not used with structured, whose reply has a fixed form; remove one"
            )
        self._check_pattern()

    def _check_pattern(self) -> None:
        if self.pattern == DEFAULT_SCORE_PATTERN:
            return
        try:
            num_groups = compile_pattern(self.pattern).groups
        except SettingsError as error:
            raise SettingsError(f"pattern: {error}") from None
        if num_groups < 1:
            raise SettingsError(
                f"pattern: {self.pattern!r} has no group; put the score in parentheses"
            )

    @property
    def compares(self) -> bool:
        """True if samples of one prompt are compared with each other."""
        return self.mode in ("ranking", "pairwise")


@dataclass(frozen=True, kw_only=True)
class ProcessRewardSettings(Settings):
    """Process reward: scores of the steps of a completion."""

    function: str | None = setting(
        None,
        is_code=True,
        doc="function of (steps, trajectory) that returns one number for each step, as 'steps.py:check'; default: the "
        "reward model, trained with `loss: process`",
    )
    delimiter: str = setting(
        "\n", doc="text that ends a step; blank steps belong to the one before"
    )
    aggregate: Literal["sum", "mean", "min"] = setting(
        "mean",
        doc="value of a completion, and of the steps after one: sum (arXiv:2402.03300), which pays for more steps; "
        "mean; min (arXiv:2504.15275), the worst step",
    )
    credit: Literal["steps", "rollout"] = setting(
        "steps",
        doc="steps: each token has the advantage of its step, or with a critic the reward at its end; rollout: the "
        "value is a reward of the whole completion, as of any other component",
    )

    def check(self) -> None:
        """Check that the delimiter ends steps."""
        if not self.delimiter:
            raise SettingsError("delimiter: is empty; name the text that ends a step")
        if self.function is None and self.delimiter != "\n":
            raise SettingsError(
                "delimiter: a reward model of steps was trained on steps that end with a line; set function, or leave "
                "delimiter out"
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
        0.5, ge=0, doc="penalty per answer that differs from the previous one"
    )

    def check(self) -> None:
        """Check that the band is not empty."""
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
        """Check that the pattern compiles."""
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
        """Check that `free` is below `limit`."""
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
        doc="share of samples that may fail: a user function raises, hangs or returns no finite "
        "number, a reward is beyond +-1e12, or the judge gives no score (over ten "
        "iterations and at least 50 samples); they carry no loss. Above it the stage stops; "
        "0: at the first, 1: only if all fail",
    )
    timeout_s: float | None = setting(
        120.0,
        gt=0,
        doc="time limit of one call of a user function in seconds; none: no limit, and hangs go undetected",
    )
    cache: tuple[str, ...] = setting(
        (),
        doc="user functions of `rewards` whose values are cached, in memory and in checkpoints; "
        "they must be pure: a value depends only on the sample's texts, tools, outcome and "
        "row",
    )
    cache_entries: int = setting(
        100_000,
        ge=1,
        le=10_000_000,
        doc="cached values per function, 24 bytes each; the oldest are dropped",
    )
    window: int = setting(
        20, ge=3, le=1_000_000, doc="iterations over which reward and true success are compared"
    )
    alarm_margin: float = setting(
        0.05,
        gt=0,
        doc="alarm if, over the window, success fell by this and the reward rose by this many standard deviations",
    )
    curiosity: CuriositySettings = setting(
        CuriositySettings(), doc="options of component curiosity"
    )
    coherence: CoherenceSettings = setting(
        CoherenceSettings(), doc="options of component coherence"
    )
    tool_use: ToolUseSettings = setting(ToolUseSettings(), doc="options of component tool_use")
    format: FormatSettings = setting(FormatSettings(), doc="options of component format")
    length: LengthSettings = setting(LengthSettings(), doc="options of component length")
    exact: ExactSettings = setting(ExactSettings(), doc="options of component exact")
    numeric: NumericSettings = setting(NumericSettings(), doc="options of component numeric")
    regex: RegexSettings = setting(RegexSettings(), doc="options of component regex")
    math: MathSettings = setting(MathSettings(), doc="options of component math")
    code: CodeSettings = setting(CodeSettings(), doc="options of component code")
    judge: JudgeSettings = setting(JudgeSettings(), doc="options of component judge")
    process: ProcessRewardSettings = setting(
        ProcessRewardSettings(), doc="options of component process"
    )

    def check_components(self, rewards: Mapping[str, float]) -> None:
        """Raise SettingsError for options of components that the policy's rewards do not have."""
        for name in self.normalise:
            if name not in rewards:
                raise SettingsError(
                    f"reward_options.normalise: '{name}' is not a component of rewards"
                )
        if rewards == {"task": 1.0}:
            return  # functions may be passed in Python
        for name in self.cache:
            if name not in rewards:
                raise SettingsError(
                    f"reward_options.cache: '{name}' is not a component of rewards; {suggest_name(name, rewards)}"
                )
