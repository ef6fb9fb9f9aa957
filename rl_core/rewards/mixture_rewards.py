"""Rewards of a mixture: each environment has its components, weights, running statistics and hacking monitor."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, FailedEpisode
from rl_core.environments.mixture import MixtureEnvironment
from rl_core.errors import RewardError, SettingsError, suggest_name
from rl_core.models.hidden_states import TurnEmbedder, TurnEmbeddings
from rl_core.rewards.components import RewardComponent
from rl_core.rewards.judges.clients import CallBudget
from rl_core.rewards.judges.judge_reward import JudgeReward
from rl_core.rewards.model_components import Scorer
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.process_reward import DecodeIds, StepScorer
from rl_core.rewards.user_function import RewardFunction
from rl_core.settings import PolicySettings, RewardSettings, build_settings
from rl_core.settings.base import Settings
from rl_core.types import Rollout, RolloutGroup


class _CollectedFailures(EpisodeFailureMonitor):
    """Failures of one environment's rewards, counted by the mixture together with the others'."""

    def __init__(self, shared: EpisodeFailureMonitor) -> None:
        super().__init__(shared.max_share, shared.setting, shared.error)
        self._shared = shared
        self.pending: list[FailedEpisode] = []

    def has_too_many(self, failed: int, played: int) -> bool:
        """Return True only if every sample failed: otherwise the mixture decides."""
        return failed == played

    def close_collection(
        self, failed: Sequence[FailedEpisode], played: int, levels: Sequence[str] = ()
    ) -> list[str]:
        """Collect the failures for the mixture."""
        self.pending += failed
        self.total = self._shared.total + len(self.pending)
        return [""] * len(failed)


class MixtureRewards(RewardOrchestrator):
    """Rewards of a mixture of environments: one orchestrator for each, by label."""

    def __init__(
        self,
        build_part: Callable[[str, EpisodeFailureMonitor], RewardOrchestrator],
        labels: Sequence[str],
        max_failed_share: float,
    ) -> None:
        """Build the orchestrators.

        Args:
            build_part: builds the orchestrator of an environment with this monitor.
            max_failed_share: of all samples of the mixture.
        """
        self.failures = EpisodeFailureMonitor(
            max_failed_share, setting="reward_options.max_failed_share", error=RewardError
        )
        self._collected = {label: _CollectedFailures(self.failures) for label in labels}
        self.parts = {label: build_part(label, self._collected[label]) for label in labels}
        self._share_judge_budgets()

    @property
    def components(self) -> dict[str, RewardComponent]:  # type: ignore[override]
        """Components by name; one that several environments have is that of the first."""
        names: dict[str, RewardComponent] = {}
        for part in self.parts.values():
            for name, component in part.components.items():
                names.setdefault(name, component)
        return names

    @property
    def weights(self) -> dict[str, float]:  # type: ignore[override]
        """Current weights by name; those of a component in several environments are of the first."""
        names: dict[str, float] = {}
        for part in self.parts.values():
            for name, weight in part.weights.items():
                names.setdefault(name, weight)
        return names

    @property
    def needs_states(self) -> bool:
        """True = `score` needs `embed`."""
        return any(part.needs_states for part in self.parts.values())

    def check_environment(self, environment: Environment) -> None:
        """Check every environment with its components."""
        for part in environment.parts:
            try:
                self.parts[part.name].check_environment(part)
            except SettingsError as error:
                raise SettingsError(f"environment '{part.name}': {error}") from error

    def calibrate_judges(self) -> None:
        """Measure the judges of every environment; see `RewardOrchestrator.calibrate_judges`."""
        for part in self.parts.values():
            part.calibrate_judges()

    def check_step_scorer(self) -> None:
        """Check the process rewards of every environment."""
        for part in self.parts.values():
            part.check_step_scorer()

    def set_weights(self, changes: Mapping[str, float]) -> None:
        """Set the weights to the initial ones with these changes, in every environment that has the component."""
        known = {name for part in self.parts.values() for name in part._base}
        for name in changes:
            if name not in known:
                raise SettingsError(
                    f"rewards.{name}: no component to weigh; {suggest_name(name, known)}"
                )
        for part in self.parts.values():
            part.set_weights({n: weight for n, weight in changes.items() if n in part._base})

    def score(
        self,
        groups: Iterable[RolloutGroup],
        *,
        embed: TurnEmbedder | None = None,
        penalties: Mapping[str, RewardComponent] | None = None,
    ) -> dict[str, float]:
        """Score each environment's groups with its rewards; see `RewardOrchestrator.score`.

        Returns: reward/mean and reward/std over all rollouts; of the other metrics, the means over the environments
            that have them, weighted by rollouts.
        """
        groups = list(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return {}
        states = self._compute_states(rollouts, embed)
        state_of = dict(zip(map(id, rollouts), states, strict=True)) if states else {}
        parts: list[tuple[int, dict[str, float]]] = []
        failed: list[FailedEpisode] = []
        try:
            for label, selected in self._group_by_environment(groups).items():
                scored = [rollout for group in selected for rollout in group.rollouts]
                part_states = [state_of[id(rollout)] for rollout in scored] if states else []
                metrics = self.parts[label].score(
                    selected,
                    embed=functools.partial(_return_states, part_states),
                    penalties=penalties,
                )
                parts.append((len(scored), metrics))
                failed += self._collected[label].pending
        finally:
            for monitor in self._collected.values():
                monitor.pending = []
        self.failures.close_collection(failed, len(rollouts))
        known = [rollout.reward for rollout in rollouts if not rollout.is_masked]
        merged = _average_metrics(parts)
        if known:
            merged["reward/mean"] = statistics.fmean(known)
            merged["reward/std"] = statistics.pstdev(known)
        return merged

    def read_components(
        self, rollout: Rollout, penalties: Iterable[str] = ()
    ) -> dict[str, tuple[float, float]]:
        """Return value and weight of each component in the rollout's environment."""
        return self.parts[rollout.trajectory.environment].read_components(rollout, penalties)

    def read_task_weight(self, rollout: Rollout) -> float:
        """Return the current weight of `task` in the rollout's environment."""
        return self.parts[rollout.trajectory.environment].read_task_weight(rollout)

    def observe(self, groups: Iterable[RolloutGroup], phase: str = "") -> dict[str, float]:
        """Return the hacking monitors' metrics: correlations averaged over the environments, the alarm of any."""
        parts: list[tuple[int, dict[str, float]]] = []
        for label, selected in self._group_by_environment(list(groups)).items():
            size = sum(len(group.rollouts) for group in selected)
            parts.append((size, self.parts[label].observe(selected, phase)))
        merged = _average_metrics(parts)
        alarms = [metrics["reward/alarm"] for _, metrics in parts if "reward/alarm" in metrics]
        return merged | ({"reward/alarm": max(alarms)} if alarms else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every environment's rewards."""
        return {"parts": {label: part.state_dict() for label, part in self.parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for label, part in self.parts.items():
            part.load_state_dict(state["parts"][label])

    def _share_judge_budgets(self) -> None:
        """Let judges with the same `max_calls` spend one budget: it is that of the run, not of an environment."""
        budgets: dict[int | None, CallBudget] = {}
        for part in self.parts.values():
            for component in part.components.values():
                if isinstance(component, JudgeReward):
                    client = component.client
                    client.budget = budgets.setdefault(client.budget.limit, client.budget)

    def _group_by_environment(
        self, groups: Iterable[RolloutGroup]
    ) -> dict[str, list[RolloutGroup]]:
        by_label: dict[str, list[RolloutGroup]] = {}
        for group in groups:
            if group.rollouts:
                label = group.rollouts[0].trajectory.environment
                if label not in self.parts:
                    raise RewardError(
                        f"no rewards for environment '{label}'; known: {[*self.parts]}"
                    )
                by_label.setdefault(label, []).append(group)
        return {label: by_label[label] for label in self.parts if label in by_label}


def _return_states(
    states: Sequence[TurnEmbeddings], rollouts: Sequence[Rollout]
) -> list[TurnEmbeddings]:
    """Return states that were computed before, one for each rollout."""
    return list(states)


def _average_metrics(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Average metrics over the environments that have them, weighted by their rollouts; counts of the run are not."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for _, metrics in parts for name in metrics):
        having = [(size, metrics[name]) for size, metrics in parts if name in metrics]
        total = sum(size for size, _ in having)
        merged[name] = math.fsum(size * value for size, value in having) / total
        if name == "reward/judge/calls":
            merged[name] = max(value for _, value in having)
    return merged


def merge_reward_options(base: RewardSettings, changes: Mapping[str, Any]) -> RewardSettings:
    """Replace options of the policy stage by those of one environment, block by block.

    Raises: SettingsError naming the option.
    """
    fields = {field.name for field in dataclasses.fields(base)}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in fields:
            raise SettingsError(
                f"reward_options.{name}: no such option; {suggest_name(name, fields)}"
            )
        block = getattr(base, name)
        if isinstance(block, Settings) and isinstance(value, Mapping):
            plain = {f.name: getattr(block, f.name) for f in dataclasses.fields(block)}
            value = build_settings({**plain, **value}, type(block), f"reward_options.{name}")
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return dataclasses.replace(base, **values)
    except SettingsError as error:
        raise SettingsError(f"reward_options.{error}") from error


def check_part_credit(settings: PolicySettings, environment: Environment) -> None:
    """Refuse rewards of one environment of a mixture that credit by turn or by step would misread or ignore.

    Raises: SettingsError naming the environment, as `PolicySettings` does for the rewards of the stage.
    """
    if not isinstance(environment, MixtureEnvironment):
        return
    for part in environment.parts:
        entry = part.settings
        rewards = dict(entry.rewards or settings.rewards)
        try:
            options = merge_reward_options(settings.reward_options, entry.reward_options)
            options = dataclasses.replace(
                options,
                normalise=tuple(name for name in options.normalise if name in rewards),
                cache=tuple(name for name in options.cache if name in rewards),
            )
            own = dataclasses.replace(
                settings, rewards=rewards, reward_options=options, curriculum=()
            )
            if "process" in rewards and own.uses_step_credit != settings.uses_step_credit:
                raise SettingsError(
                    "reward_options.process.credit: is the same for all environments; name `process` in the rewards "
                    "of the policy stage, too (a weight of 0 will do), and set its credit there"
                )
        except SettingsError as error:
            raise SettingsError(f"environment '{part.name}': {error}") from error


def build_rewards(
    environment: Environment | None,
    weights: Mapping[str, float],
    *,
    scorer: Scorer | None = None,
    options: RewardSettings | Mapping[str, Any] | None = None,
    seed: int = 0,
    functions: Mapping[str, RewardFunction] | None = None,
    step_scorer: StepScorer | None = None,
    decode: DecodeIds | None = None,
) -> RewardOrchestrator:
    """Build the rewards of an environment, or those of each environment of a mixture, and check that they fit.

    Args:
        weights, options: of environments without separate ones; `functions` are available to all. others: as in
            `RewardOrchestrator`.
    Raises: SettingsError for unknown components, missing columns; RecordsError for unusable rows.
    """
    base = build_settings(options or {}, RewardSettings, "options")
    rewards: RewardOrchestrator
    if isinstance(environment, MixtureEnvironment):
        settings = {part.name: part.settings for part in environment.parts}

        def build_part(label: str, failures: EpisodeFailureMonitor) -> RewardOrchestrator:
            entry = settings[label]
            used = dict(entry.rewards or weights)
            try:
                return RewardOrchestrator(
                    used,
                    scorer=scorer if "learned" in used else None,
                    options=merge_reward_options(base, entry.reward_options),
                    seed=seed,
                    functions={n: f for n, f in (functions or {}).items() if n in used},
                    failures=failures,
                    step_scorer=step_scorer,
                    decode=decode,
                )
            except SettingsError as error:
                raise SettingsError(f"environment '{label}': {error}") from error

        rewards = MixtureRewards(build_part, list(settings), base.max_failed_share)
    else:
        rewards = RewardOrchestrator(
            weights,
            scorer=scorer,
            options=base,
            seed=seed,
            functions=functions,
            step_scorer=step_scorer,
            decode=decode,
        )
    if environment is None:
        rewards.check_columns(())
    else:
        rewards.check_environment(environment)
    return rewards
