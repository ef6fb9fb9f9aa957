"""The settings that a sweep varies: lists and ranges in the values of `--set`.

    --set stages.policy.learning_rate=1e-4,3e-4,1e-3     a list
    --set stages.policy.learning_rate=1e-5..1e-3:5:log   a range: 5 points, spaced evenly in the logarithm
    --set stages.policy.group_size=4..8                  a range of whole numbers: each of them
    --set stages.policy.learning_rate=1e-5..1e-3:log     a range to draw from (random, bayes, halving)

A value without a comma outside of brackets and quotes, and without "..", is an ordinary override.

The next configuration of a sweep: in order from a grid, or by Optuna (random, Bayesian, successive halving).

A search is rebuilt from what the sweep's folder holds: configurations that were asked for before are told to it first,
and each new one is drawn with a seed of its own number, so that a sweep that was killed goes on to the same ones.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from rl_core.errors import SettingsError

Params: TypeAlias = dict[str, str]  # key -> value as YAML text

_NUMBER_PATTERN = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE_PATTERN = re.compile(rf"({_NUMBER_PATTERN})\.\.({_NUMBER_PATTERN})(?::(\d+))?(:log)?")
MAX_GRID_CONFIGURATIONS = 10_000  # configurations of a grid


@dataclass(frozen=True)
class Dimension:
    """One setting that varies, over a list of values or a range of numbers."""

    key: str
    choices: tuple[str, ...] = ()  # YAML texts; () = a range
    low: float = 0.0
    high: float = 0.0
    points: int | None = None  # of a range in a grid
    is_log: bool = False
    is_whole: bool = False

    @property
    def is_range(self) -> bool:
        """True = numbers between `low` and `high`."""
        return not self.choices

    def format_value(self, value: float | str) -> str:
        """A value as YAML text."""
        if isinstance(value, str):
            return value
        return str(int(value)) if self.is_whole else repr(float(value))

    def list_samples(self) -> tuple[str, ...]:
        """All values of a list; the middle of a range and its ends."""
        if not self.is_range:
            return self.choices
        middle = math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2
        return tuple(self.format_value(value) for value in (middle, self.low, self.high))

    def list_grid_values(self) -> tuple[str, ...]:
        """All values of a list; the points of a range. Raises: SettingsError for a range without points."""
        if not self.is_range:
            return self.choices
        if self.points is None and not self.is_whole:
            raise SettingsError(
                f"--set {self.key}: a grid needs the number of points of a range, as in "
                f"{self.low:g}..{self.high:g}:5{':log' * self.is_log}; or draw from it with --method random"
            )
        count = self.points or int(self.high - self.low) + 1
        shares = [index / max(1, count - 1) for index in range(count)]
        if self.is_log:
            values = [
                math.exp(math.log(self.low) + s * (math.log(self.high) - math.log(self.low)))
                for s in shares
            ]
            values[0], values[-1] = (self.low, self.high) if count > 1 else (self.low, self.low)
        else:
            values = [self.low + s * (self.high - self.low) for s in shares]
        rounded = [round(value) if self.is_whole else float(f"{value:.6g}") for value in values]
        return tuple(dict.fromkeys(self.format_value(value) for value in rounded))


def parse_set_options(texts: Iterable[str]) -> tuple[list[str], list[Dimension]]:
    """Ordinary overrides, and the settings that vary, of `--set` texts. Raises: SettingsError."""
    plain: list[str] = []
    dimensions: list[Dimension] = []
    for text in texts:
        key, equals, value = text.partition("=")
        found = _parse_dimension(key.strip(), value.strip()) if equals else None
        if found is None:
            plain.append(text)
        elif any(known.key == found.key for known in dimensions):
            raise SettingsError(f"--set {found.key}: varies twice; give all its values in one list")
        else:
            dimensions.append(found)
    return plain, dimensions


def _parse_dimension(key: str, value: str) -> Dimension | None:
    match = _RANGE_PATTERN.fullmatch(value)
    if match:
        return _parse_range(key, *match.groups())
    if ".." in value and re.match(rf"{_NUMBER_PATTERN}\.\.", value):
        raise SettingsError(
            f"--set {key}={value}: a range is LOW..HIGH, LOW..HIGH:POINTS or either with :log"
        )
    parts = split_list_text(value)
    if len(parts) < 2:
        return None
    if "" in parts:
        raise SettingsError(f"--set {key}={value}: a value of the list is empty")
    if len(set(parts)) < len(parts):
        raise SettingsError(f"--set {key}={value}: lists a value twice")
    return Dimension(key, tuple(parts))


def _parse_range(key: str, low: str, high: str, points: str | None, log: str | None) -> Dimension:
    bounds = float(low), float(high)
    if bounds[0] >= bounds[1]:
        raise SettingsError(f"--set {key}={low}..{high}: the first number must be below the second")
    if log and bounds[0] <= 0:
        raise SettingsError(f"--set {key}={low}..{high}:log: the logarithm needs numbers above 0")
    if points is not None and not 2 <= int(points) <= MAX_GRID_CONFIGURATIONS:
        raise SettingsError(
            f"--set {key}: a range has at least 2 points and at most {MAX_GRID_CONFIGURATIONS}"
        )
    is_whole = all(re.fullmatch(r"[-+]?\d+", text) for text in (low, high))
    return Dimension(key, (), *bounds, int(points) if points else None, bool(log), is_whole)


def split_list_text(text: str) -> list[str]:
    """Parts of a text between commas that stand outside of brackets, braces and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def build_grid(dimensions: Sequence[Dimension]) -> list[Params]:
    """Every combination, the last setting changing fastest. Raises: SettingsError for more than MOST."""
    values = [dimension.list_grid_values() for dimension in dimensions]
    if (count := math.prod(map(len, values))) > MAX_GRID_CONFIGURATIONS:
        raise SettingsError(
            f"the grid has {count:,} configurations, at most {MAX_GRID_CONFIGURATIONS:,} are taken; use --method random"
        )
    keys = [dimension.key for dimension in dimensions]
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*values)]


