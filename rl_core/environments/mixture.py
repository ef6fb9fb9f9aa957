"""Mixture of environments that one policy learns in together.

Each environment has a label, and its levels are `label/level`. A level belongs to one environment, so curricula, seeds,
held-out episodes, checkpoints and reports treat a mixture as one environment with more levels; `find_part` returns
the environment that plays a level, with its tools, blocking, turn limit and rewards. Trajectories carry the label.
The episodes of an environment, and the random numbers that sample them, do not depend on the other environments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.environments.agent import Agent
from rl_core.environments.environment import (
    Demonstration,
    Environment,
    Episode,
    HeldOutSeparation,
)
from rl_core.environments.tools import Toolset
from rl_core.errors import SettingsError, suggest_name
from rl_core.settings import MixedEnvironmentSettings
from rl_core.settings.base import build_settings
from rl_core.settings.common import MIXTURE_ENVIRONMENT, check_mixture
from rl_core.storage.atomic_files import make_folder


@dataclass(frozen=True)
class MixturePart:
    """One environment of a mixture with its share of the episodes and its rewards."""

    environment: Environment
    label: str | None = None  # in levels, metrics and reports; None = the environment's name
    weight: float = 1.0  # relative share of the training episodes; 0 = only evaluated
    levels: Mapping[str, float] = field(default_factory=dict)  # level -> weight; {} = all, equally
    rewards: Mapping[str, float] = field(default_factory=dict)  # {} = the policy stage's
    # Options that differ from the policy stage's `reward_options`.
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None  # at most `sampling.max_turns`


class LabelledEnvironment(Environment):
    """An environment of a mixture: its levels carry its label."""

    name: str  # type: ignore[misc]  # the label

    def __init__(self, inner: Environment, settings: MixedEnvironmentSettings) -> None:
        super().__init__(inner.data)
        self.inner, self.settings = inner, settings
        self.name = settings.resolved_label
        for level in settings.levels:
            if level not in inner.levels:
                raise SettingsError(
                    f"levels.{level}: environment '{self.name}' has no such level; "
                    f"{suggest_name(level, inner.levels)}"
                )
        used = settings.levels or dict.fromkeys(inner.levels, 1.0)
        self._inner_levels = {f"{self.name}/{level}": level for level in used}
        self.levels = tuple(self._inner_levels)
        self.shares = {  # of the levels within the environment; they add up to 1
            f"{self.name}/{level}": weight / sum(used.values()) for level, weight in used.items()
        }
        self.blocking, self.knows_success = inner.blocking, inner.knows_success
        self.heldout_share, self.columns = inner.heldout_share, inner.columns
        self.splits_itself = inner.splits_itself

    @property
    def tools(self) -> Toolset:
        """Tools of the environment."""
        return self.inner.tools

    def iter_target_rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield the data rows of the environment."""
        return self.inner.iter_target_rows()

    def episode(self, seed: int, level: str) -> Episode:
        """Return a new episode."""
        return self.inner.episode(seed=seed, level=self._find_inner_level(level))

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return the demonstration of an episode, at the labelled level."""
        demonstration = self.inner.demonstration(seed, self._find_inner_level(level))
        return None if demonstration is None else dataclasses.replace(demonstration, level=level)

    def seeds(self, split: str) -> range:
        """Return the candidate seeds."""
        return self.inner.seeds(split)

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the seeds of a split at a level."""
        return self.inner.seeds_of(split, self._find_inner_level(level))

    def content(self, seed: int, level: str) -> Any:
        """Return the content of an episode."""
        return self.inner.content(seed, self._find_inner_level(level))

    def question(self, seed: int, level: str) -> str:
        """Compute the digest of an episode's question."""
        return self.inner.question(seed, self._find_inner_level(level))

    def held_out(self, level: str) -> HeldOutSeparation:
        """Return the separation of a level's held-out episodes."""
        return self.inner.held_out(self._find_inner_level(level))

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Write the environment's data into its part of the data stage's folder."""
        if type(self.inner).prepare is Environment.prepare:
            return {}
        path = build_part_folder(folder, self.name)
        make_folder(path)
        return self.inner.prepare(path, seed)

    def _find_inner_level(self, level: str) -> str:
        self.check_level(level)
        return self._inner_levels[level]


def build_part_folder(folder: Path, label: str) -> Path:
    """Return the folder of an environment's prepared data in that of the data stage."""
    return folder / "environments" / label


