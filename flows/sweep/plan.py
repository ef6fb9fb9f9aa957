"""Description of a sweep, and the settings of one trial of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.sweep.search import Method
from flows.sweep.space import Dimension, Params, grid
from rl_core.environments import make
from rl_core.errors import SettingsError, nearest
from tasks.config import PipelineSettings, load, resolve, settings_digest
from tasks.stage_registry import training_stages

__all__ = ["EVALUATED", "SweepPlan", "label_of", "metric_of"]

EVALUATED = ("success", "reward")  # metrics of the evaluation stage
_PLACES = ("name", "output", "tracking", "run", "seed", "seeds")


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """One sweep, as it was asked for."""

    config: str
    overrides: tuple[str, ...] = ()
    dimensions: tuple[Dimension, ...]
    method: Method = "grid"
    trials: int = 20  # configurations that are drawn; a grid has its own number
    seeds: int = 1  # of each configuration
    seed_stage: str | None = None  # the stage whose seed varies; None = every stage that trains
    metric: str = "success"  # of the newest policy's evaluation, or a metric that a training stage logs
    minimize: bool = False
    finalists: int = 3  # configurations that play fresh episodes
    elsewhere: bool = False  # trials run on the nodes of a cluster, so GPUs and servers need not be here

    def base(self) -> PipelineSettings:
        """Settings without those that vary. Raises: ConfigError; SettingsError where they cannot be swept."""
        settings = load(self.config, self.overrides, ask_servers=not self.elsewhere)
        self._check(settings)
        return settings

    def _check(self, settings: PipelineSettings) -> None:
        trains = [stage for stage in training_stages() if getattr(settings.stages, stage) is not None]
        if not trains:
            raise SettingsError("a sweep needs a stage that trains; the configuration names none")
        for dimension in self.dimensions:
            if dimension.key.split(".")[0] in _PLACES:
                advice = "use --seeds N" if dimension.key.startswith("seed") else "it changes nothing that is computed"
                raise SettingsError(f"--set {dimension.key}: cannot vary in a sweep; {advice}")
        if self.seed_stage is not None and self.seed_stage not in trains:
            raise SettingsError(f"--seed-stage {self.seed_stage}: {nearest(self.seed_stage, trains)}")
        if self.metric in EVALUATED and self.minimize:
            raise SettingsError(f"--minimize: {self.metric} is to be large; name a metric that training logs with it")
        if self.metric in EVALUATED and settings.stages.evaluate is None:
            raise SettingsError(
                f"--metric {self.metric} is measured by the stage evaluate; add stages.evaluate: {{}} to the "
                "configuration, or name a metric that training logs, as in --metric eval/loss --minimize"
            )

    def check_settings(self) -> None:
        """Look at what trials will be set to, before any begins: all of a grid, else each setting by itself.

        Raises: ConfigError for a combination of a grid, or a setting none of whose values can be.
        """
        if self.method == "grid":
            for params in grid(self.dimensions):
                self.settings_of(params, 0)
            return
        for dimension in self.dimensions:
            problem: SettingsError | None = None
            for value in dimension.samples():
                try:
                    self.settings_of({dimension.key: value}, 0)
                    break
                except SettingsError as error:  # it may go together with a value of another setting
                    problem = problem or error
            else:
                assert problem is not None
                raise problem

    def identity(self, base: PipelineSettings) -> str:
        """Name of the sweep's folder. More trials or seeds of the same space are the same sweep."""
        return settings_digest(
            {
                "settings": resolve(base), "dimensions": [dataclasses.asdict(one) for one in self.dimensions],
                "method": self.method, "metric": self.metric, "minimize": self.minimize, "stage": self.seed_stage,
            }
        )[:10]  # fmt: skip

    def settings_of(self, params: Params, seed: int) -> PipelineSettings:
        """Settings of one trial; `seed` counts from 0, which is the configuration's own. Raises: ConfigError."""
        varied = [f"{key}={value}" for key, value in params.items()]
        settings = load(self.config, [*self.overrides, *varied], ask_servers=not self.elsewhere)
        if seed == 0:
            return settings
        stages = [self.seed_stage] if self.seed_stage else list(training_stages())
        active = [stage for stage in stages if getattr(settings.stages, stage) is not None]
        seeds = {stage: (settings.seed_of(stage) + seed) % 2**31 for stage in active}
        return dataclasses.replace(settings, seeds={**settings.seeds, **seeds})

    def home(self, base: PipelineSettings) -> Path:
        """Folder of the sweep."""
        return Path(base.output).resolve() / base.name / "sweeps" / self.identity(base)


def metric_of(asked: str | None, base: PipelineSettings) -> str:
    """The metric that was asked for; None = success of the evaluation, or its reward where nothing tells success.

    Raises: SettingsError where success is asked for by name and nothing tells it.
    """
    if asked not in (None, "success") or base.stages.evaluate is None:
        return asked or "success"
    if make(base.environment.name, base.environment.options).knows_success:
        return "success"
    if asked:
        raise SettingsError(
            f"--metric {asked}: nothing tells it in environment '{base.environment.name}': set "
            "environment.options.verifier, or choose by --metric reward"
        )
    return "reward"


def label_of(params: Mapping[str, str]) -> str:
    """A configuration in a few words: the last part of each key, and its value, numbers to three digits."""
    return ", ".join(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in params.items())


def _short(value: str) -> str:
    """A drawn number to three digits; what a person wrote stays as it is."""
    if len(value) <= 10 or not re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", value):
        return value
    return f"{float(value):.3g}"
