"""Search space of a sweep, and the source of its configurations.

Values of `--set` that vary are lists and ranges:

    --set stages.policy.learning_rate=1e-4,3e-4,1e-3     a list
    --set stages.policy.learning_rate=1e-5..1e-3:5:log   a range: 5 points, spaced evenly in the logarithm
    --set stages.policy.group_size=4..8                  a range of integers: each of them
    --set stages.policy.learning_rate=1e-5..1e-3:log     a range to draw from (random, bayes, halving)

A value without ".." and without a comma outside brackets and quotes is an ordinary override.

Configurations come in order from a grid, or from Optuna (random, Bayesian, successive halving). A search is rebuilt
from the sweep's folder: it first observes the earlier configurations, and each new one is drawn with a seed derived
from its number. A killed sweep therefore resumes with the same configurations.
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

Params: TypeAlias = dict[str, str]  # key: value as YAML text
SearchMethod = Literal["grid", "random", "bayes", "halving"]
SEARCH_METHODS: tuple[SearchMethod, ...] = ("grid", "random", "bayes", "halving")

MAX_GRID_CONFIGURATIONS = 10_000
HALVING_FACTOR = 3  # one in so many configurations continues after a rung of successive halving
RUNG_SHARES = (1 / HALVING_FACTOR**2, 1 / HALVING_FACTOR)  # of the training

_NUMBER_PATTERN = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE_PATTERN = re.compile(rf"({_NUMBER_PATTERN})\.\.({_NUMBER_PATTERN})(?::(\d+))?(:log)?")


@dataclass(frozen=True)
class Dimension:
    """Setting that varies over a list of values or a range of numbers."""

    key: str
    choices: tuple[str, ...] = ()  # YAML texts; () = a range
    low: float = 0.0
    high: float = 0.0
    points: int | None = None  # of a range in a grid
    is_log: bool = False
    is_whole: bool = False

    @property
    def is_range(self) -> bool:
        """True if the values are numbers between `low` and `high`."""
        return not self.choices

    def format_value(self, value: float | str) -> str:
        """Format a value as YAML text."""
        if isinstance(value, str):
            return value
        return str(int(value)) if self.is_whole else repr(float(value))

    def list_samples(self) -> tuple[str, ...]:
        """Return all values of a list, or the middle of a range and its ends."""
        if not self.is_range:
            return self.choices
        middle = math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2
        return tuple(self.format_value(value) for value in (middle, self.low, self.high))

    def list_grid_values(self) -> tuple[str, ...]:
        """Return all values of a list, or the points of a range. Raises: SettingsError for a range without points."""
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
            log_low, log_high = math.log(self.low), math.log(self.high)
            values = [math.exp(log_low + share * (log_high - log_low)) for share in shares]
            values[0], values[-1] = (self.low, self.high) if count > 1 else (self.low, self.low)
        else:
            values = [self.low + share * (self.high - self.low) for share in shares]
        rounded = [round(value) if self.is_whole else float(f"{value:.6g}") for value in values]
        return tuple(dict.fromkeys(self.format_value(value) for value in rounded))


def parse_set_options(texts: Iterable[str]) -> tuple[list[str], list[Dimension]]:
    """Split `--set` texts into ordinary overrides and varied settings. Raises: SettingsError."""
    overrides: list[str] = []
    dimensions: list[Dimension] = []
    for text in texts:
        key, equals, value = text.partition("=")
        dimension = _parse_dimension(key.strip(), value.strip()) if equals else None
        if dimension is None:
            overrides.append(text)
        elif any(other.key == dimension.key for other in dimensions):
            raise SettingsError(
                f"--set {dimension.key}: varies twice; give all its values in one list"
            )
        else:
            dimensions.append(dimension)
    return overrides, dimensions


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
    """Split a text at commas outside brackets, braces and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth <= 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def build_grid(dimensions: Sequence[Dimension]) -> list[Params]:
    """Build every combination; the last setting changes fastest. Raises: SettingsError for too many."""
    values = [dimension.list_grid_values() for dimension in dimensions]
    count = math.prod(map(len, values))
    if count > MAX_GRID_CONFIGURATIONS:
        raise SettingsError(
            f"the grid has {count:,} configurations, the limit is {MAX_GRID_CONFIGURATIONS:,}; use --method random"
        )
    keys = [dimension.key for dimension in dimensions]
    combinations = itertools.product(*values)
    return [dict(zip(keys, combination, strict=True)) for combination in combinations]


