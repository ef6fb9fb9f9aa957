"""Reward orchestration: components scored, normalised, clipped and weighted into one total per rollout."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.records import RowProblem, report_row_problems
from rl_core.environments.answer_checks import ANSWER_CHECKS, build_answer_check
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, FailedEpisode
from rl_core.errors import DataError, RewardError, SettingsError, suggest_name
from rl_core.losses.advantages import fill_masked_rewards
from rl_core.models.hidden_states import TurnEmbedder, TurnEmbeddings
from rl_core.rewards.cached_function import CachedReward, build_user_reward
from rl_core.rewards.components import (
    FormatReward,
    LengthReward,
    RewardComponent,
    SampleFailure,
    TaskReward,
    ToolUseReward,
    VerifierReward,
    describe_rollout,
)
from rl_core.rewards.hacking_monitor import HackingMonitor
from rl_core.rewards.judges.calibration import calibrate_before_training
from rl_core.rewards.judges.judge_reward import JudgeReward
from rl_core.rewards.model_components import LearnedReward, Scorer
from rl_core.rewards.process_reward import (
    DecodeIds,
    ProcessReward,
    StepScorer,
    check_step_scorer,
)
from rl_core.rewards.running_stats import RunningNorm
from rl_core.rewards.state_components import CoherenceReward, CuriosityReward
from rl_core.rewards.user_function import RewardFunction, UserReward
from rl_core.settings import RewardSettings, build_settings
from rl_core.storage.faults import inject_fault
from rl_core.types import REWARD_LIMIT, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

# Prefix of a component's name in `trajectory.rewards` for its contribution to the total.
WEIGHTED_PREFIX = "weighted/"

REWARD_COMPONENTS: dict[str, str] = {
    "task": "what the environment gave, for the final answer above all",
    "curiosity": "how badly the state after an action was foreseen; falls on what is known",
    "coherence": "turns follow from each other, without repetition and contradiction",
    "tool_use": "misuse and excess of tools cost, calls that worked may bring a little",
    "learned": "score of the reward model, normalised over the run",
    "format": "share of turns that the environment can read",
    "length": "what is written beyond the free length costs",
    "exact": "the answer is the target's text",
    "numeric": "the answer is the target's number",
    "regex": "the answer matches a pattern",
    "math": "the answer is mathematically equal to the target",
    "code": "the program in the answer passes the row's tests",
    "judge": "score, or comparison, by a model behind an OpenAI-compatible URL or in this process",
    "process": "scores of the steps of a completion, by a reward model of steps or a function",
}


class RewardOrchestrator:
    """Scores rollouts: the only code that sets `Trajectory.reward` after an episode has been played.

    A component is a name from REWARD_COMPONENTS, or the import path or file of a function ('package.module:function',
    'file.py:function'), see `rewards.user_function`.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        scorer: Scorer | None = None,
        options: RewardSettings | Mapping[str, Any] | None = None,
        seed: int = 0,
        functions: Mapping[str, RewardFunction] | None = None,
        failures: EpisodeFailureMonitor | None = None,
        step_scorer: StepScorer | None = None,
        decode: DecodeIds | None = None,
    ) -> None:
        """Build the components.

        Args:
            scorer: the reward model behind the component `learned`.
            step_scorer, decode: reward model of steps and the policy's tokenizer, behind the component `process`.
            seed: of the components' random numbers.
            functions: user-defined components by name, in addition to those named by import path.
            failures: counts the samples that cannot be scored; None = a new monitor with the options' share.
        Raises: SettingsError for an unknown name, a function that cannot be imported, or `learned` without a scorer.
        """
        if not weights:
            raise SettingsError(
                "rewards: names no component; task: 1.0 is what the environment gives"
            )
        self.options = build_settings(options or {}, RewardSettings, "options")
        self.seed = seed
        self.failures = failures or EpisodeFailureMonitor(
            self.options.max_failed_share,
            setting="reward_options.max_failed_share",
            error=RewardError,
        )
        self._functions = dict(functions or {})
        self._base = {n: w for n, w in weights.items() if n != "learned" or w or scorer is not None}
        self.weights = dict(self._base)
        self._step_scorer, self._decode = step_scorer, decode
        self.components: dict[str, RewardComponent] = {
            name: self._build_component(name, scorer) for name in self._base
        }
        for name in self.options.cache:
            if name in self.components and not isinstance(self.components[name], CachedReward):
                raise SettingsError(
                    f"reward_options.cache: '{name}' is not a user function; only their values can be cached"
                )
        self.norms = {
            name: RunningNorm() for name in self.options.normalise if name in self.components
        }
        self.hacking_monitor = HackingMonitor(self.options.window, self.options.alarm_margin)

    @property
    def needs_states(self) -> bool:
        """True = `score` needs `embed`."""
        return any(component.needs_states for component in self.components.values())

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raise SettingsError for a column that a component reads and the environment's rows do not have.

        Args:
            columns: of the rows; () = the episodes have no rows, None = unknown.
        """
        for component in self.components.values():
            component.check_columns(columns)

    def check_rows(self, rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> None:
        """Refuse rows that a component cannot use, before anything is played.

        Args:
            rows: (place, right answer, row) of each, see `Environment.iter_target_rows`.
        Raises: RecordsError listing the first ten.
        """
        problems: list[RowProblem] = []
        components = [(name, part) for name, part in self.components.items() if part.reads_rows]
        num_rows = 0
        for place, target, row in rows if components else ():
            num_rows += 1
            for name, component in components:
                try:
                    component.check_row(target, row)
                except DataError as error:
                    problems.append(RowProblem(place, 0, f"rewards.{name}", str(error)))
        report_row_problems("rewards", problems, num_rows, "stop", advice="Fix them")

    def check_environment(self, environment: Environment) -> None:
        """Refuse an environment whose rows have no column, or no usable value, for a component; see `check_rows`."""
        self.check_columns(environment.columns)
        self.check_rows(environment.iter_target_rows())

    def calibrate_judges(self) -> None:
        """Measure judges against human labels, if the options name some; see `judges.calibration`.

        Raises: RewardError for a judge that agrees too little with them.
        """
        for component in self.components.values():
            if isinstance(component, JudgeReward):
                calibrate_before_training(component)

    def check_step_scorer(self) -> None:
        """Refuse a process reward that nothing scores. Raises: SettingsError."""
        if "process" in self.components:
            check_step_scorer(self.options.process, self._step_scorer)

    def set_weights(self, changes: Mapping[str, float]) -> None:
        """Set the weights to the initial ones with these changes. Raises: SettingsError for an unknown component."""
        for name in changes:
            if name not in self._base:
                raise SettingsError(
                    f"rewards.{name}: no component to weigh; {suggest_name(name, self._base)}"
                )
        self.weights = {**self._base, **changes}

    def score(
        self,
        groups: Iterable[RolloutGroup],
        *,
        embed: TurnEmbedder | None = None,
        penalties: Mapping[str, RewardComponent] | None = None,
    ) -> dict[str, float]:
        """Write each rollout's components (raw and weighted), total and `is_masked` into its trajectory.

        A rollout on which a user function failed is masked: learning leaves it out, and its recorded reward is the mean
        of the other rollouts of its group. So is one with a reward beyond +-REWARD_LIMIT that is not clipped, or with
        such a total. Too many failures are an error (`failures`).

        Args:
            embed: returns the policy's states; called once, and only if a component needs them.
            penalties: components of the algorithm by name, added to the total unscaled (see `OverlongPenalty`).
        Returns: reward/mean, reward/std (of the total, over unmasked rollouts), reward/<component> (mean raw value),
            reward/weighted/<component> (mean contribution), reward/<component>/..., reward/<penalty> (mean),
            reward/masked_rate. Means over nothing are left out.
        Raises: RewardError naming the component and the sample if a component returns a wrong number of values, or if
            it
            raises, times out or returns a non-finite value on too many samples.
        """
        groups = list(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return {}
        states = self._compute_states(rollouts, embed)
        for component in self.components.values():
            component.group_sizes = [len(group.rollouts) for group in groups]
        raw = {
            name: self._reject_large_values(
                name, self._score_component(name, component, rollouts, states)
            )
            for name, component in self.components.items()
        }
        masked = [
            any(values[index] is None for values in raw.values()) for index in range(len(rollouts))
        ]
        weighted = {
            name: [self.weights[name] * v for v in self._scale_values(name, values)]
            for name, values in raw.items()
        }
        self._reject_large_totals(weighted, masked)
        self._record_failures(rollouts)
        penalised = self._score_penalties(penalties or {}, rollouts, masked)
        totals: list[float | None] = []
        for index, rollout in enumerate(rollouts):
            scores: dict[str, float] = {}
            for name, values in raw.items():
                value = values[index]
                if value is not None:
                    scores[name] = value
            contributions: dict[str, float] = {}
            if not masked[index]:
                for name, parts in weighted.items():
                    contributions[WEIGHTED_PREFIX + name] = parts[index]
            costs = {name: values[index] for name, values in penalised.items() if index in values}
            # The environment's reward stays in the record even if training does not use it.
            rollout.trajectory.rewards = {
                **rollout.trajectory.rewards,
                **scores,
                **contributions,
                **costs,
            }
            rollout.is_masked = masked[index]
            total = sum(costs.values(), math.fsum(contributions.values()))
            totals.append(None if masked[index] else total)
        sizes = [len(group.rollouts) for group in groups]
        filled = fill_masked_rewards(
            torch.tensor(
                [0.0 if total is None else total for total in totals], dtype=torch.float64
            ).split(sizes),
            torch.tensor(masked).split(sizes),
        )
        for rollout, total in zip(rollouts, torch.cat(filled).tolist(), strict=True):
            rollout.trajectory.reward = total
        inject_fault("rewards.scored")
        metrics = self._compute_metrics(raw, weighted, totals)
        return metrics | {
            f"reward/{name}": statistics.fmean(values.values())
            for name, values in penalised.items()
            if values
        }

    def read_components(
        self, rollout: Rollout, penalties: Iterable[str] = ()
    ) -> dict[str, tuple[float, float]]:
        """Return value and weight of each component of a scored rollout; their products sum to its reward.

        The value is normalised and clipped as the options say. A component of weight 0 is left out.

        Args:
            penalties: names of `score`'s penalties, whose weight is 1.
        """
        rewards, components = rollout.trajectory.rewards, {}
        for name, weight in self.weights.items():
            contribution = rewards.get(WEIGHTED_PREFIX + name)
            if contribution is not None and weight:
                components[name] = (contribution / weight, weight)
        return components | {name: (rewards[name], 1.0) for name in penalties if name in rewards}

    def read_task_weight(self, rollout: Rollout) -> float:
        """Return the current weight of the environment's own reward in a rollout's total."""
        return self.weights.get("task", 0.0)

    def observe(self, groups: Iterable[RolloutGroup], phase: str = "") -> dict[str, float]:
        """Return metrics of the hacking monitor for an iteration's scored rollouts: reward/correlation/...,
        reward/alarm.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return self.hacking_monitor.record_iteration(rollouts, list(self.components), phase)

    def state_dict(self) -> dict[str, Any]:
        """Return components, running statistics and hacking monitor. Weights follow from settings and curriculum."""
        return {
            "components": {
                name: component.state_dict() for name, component in self.components.items()
            },
            "norms": {name: norm.state_dict() for name, norm in self.norms.items()},
            "watch": self.hacking_monitor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, component in self.components.items():
            component.load_state_dict(state["components"][name])
        for name, norm in self.norms.items():
            norm.load_state_dict(state["norms"][name])
        self.hacking_monitor.load_state_dict(state["watch"])

    def _build_component(self, name: str, scorer: Scorer | None) -> RewardComponent:
        options = self.options
        if name in self._functions:
            return build_user_reward(
                name, options, self._functions[name], self.failures.has_too_many
            )
        builders: dict[str, Any] = {
            "task": TaskReward,
            "curiosity": lambda: CuriosityReward(options.curiosity, self.seed),
            "coherence": lambda: CoherenceReward(options.coherence),
            "tool_use": lambda: ToolUseReward(options.tool_use),
            "format": lambda: FormatReward(options.format),
            "length": lambda: LengthReward(options.length),
            "judge": lambda: JudgeReward(options.judge, self.failures.has_too_many),
            "process": lambda: ProcessReward(
                options.process,
                scorer=self._step_scorer,
                decode=self._decode,
                timeout_s=options.timeout_s,
                has_too_many=self.failures.has_too_many,
            ),
        }
        if name in builders:
            component: RewardComponent = builders[name]()
            return component
        if name in ANSWER_CHECKS:
            settings = getattr(options, name)
            return VerifierReward(
                build_answer_check(name, settings), getattr(settings, "workers", 1)
            )
        if name == "learned":
            if scorer is None:
                raise SettingsError(
                    "rewards.learned: needs a reward model; add the stage reward_model, or leave it out"
                )
            return LearnedReward(scorer)
        if ":" not in name:
            raise SettingsError(
                f"rewards.{name}: no such component; {suggest_name(name, REWARD_COMPONENTS)} "
                "Name your function by its import path or file: 'package.module:function' or 'file.py:function'"
            )
        return build_user_reward(name, options, None, self.failures.has_too_many)

    def _compute_states(
        self, rollouts: Sequence[Rollout], embed: TurnEmbedder | None
    ) -> list[TurnEmbeddings]:
        if not self.needs_states:
            return []
        if embed is None:
            names = [name for name, component in self.components.items() if component.needs_states]
            raise RewardError(
                f"reward '{names[0]}' needs the policy's states, but score() got no `embed`"
            )
        return embed(rollouts)

    def _score_component(
        self,
        name: str,
        component: RewardComponent,
        rollouts: Sequence[Rollout],
        states: Sequence[TurnEmbeddings],
    ) -> list[float | None]:
        """Return the checked values of one component."""
        if isinstance(component, UserReward):
            return component(rollouts)
        component.failed = {}
        try:
            values = list(component(rollouts, states))
        except RewardError as error:
            raise RewardError(f"reward '{name}': {error}") from error
        except Exception as error:
            raise RewardError(f"reward '{name}' raised {type(error).__name__}: {error}") from error
        for value, rollout in zip(values, rollouts, strict=True):
            if (
                value is None and component.failed
            ):  # includes samples not tried after too many failures
                continue
            if value is None or not math.isfinite(value):
                raise RewardError(
                    f"reward '{name}' gave {value!r}, no finite number, for {describe_rollout(rollout)}"
                )
        return values

    def _reject_large_values(self, name: str, values: Sequence[float | None]) -> list[float | None]:
        """Return the values of a component, None for those beyond the limit, which are failures of their samples.

        They would spoil a running mean, and silence an update of float32. Where only a clip follows, they may be large.
        """
        if self.options.clip is not None and name not in self.norms:
            return list(values)
        checked = list(values)
        for index, value in enumerate(values):
            if value is not None and abs(value) > REWARD_LIMIT:
                failure = SampleFailure(f"gave {value:g}, beyond +-{REWARD_LIMIT:g}")
                self.components[name].failed[index] = failure
                checked[index] = None
        return checked

    def _reject_large_totals(
        self, weighted: Mapping[str, Sequence[float]], masked: list[bool]
    ) -> None:
        """Mask the samples whose total is beyond the limit; their largest part is the one that failed."""
        for index, is_masked in enumerate(masked):
            parts = {name: values[index] for name, values in weighted.items()}
            total = math.fsum(parts.values())
            if is_masked or abs(total) <= REWARD_LIMIT:
                continue
            largest = max(parts, key=lambda name: abs(parts[name]))
            self.components[largest].failed[index] = SampleFailure(
                f"with its weight gave {parts[largest]:g}, a total beyond +-{REWARD_LIMIT:g}"
            )
            masked[index] = True

    def _score_penalties(
        self,
        penalties: Mapping[str, RewardComponent],
        rollouts: Sequence[Rollout],
        masked: Sequence[bool],
    ) -> dict[str, dict[int, float]]:
        """Return penalties of the unmasked rollouts: name -> index of the rollout -> value."""
        unmasked = [index for index, is_masked in enumerate(masked) if not is_masked]
        scores: dict[str, dict[int, float]] = {}
        for name, penalty in penalties.items():
            values = self._score_component(
                name, penalty, [rollouts[index] for index in unmasked], []
            )
            scores[name] = {
                index: value
                for index, value in zip(unmasked, values, strict=True)
                if value is not None
            }
        return scores

    def _compute_metrics(
        self,
        raw: Mapping[str, Sequence[float | None]],
        weighted: Mapping[str, Sequence[float]],
        totals: Sequence[float | None],
    ) -> dict[str, float]:
        """Return means of totals, raw values and contributions, see `score`. `totals`: None = masked."""
        known = [total for total in totals if total is not None]
        metrics = {}
        if known:
            metrics = {
                "reward/mean": statistics.fmean(known),
                "reward/std": statistics.pstdev(known),
            }
        for name, values in raw.items():
            short = name.replace(":", ".")
            scored = [value for value in values if value is not None]
            if scored:
                metrics[f"reward/{short}"] = statistics.fmean(scored)
            kept = [
                value
                for value, total in zip(weighted[name], totals, strict=True)
                if total is not None
            ]
            if kept:
                metrics[f"reward/weighted/{short}"] = statistics.fmean(kept)
            metrics |= {
                f"reward/{short}/{key}": value
                for key, value in self.components[name].metrics.items()
            }
        if len(known) < len(totals) or any(
            isinstance(component, UserReward | JudgeReward | ProcessReward)
            for component in self.components.values()
        ):
            metrics["reward/masked_rate"] = (len(totals) - len(known)) / len(totals)
        return metrics

    def _scale_values(self, name: str, values: Sequence[float | None]) -> list[float]:
        """Values normalised where the settings ask for it, then clipped; 0.0 for a missing one."""
        known = [value for value in values if value is not None]
        norm, clip = self.norms.get(name), self.options.clip
        if norm is not None:
            norm.add_values(known)
            known = norm.normalise_values(known)
        if clip is not None:
            known = [max(-clip, min(clip, value)) for value in known]
        scaled = iter(known)
        return [0.0 if value is None else next(scaled) for value in values]

    def _record_failures(self, rollouts: Sequence[Rollout]) -> None:
        """Count and keep the rollouts on which a component failed. Raises: RewardError where they are too many."""
        failed: dict[int, FailedEpisode] = {}
        for name, component in self.components.items():
            for index, failure in component.failed.items():
                trajectory = rollouts[index].trajectory
                failed.setdefault(
                    index, FailedEpisode(trajectory, [], f"reward '{name}'", *failure)
                )
        episodes = [failed[index] for index in sorted(failed)]
        level = (
            logging.INFO if self.failures.total else logging.WARNING
        )  # the metrics count the later ones
        self.failures.close_collection(episodes, len(rollouts))
        if episodes:
            logger.log(
                level,
                "%d of %d samples could not be scored and are masked; the first: %s: %s",
                len(episodes),
                len(rollouts),
                episodes[0].episode_label,
                episodes[0].failure_label,
            )
