"""The next configuration of a sweep: in order from a grid, or by Optuna (random, Bayesian, successive halving).

A search is rebuilt from what the sweep's folder holds: configurations that were asked for before are told to it first,
and each new one is drawn with a seed of its own number, so that a sweep that was killed goes on to the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from flows.sweep.space import Dimension, Params, grid
from rl_core.errors import SettingsError

__all__ = ["ETA", "METHODS", "RUNGS", "Asked", "Search", "make_search"]

Method = Literal["grid", "random", "bayes", "halving"]
METHODS: tuple[Method, ...] = ("grid", "random", "bayes", "halving")

ETA = 3  # one of ETA configurations goes on from a rung of successive halving
RUNGS = (1 / ETA**2, 1 / ETA)  # shares of the training after which it decides


@dataclass
class Asked:
    """A configuration that was asked for before."""

    params: Params
    values: list[float] = field(default_factory=list)  # of its finished seeds
    rungs: list[float] = field(default_factory=list)  # metric at each rung that the first seed reached
    is_over: bool = False  # all its seeds have ended
    is_pruned: bool = False


class Search(Protocol):
    """Source of configurations."""

    def ask(self) -> Params | None:
        """The next configuration; None = there is no other."""

    def tell(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """The end of configuration `number`; value: mean over its seeds, None = it failed."""

    def goes_on(self, number: int, rung: int, value: float) -> bool:
        """False = configuration `number` stops at this rung (from 0), where its metric is `value`."""


class GridSearch:
    """Every combination, in order."""

    def __init__(self, dimensions: Sequence[Dimension], asked: Sequence[Asked]) -> None:
        self._configurations = grid(dimensions)
        self._next = len(asked)

    def ask(self) -> Params | None:
        """The next combination."""
        if self._next >= len(self._configurations):
            return None
        self._next += 1
        return dict(self._configurations[self._next - 1])

    def tell(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Nothing: the order is fixed."""

    def goes_on(self, number: int, rung: int, value: float) -> bool:
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
        asked: Sequence[Asked],
        *,
        method: Method,
        trials: int,
        seed: int,
        minimize: bool,
    ) -> None:
        """Raises: SettingsError where Optuna is not installed."""
        self._optuna = optuna = _optuna()
        self._dimensions, self._method, self._trials, self._seed = dimensions, method, trials, seed
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA)
        self._study = optuna.create_study(
            direction="minimize" if minimize else "maximize", pruner=pruner, sampler=self._sampler(0)
        )
        self._distributions = {dimension.key: self._distribution(dimension) for dimension in dimensions}
        self._open: dict[int, Any] = {}  # trials that run, by number
        for known in asked:
            self._recall(known)

    def _sampler(self, number: int) -> Any:
        text = f"{self._seed}:sweep:{number}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        samplers = self._optuna.samplers
        if self._method == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=max(3, self._trials // 4))

    def _distribution(self, dimension: Dimension) -> Any:
        kinds = self._optuna.distributions
        if not dimension.is_range:
            return kinds.CategoricalDistribution(dimension.choices)
        kind = kinds.IntDistribution if dimension.is_whole else kinds.FloatDistribution
        low, high = (int(n) if dimension.is_whole else n for n in (dimension.low, dimension.high))
        return kind(low, high, log=dimension.is_log)

    def _recall(self, known: Asked) -> None:
        """Tell the study of a configuration of an earlier process, or take up one that was not finished."""
        values = {
            dimension.key: _typed(dimension, known.params[dimension.key]) for dimension in self._dimensions
        }  # fmt: skip
        number = len(self._study.trials)
        if not known.is_over:
            self._study.enqueue_trial(values)
            self._open[number] = trial = self._study.ask(self._distributions)
            for rung, value in enumerate(known.rungs):
                trial.report(value, ETA**rung)
            return
        states = self._optuna.trial.TrialState
        state = states.PRUNED if known.is_pruned else states.COMPLETE if known.values else states.FAIL
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=values, distributions=self._distributions, state=state,
                value=sum(known.values) / len(known.values) if known.values and not known.is_pruned else None,
                intermediate_values={ETA**rung: value for rung, value in enumerate(known.rungs)},
            )
        )  # fmt: skip

    def ask(self) -> Params | None:
        """The next draw, given all that is known by now."""
        number = len(self._study.trials)
        if number >= self._trials:
            return None
        self._study.sampler = self._sampler(number)
        trial = self._study.ask(self._distributions)
        self._open[number] = trial
        return {dimension.key: dimension.text(trial.params[dimension.key]) for dimension in self._dimensions}

    def tell(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Tell the study."""
        trial = self._open.pop(number, None)
        if trial is None:
            return  # recalled
        states = self._optuna.trial.TrialState
        if pruned:
            self._study.tell(trial, state=states.PRUNED)
        elif value is None:
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, value)

    def goes_on(self, number: int, rung: int, value: float) -> bool:
        """The pruner's decision."""
        trial = self._open.get(number)
        if trial is None or self._method != "halving":
            return True
        trial.report(value, ETA**rung)
        return not trial.should_prune()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingsError(
            "--method random, bayes and halving need the package optuna; install it, or posttrain[sweep]. A grid needs "
            "nothing"
        ) from error
    return optuna


def _typed(dimension: Dimension, text: str) -> Any:
    if not dimension.is_range:
        return text
    return int(text) if dimension.is_whole else float(text)


def make_search(
    method: Method, dimensions: Sequence[Dimension], asked: Sequence[Asked], options: Mapping[str, Any]
) -> Search:
    """The search of a method; options: trials, seed, minimize (see `OptunaSearch`). Raises: SettingsError."""
    if method == "grid":
        return GridSearch(dimensions, asked)
    return OptunaSearch(dimensions, asked, method=method, **options)