class MixtureEnvironment(Environment):
    """Several environments in one: `parts` are `LabelledEnvironment`."""

    name = MIXTURE_ENVIRONMENT

    def __init__(
        self,
        environments: Sequence[Any] | Mapping[str, Any],
        data: Path | None = None,
    ) -> None:
        """Build the parts.

        Args:
            environments: environments, `MixturePart`s, `MixedEnvironmentSettings` or dicts of them; or a mapping from
                labels to environments.
            data: folder prepared by the data stage.
        Raises: SettingsError for labels that are unusable or used twice, unknown levels, agents, and if every weight
            is 0.
        """
        super().__init__(data)
        items: list[Any] = list(environments)
        if isinstance(environments, Mapping):
            items = [_label_item(label, item) for label, item in environments.items()]
        if not items:
            raise SettingsError("environments: is empty; name at least one environment")
        self._parts: dict[str, LabelledEnvironment] = {}
        self._by_level: dict[str, LabelledEnvironment] = {}
        entries = []
        for index, item in enumerate(items):
            try:
                part = _build_part(item, data)
            except SettingsError as error:
                raise SettingsError(f"options.environments.{index}.{error}") from error
            entries.append(part.settings)
            self._parts[part.name] = part
            self._by_level |= dict.fromkeys(part.levels, part)
        try:
            check_mixture(entries)
        except SettingsError as error:
            raise SettingsError(f"options.environments.{error}") from error
        self.levels = tuple(self._by_level)
        self.blocking = any(part.blocking for part in self.parts)
        self.knows_success = all(part.knows_success for part in self.parts)
        columns = {part.columns for part in self.parts}
        self.columns = columns.pop() if len(columns) == 1 else None

    @property
    def parts(self) -> tuple[LabelledEnvironment, ...]:
        """The environments, in order."""
        return tuple(self._parts.values())

    @property
    def level_weights(self) -> dict[str, float]:
        """Weights of the levels that are trained on; those of an environment add up to its weight."""
        return {
            level: part.settings.weight * share
            for part in self.parts
            if part.settings.weight
            for level, share in part.shares.items()
        }

    @property
    def tools(self) -> Toolset:
        """Tools of all environments, for metrics; an episode has those of its environment alone."""
        tools = {name: tool for part in self.parts for name, tool in part.tools.tools.items()}
        return Toolset(tools.values())

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the import paths that the environments' names and options name."""
        from rl_core.environments import list_environment_code  # imports this module

        paths: list[str] = []
        for entry in options.get("environments", ()):
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                paths += list_environment_code(entry["name"], entry.get("options") or {})
        return tuple(paths)

    def find_part(self, level: str) -> LabelledEnvironment:
        """Return the environment that plays the level."""
        self.check_level(level)
        return self._by_level[level]

    def expand_levels(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Replace names of environments by their levels, which share the weight."""
        expanded: dict[str, float] = {}
        for name, weight in weights.items():
            part = self._parts.get(name)
            shares = {name: 1.0} if part is None else part.shares
            for level, share in shares.items():
                if level in expanded:
                    raise SettingsError(
                        f"levels: '{level}' is named twice, by itself and by its environment; name it once"
                    )
                expanded[level] = weight * share
        return expanded

    def iter_target_rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield the data rows of all environments."""
        for part in self.parts:
            yield from part.iter_target_rows()

    def episode(self, seed: int, level: str) -> Episode:
        """Return a new episode of the level's environment."""
        return self.find_part(level).episode(seed, level)

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return the demonstration of an episode."""
        return self.find_part(level).demonstration(seed, level)

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the seeds of a split at a level."""
        return self.find_part(level).seeds_of(split, level)

    def content(self, seed: int, level: str) -> Any:
        """Return the content of an episode."""
        return self.find_part(level).content(seed, level)

    def question(self, seed: int, level: str) -> str:
        """Compute the digest of an episode's question."""
        return self.find_part(level).question(seed, level)

    def held_out(self, level: str) -> HeldOutSeparation:
        """Return the separation of a level's held-out episodes."""
        return self.find_part(level).held_out(level)

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Write the data of every environment into its part of the folder; return the reports by label."""
        reports = {part.name: part.prepare(folder, seed) for part in self.parts}
        return {label: report for label, report in reports.items() if report}

    def check_level(self, level: str) -> None:
        """Raise SettingsError for an unknown level, with the environments that exist."""
        if level not in self._by_level:
            known = (*self._parts, *self.levels)
            raise SettingsError(
                f"no environment has the level '{level}'; {suggest_name(level, known)}"
            )


def mix_environments(
    environments: Iterable[Any] | Mapping[str, Any],
) -> Environment:
    """Build a mixture, with the errors of the argument `environment`. Raises: SettingsError."""
    items = environments if isinstance(environments, Mapping) else list(environments)
    try:
        return MixtureEnvironment(items)
    except SettingsError as error:
        text = str(error).removeprefix("options.environments.").removeprefix("environments: ")
        raise SettingsError(f"environment: {text}") from error


def _label_item(label: str, item: Any) -> MixturePart:
    if isinstance(item, MixturePart):
        return dataclasses.replace(item, label=label)
    return MixturePart(item, label=label)


def _build_part(item: Any, data: Path | None) -> LabelledEnvironment:
    """Build one part. Raises: SettingsError naming the field."""
    if isinstance(item, Environment):
        item = MixturePart(item)
    if isinstance(item, MixturePart):
        environment, name = item.environment, getattr(item.environment, "name", "")
        values = {key.name: getattr(item, key.name) for key in dataclasses.fields(item)}
        del values["environment"]
        if not isinstance(environment, Environment):
            raise SettingsError(
                f"environment: {environment!r} is not an rl_core.Environment; pass an instance"
            )
        if not values["label"]:
            values["label"] = str(name).rpartition(":")[2]
        settings = build_settings({**values, "name": str(name)}, MixedEnvironmentSettings)
    elif isinstance(item, Mapping | MixedEnvironmentSettings):
        from rl_core.environments import make_environment  # imports this module

        settings = build_settings(item, MixedEnvironmentSettings)
        _refuse_unmixable(settings.name)
        folder = build_part_folder(data, settings.resolved_label) if data is not None else None
        environment = make_environment(settings.name, settings.options, folder)
    else:
        raise SettingsError(
            f"environment: {type(item).__name__} is not an rl_core.Environment; pass instances, MixturePart or a "
            "mapping from labels to environments"
        )
    if isinstance(environment, MixtureEnvironment | Agent):
        _refuse_unmixable(environment.name)
    return LabelledEnvironment(environment, settings)


def _refuse_unmixable(name: str) -> None:
    if name == MIXTURE_ENVIRONMENT:
        raise SettingsError("name: a mixture within a mixture; list its environments directly")
    if name == "agent":
        raise SettingsError(
            "name: 'agent' is not supported among several environments: the agent plays its episodes; train it alone"
        )


def list_rewarded_parts(
    environment: Environment, weights: Mapping[str, float]
) -> list[tuple[Environment, Mapping[str, float]]]:
    """List the environments of a mixture, or the environment itself, each with the weights of its rewards.

    Args:
        weights: of environments without separate rewards.
    """
    if not isinstance(environment, MixtureEnvironment):
        return [(environment, weights)]
    return [(part.inner, part.settings.rewards or weights) for part in environment.parts]


def describe_parts(environment: Environment) -> list[dict[str, Any]]:
    """Describe the environments of a mixture as plain values, for the record of a run; [] for any other environment."""
    if not isinstance(environment, MixtureEnvironment):
        return []
    return [
        {
            **{k: v for k, v in dataclasses.asdict(part.settings).items() if k != "options"},
            "class": type(part.inner).__qualname__,
        }
        for part in environment.parts
    ]