def parse_number(text: str) -> float | None:
    """Parse a value as a number, for axes; None if it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass
class PriorConfiguration:
    """Configuration of an earlier process."""

    params: Params
    values: list[float] = field(default_factory=list)  # of its finished seeds
    rungs: list[float] = field(default_factory=list)  # metric at each rung of the first seed
    is_finished: bool = False  # all its seeds have ended
    is_pruned: bool = False


class ConfigurationSearch(Protocol):
    """Source of configurations."""

    def suggest(self) -> Params | None:
        """Return the next configuration; None if there is none."""

    def observe(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Record the end of a configuration; value: mean over its seeds, None = it failed."""

    def should_continue(self, number: int, rung: int, value: float) -> bool:
        """Return False if a configuration stops at this rung (from 0), where its metric is `value`."""


class GridSearch:
    """Search over every combination, in order."""

    def __init__(
        self, dimensions: Sequence[Dimension], prior: Sequence[PriorConfiguration]
    ) -> None:
        self._configurations = build_grid(dimensions)
        self._next = len(prior)

    def suggest(self) -> Params | None:
        """Return the next combination."""
        if self._next >= len(self._configurations):
            return None
        self._next += 1
        return dict(self._configurations[self._next - 1])

    def observe(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Ignore results: the order is fixed."""

    def should_continue(self, number: int, rung: int, value: float) -> bool:
        """Return True."""
        return True


class OptunaSearch:
    """Search with configurations drawn by Optuna.

    random: uniform, or log-uniform. bayes: the tree-structured Parzen estimator (Bergstra et al. 2011, Algorithms for
    Hyper-Parameter Optimization, section 4). halving: the same, with asynchronous successive halving at RUNG_SHARES of
    the training (Li et al. 2020, arXiv:1810.05934, algorithm 2), decided by a configuration's first seed.
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
        """Create the study and restore the prior configurations. Raises: SettingsError if Optuna is not installed."""
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
        self._running_trials: dict[int, Any] = {}  # by number
        for configuration in prior:
            self._restore_configuration(configuration)

    def _build_sampler(self, number: int) -> Any:
        text = f"{self._seed}:sweep:{number}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        samplers = self._optuna.samplers
        if self._method == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=max(3, self._trials // 4))

    def _build_distribution(self, dimension: Dimension) -> Any:
        distributions = self._optuna.distributions
        if not dimension.is_range:
            return distributions.CategoricalDistribution(dimension.choices)
        if dimension.is_whole:
            low, high = int(dimension.low), int(dimension.high)
            return distributions.IntDistribution(low, high, log=dimension.is_log)
        return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)

    def _restore_configuration(self, configuration: PriorConfiguration) -> None:
        """Add a configuration of an earlier process to the study, or resume one that was not finished."""
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
        mean = None
        if configuration.is_pruned:
            state = states.PRUNED
        elif configuration.values:
            state = states.COMPLETE
            mean = sum(configuration.values) / len(configuration.values)
        else:
            state = states.FAIL
        rungs = {HALVING_FACTOR**rung: metric for rung, metric in enumerate(configuration.rungs)}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=values,
                distributions=self._distributions,
                state=state,
                value=mean,
                intermediate_values=rungs,
            )
        )

    def suggest(self) -> Params | None:
        """Draw the next configuration, given all results so far."""
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
        """Report the result to the study."""
        trial = self._running_trials.pop(number, None)
        if trial is None:
            return  # restored from an earlier process
        states = self._optuna.trial.TrialState
        if pruned:
            self._study.tell(trial, state=states.PRUNED)
        elif value is None:
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, value)

    def should_continue(self, number: int, rung: int, value: float) -> bool:
        """Return the pruner's decision."""
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
            "--method random, bayes and halving need the package optuna; install it, or posttrain[sweep]. "
            "--method grid does not need it"
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
    """Create the search of a method. Raises: SettingsError.

    Args:
        options: trials, seed, minimize (see `OptunaSearch`).
    """
    if method == "grid":
        return GridSearch(dimensions, prior)
    return OptunaSearch(dimensions, prior, method=method, **options)
