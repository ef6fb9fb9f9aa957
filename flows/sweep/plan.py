"""Description of a sweep, and the settings of one trial."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.sweep.search import Dimension, Params, SearchMethod, build_grid
from rl_core.environments import make_environment
from rl_core.errors import SettingsError, suggest_name
from tasks.config import PipelineSettings, digest_settings, load_settings
from tasks.stage_registry import list_training_stages

EVALUATION_METRICS = ("success", "reward")  # metrics of the evaluation stage
_FIXED_KEYS = ("name", "output", "tracking", "run", "seed", "seeds")


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Sweep as the user requested it."""

    config: str
    overrides: tuple[str, ...] = ()
    dimensions: tuple[Dimension, ...]
    method: SearchMethod = "grid"
    trials: int = 20  # drawn configurations; a grid has its own number
    seeds: int = 1  # of each configuration
    seed_stage: str | None = None  # the stage whose seed varies; None = every stage that trains
    metric: str = "success"  # of the newest policy's evaluation, or logged by a training stage
    minimize: bool = False
    finalists: int = 3  # configurations evaluated on fresh episodes
    is_remote: bool = False  # trials run on a cluster, so GPUs and servers need not be here

    def load_base_settings(self) -> PipelineSettings:
        """Load the settings without the varied ones. Raises: ConfigError; SettingsError if they cannot be swept."""
        settings = load_settings(self.config, self.overrides, check_servers=not self.is_remote)
        self._refuse_unsweepable_settings(settings)
        return settings

    def _refuse_unsweepable_settings(self, settings: PipelineSettings) -> None:
        trains = [
            stage for stage in list_training_stages() if getattr(settings.stages, stage) is not None
        ]
        if not trains:
            raise SettingsError("a sweep needs a stage that trains; the configuration names none")
        for dimension in self.dimensions:
            if dimension.key.split(".")[0] in _FIXED_KEYS:
                is_seed = dimension.key.startswith("seed")
                advice = "use --seeds N" if is_seed else "it does not affect results"
                raise SettingsError(f"--set {dimension.key}: cannot vary in a sweep; {advice}")
        if self.seed_stage is not None and self.seed_stage not in trains:
            raise SettingsError(
                f"--seed-stage {self.seed_stage}: {suggest_name(self.seed_stage, trains)}"
            )
        if self.metric in EVALUATION_METRICS and self.minimize:
            raise SettingsError(
                f"--minimize: a large {self.metric} is better; use it with a metric that training logs"
            )
        if self.metric in EVALUATION_METRICS and settings.stages.evaluate is None:
            raise SettingsError(
                f"--metric {self.metric} is measured by the stage evaluate; add stages.evaluate: {{}} to the "
                "configuration, or name a metric that training logs, as in --metric eval/loss --minimize"
            )

    def validate_trial_settings(self) -> None:
        """Check the settings of trials before any starts: all of a grid, else each varied setting separately.

        Raises: ConfigError for a combination of a grid, or for a setting without a valid value.
        """
        if self.method == "grid":
            for params in build_grid(self.dimensions):
                self.load_trial_settings(params, 0)
            return
        for dimension in self.dimensions:
            problem: SettingsError | None = None
            for value in dimension.list_samples():
                try:
                    self.load_trial_settings({dimension.key: value}, 0)
                    break
                except SettingsError as error:  # may be valid with a value of another setting
                    problem = problem or error
            else:
                assert problem is not None
                raise problem

    def compute_sweep_id(self, base: PipelineSettings) -> str:
        """Compute the name of the sweep's folder. More trials or seeds of the same space are the same sweep."""
        return digest_settings(
            {
                "settings": base,
                "dimensions": [dataclasses.asdict(dimension) for dimension in self.dimensions],
                "method": self.method,
                "metric": self.metric,
                "minimize": self.minimize,
                "stage": self.seed_stage,
            }
        )[:10]

    def load_trial_settings(self, params: Params, seed: int) -> PipelineSettings:
        """Load the settings of one trial; seed 0 is the configuration's own seed. Raises: ConfigError."""
        varied = [f"{key}={value}" for key, value in params.items()]
        settings = load_settings(
            self.config, [*self.overrides, *varied], check_servers=not self.is_remote
        )
        if seed == 0:
            return settings
        stages = [self.seed_stage] if self.seed_stage else list(list_training_stages())
        active = [stage for stage in stages if getattr(settings.stages, stage) is not None]
        seeds = {stage: (settings.find_stage_seed(stage) + seed) % 2**31 for stage in active}
        return dataclasses.replace(settings, seeds={**settings.seeds, **seeds})

    def locate_folder(self, base: PipelineSettings) -> Path:
        """Return the folder of the sweep."""
        return Path(base.output).resolve() / base.name / "sweeps" / self.compute_sweep_id(base)


def resolve_metric(requested: str | None, base: PipelineSettings) -> str:
    """Return the requested metric; None = success of the evaluation, or its reward if the environment has no verifier.

    Raises: SettingsError if success is requested by name and unknown.
    """
    if requested not in (None, "success") or base.stages.evaluate is None:
        return requested or "success"
    if make_environment(base.environment.name, base.environment.options).knows_success:
        return "success"
    if requested:
        raise SettingsError(
            f"--metric {requested}: environment '{base.environment.name}' has no verifier: set "
            "environment.options.verifier, or use --metric reward"
        )
    return "reward"


def format_configuration(params: Mapping[str, str]) -> str:
    """Format a configuration briefly: the last part of each key, and its value, numbers to three digits."""
    return ", ".join(
        f"{key.rpartition('.')[2]}={_shorten_number(value)}" for key, value in params.items()
    )


def _shorten_number(value: str) -> str:
    """Round a drawn number to three digits; keep what a person wrote."""
    if len(value) <= 10 or not re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", value):
        return value
    return f"{float(value):.3g}"