def parse_number(text: str) -> float | None:
    """A value as a number, for axes; None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


SearchMethod = Literal["grid", "random", "bayes", "halving"]
SEARCH_METHODS: tuple[SearchMethod, ...] = ("grid", "random", "bayes", "halving")

HALVING_FACTOR = 3  # one of ETA configurations goes on from a rung of successive halving
RUNG_SHARES = (
    1 / HALVING_FACTOR**2,
    1 / HALVING_FACTOR,
)  # shares of the training after which it decides


@dataclass
class PriorConfiguration:
    """A configuration that was asked for before."""

    params: Params
    values: list[float] = field(default_factory=list)  # of its finished seeds
    rungs: list[float] = field(
        default_factory=list
    )  # metric at each rung that the first seed reached
    is_finished: bool = False  # all its seeds have ended
    is_pruned: bool = False


class ConfigurationSearch(Protocol):
    """Source of configurations."""

    def suggest(self) -> Params | None:
        """The next configuration; None = there is no other."""

    def observe(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """The end of configuration `number`; value: mean over its seeds, None = it failed."""

    def should_continue(self, number: int, rung: int, value: float) -> bool:
        """False = configuration `number` stops at this rung (from 0), where its metric is `value`."""


class GridSearch:
    """Every combination, in order."""

    def __init__(
        self, dimensions: Sequence[Dimension], prior: Sequence[PriorConfiguration]
    ) -> None:
        self._configurations = build_grid(dimensions)
        self._next = len(prior)

    def suggest(self) -> Params | None:
        """The next combination."""
        if self._next >= len(self._configurations):
            return None
        self._next += 1
        return dict(self._configurations[self._next - 1])

    def observe(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Nothing: the order is fixed."""

    def should_continue(self, number: int, rung: int, value: float) -> bool:
        """Always."""
        return True


class OptunaSearch:
    """Configurations drawn by Optuna.

    random: uniform, or log-uniform. bayes: the tree-structured Parzen estimator (Bergstra et al. 2011, Algorithms for
    Hyper-Parameter Optimization, section 4). halving: the same, and asynchronous successive halving at RUNGS of the
    training (Li et al. 2020, arXiv:1810.05934, algorithm 2), decided by a configuration's first seed.
    """

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        prior: Sequence[PriorConfiguration],
        *,
        method: SearchMethod,
        trials: int,
        seed: int,
        minimize: bool,
    ) -> None:
        """Raises: SettingsError where Optuna is not installed."""
        self._optuna = optuna = _import_optuna()
        self._dimensions, self._method, self._trials, self._seed = dimensions, method, trials, seed
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=HALVING_FACTOR
        )
        self._study = optuna.create_study(
            direction="minimize" if minimize else "maximize",
            pruner=pruner,
            sampler=self._build_sampler(0),
        )
        self._distributions = {
            dimension.key: self._build_distribution(dimension) for dimension in dimensions
        }
        self._running_trials: dict[int, Any] = {}  # trials that run, by number
        for known in prior:
            self._restore_configuration(known)

    def _build_sampler(self, number: int) -> Any:
        text = f"{self._seed}:sweep:{number}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        samplers = self._optuna.samplers
        if self._method == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=max(3, self._trials // 4))

    def _build_distribution(self, dimension: Dimension) -> Any:
        kinds = self._optuna.distributions
        if not dimension.is_range:
            return kinds.CategoricalDistribution(dimension.choices)
        kind = kinds.IntDistribution if dimension.is_whole else kinds.FloatDistribution
        low, high = (int(n) if dimension.is_whole else n for n in (dimension.low, dimension.high))
        return kind(low, high, log=dimension.is_log)

    def _restore_configuration(self, configuration: PriorConfiguration) -> None:
        """Tell the study of a configuration of an earlier process, or take up one that was not finished."""
        values = {
            dimension.key: _parse_dimension_value(dimension, configuration.params[dimension.key])
            for dimension in self._dimensions
        }
        number = len(self._study.trials)
        if not configuration.is_finished:
            self._study.enqueue_trial(values)
            self._running_trials[number] = trial = self._study.ask(self._distributions)
            for rung, value in enumerate(configuration.rungs):
                trial.report(value, HALVING_FACTOR**rung)
            return
        states = self._optuna.trial.TrialState
        state = (
            states.PRUNED
            if configuration.is_pruned
            else states.COMPLETE
            if configuration.values
            else states.FAIL
        )
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=values,
                distributions=self._distributions,
                state=state,
                value=sum(configuration.values) / len(configuration.values)
                if configuration.values and not configuration.is_pruned
                else None,
                intermediate_values={
                    HALVING_FACTOR**rung: value for rung, value in enumerate(configuration.rungs)
                },
            )
        )

    def suggest(self) -> Params | None:
        """The next draw, given all that is known by now."""
        number = len(self._study.trials)
        if number >= self._trials:
            return None
        self._study.sampler = self._build_sampler(number)
        trial = self._study.ask(self._distributions)
        self._running_trials[number] = trial
        return {
            dimension.key: dimension.format_value(trial.params[dimension.key])
            for dimension in self._dimensions
        }

    def observe(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Tell the study."""
        trial = self._running_trials.pop(number, None)
        if trial is None:
            return  # recalled
        states = self._optuna.trial.TrialState
        if pruned:
            self._study.tell(trial, state=states.PRUNED)
        elif value is None:
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, value)

    def should_continue(self, number: int, rung: int, value: float) -> bool:
        """The pruner's decision."""
        trial = self._running_trials.get(number)
        if trial is None or self._method != "halving":
            return True
        trial.report(value, HALVING_FACTOR**rung)
        return not trial.should_prune()


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingsError(
            "--method random, bayes and halving need the package optuna; install it, or posttrain[sweep]. A grid needs "
            "nothing"
        ) from error
    return optuna


def _parse_dimension_value(dimension: Dimension, text: str) -> Any:
    if not dimension.is_range:
        return text
    return int(text) if dimension.is_whole else float(text)


def create_search(
    method: SearchMethod,
    dimensions: Sequence[Dimension],
    prior: Sequence[PriorConfiguration],
    options: Mapping[str, Any],
) -> ConfigurationSearch:
    """The search of a method; options: trials, seed, minimize (see `OptunaSearch`). Raises: SettingsError."""
    if method == "grid":
        return GridSearch(dimensions, prior)
    return OptunaSearch(dimensions, prior, method=method, **options)
