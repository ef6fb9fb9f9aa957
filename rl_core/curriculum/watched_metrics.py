"""Metrics that exit conditions, early stopping and rollback may watch: those that a policy stage logs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.curriculum.conditions import expand_metric_name
from rl_core.errors import SettingsError, suggest_name
from rl_core.settings import PolicySettings

if TYPE_CHECKING:
    from rl_core.environments.environment import Environment

MetricRange = tuple[float, float]  # minimum and maximum
TOOL_SHARE_PREFIX = "tool/share/"
VISUAL_TOOL_METRIC = "tool/rapr"  # of environments whose tools include a visual one

_SHARE_RANGE, _COUNT_RANGE, _ANY_RANGE = (0.0, 1.0), (0.0, math.inf), (-math.inf, math.inf)

# Logged in every iteration, with any settings.
ROLLOUT_METRICS: dict[str, MetricRange] = {
    "train/success_rate": _SHARE_RANGE,
    "train/truncation_rate": _SHARE_RANGE,
    "train/completion_tokens": _COUNT_RANGE,
    "train/action_tokens": _COUNT_RANGE,
    "train/action_tokens_p10": _COUNT_RANGE,
    "train/action_tokens_p90": _COUNT_RANGE,
    "train/turns": _COUNT_RANGE,
    "train/loop_rate": _SHARE_RANGE,
    "train/right_action_rate": _SHARE_RANGE,
    "train/coherent_rate": _SHARE_RANGE,
    "tool/calls": _COUNT_RANGE,
    "tool/used_rate": _SHARE_RANGE,
    "tool/misuse_rate": _SHARE_RANGE,
    "tool/hung_calls": _COUNT_RANGE,
    "policy/mean_logprob": (-math.inf, 0.0),
    "reward/mean": _ANY_RANGE,
    "reward/std": _COUNT_RANGE,
}
# Logged in every iteration with an update; there is none if all groups were dropped.
_UPDATE_METRICS: dict[str, MetricRange] = {
    "train/loss": _ANY_RANGE,
    "train/grad_norm": _COUNT_RANGE,
    "train/learning_rate": _COUNT_RANGE,
    "train/filtering_rate": _SHARE_RANGE,
    "train/zero_advantage_rate": _SHARE_RANGE,
    "train/advantages_mean": _ANY_RANGE,
    "train/advantages_std": _COUNT_RANGE,
    "policy/loss": _ANY_RANGE,
    "policy/entropy": _COUNT_RANGE,
    "policy/entropy_coef": _COUNT_RANGE,
    "policy/kl_coef": _COUNT_RANGE,
    "policy/update_kl": _COUNT_RANGE,
    "policy/update_kl_k1": _ANY_RANGE,
    "policy/sampler_kl": _ANY_RANGE,
    "policy/sampler_difference_max": _COUNT_RANGE,
    "train/empty_updates": _COUNT_RANGE,
    "train/trained_rollouts": _COUNT_RANGE,
    "train/skipped_steps": _COUNT_RANGE,
    "train/exploration_efficiency": _SHARE_RANGE,  # needs tool steps but no update
}
# Logged in every iteration by parts of the trainer other than rollouts and rewards.
_OTHER_METRICS: dict[str, MetricRange] = {
    "train/failed_rate": _SHARE_RANGE,
    "train/failed_episodes": _COUNT_RANGE,
    "reward/alarm": _SHARE_RANGE,
}
# Logged for a mixture of environments.
_ENVIRONMENT_PREFIXES = ("train/success_rate_by_environment/", "reward/mean_by_environment/")
_LEVEL_PREFIX = "train/success_rate_by_level/"
# Logged in every iteration, if the environment has such tools; see `describe_unlogged_metric`.
_TOOL_METRICS: dict[str, MetricRange] = {VISUAL_TOOL_METRIC: _SHARE_RANGE}
# Logged by a reward component as reward/COMPONENT/NAME; some of them only when applicable.
COMPONENT_METRICS: dict[str, dict[str, MetricRange]] = {
    "task": {"answered": _SHARE_RANGE},
    "curiosity": {"transitions": _COUNT_RANGE, "scale": _COUNT_RANGE, "error": _COUNT_RANGE},
    "coherence": {
        "repetitions": _COUNT_RANGE,
        "contradictions": _COUNT_RANGE,
        "similarity": (-1.0, 1.0),
        "in_band": _SHARE_RANGE,
    },
    "tool_use": {"misused_turns": _COUNT_RANGE, "excess_calls": _COUNT_RANGE, "bonus": _ANY_RANGE},
    "learned": {"score": _ANY_RANGE, "running_mean": _ANY_RANGE, "running_std": _COUNT_RANGE},
    "format": {"malformed_turns": _COUNT_RANGE, "perfect": _SHARE_RANGE, "timed_out": _COUNT_RANGE},
    "length": {"tokens": _COUNT_RANGE, "punished": _SHARE_RANGE},
    "judge": {
        **dict.fromkeys(("asked", "cached", "failed", "failed_requests", "calls"), _COUNT_RANGE),
        **dict.fromkeys(("first_rate", "tie_rate", "contradiction_rate"), _SHARE_RANGE),
        **dict.fromkeys(("agreement", "agreement_low", "agreement_high"), _SHARE_RANGE),
        "kappa": (-1.0, 1.0),
        "labelled_pairs": _COUNT_RANGE,
    },
    "process": {"steps": _COUNT_RANGE, "step_score": _ANY_RANGE, "first_low": _SHARE_RANGE},
    **{
        verifier: {"right": _SHARE_RANGE, "timed_out": _COUNT_RANGE, "failed": _COUNT_RANGE}
        for verifier in ("exact", "numeric", "regex", "math", "code")
    },
}
_VALIDATION_METRICS: dict[str, MetricRange] = {
    "eval/success_rate": _SHARE_RANGE,
    "eval/success_rate_low": _SHARE_RANGE,
    "eval/success_rate_high": _SHARE_RANGE,
    "eval/reward_mean": _ANY_RANGE,
    "eval/turns_mean": _COUNT_RANGE,
    "eval/tool_calls_mean": _COUNT_RANGE,
    "eval/action_tokens_mean": _COUNT_RANGE,
    "eval/misuse_rate": _SHARE_RANGE,
    "eval/truncated_rate": _SHARE_RANGE,
}


@dataclass(frozen=True, slots=True)
class _ConditionalMetrics:
    """Metrics that are logged only with certain settings."""

    ranges: dict[str, MetricRange]
    is_logged: Callable[[PolicySettings], bool]
    required_setting: str


_CONDITIONAL_METRICS = (
    _ConditionalMetrics(
        _VALIDATION_METRICS,
        lambda s: s.eval_every > 0,
        "eval_every above 0; it is observed once per evaluation",
    ),
    _ConditionalMetrics({"policy/ref_kl": _ANY_RANGE}, lambda s: s.kl_coef > 0, "kl_coef above 0"),
    _ConditionalMetrics(
        {"policy/ratio_mean": _COUNT_RANGE, "policy/ratio_max": _COUNT_RANGE},
        lambda s: s.algorithm != "reinforce" and s.loss is None,
        "an algorithm with a ratio (not reinforce)",
    ),
    _ConditionalMetrics(
        {"policy/clip_fraction": _SHARE_RANGE},
        lambda s: s.algorithm not in ("sapo", "reinforce") and s.loss is None,
        "an algorithm that clips (not sapo or reinforce)",
    ),
    _ConditionalMetrics(
        {"policy/clip_fraction_low": _SHARE_RANGE, "policy/clip_fraction_high": _SHARE_RANGE},
        lambda s: s.algorithm not in ("sapo", "reinforce", "cispo") and s.loss is None,
        "an algorithm that clips at both sides (not cispo, sapo or reinforce)",
    ),
    _ConditionalMetrics(
        {"policy/gate_mean": _COUNT_RANGE},
        lambda s: s.algorithm == "sapo" and s.loss is None,
        "algorithm: sapo",
    ),
    _ConditionalMetrics(
        {"policy/divergence_mean": _COUNT_RANGE},
        lambda s: s.algorithm == "dppo" and s.loss is None,
        "algorithm: dppo",
    ),
    _ConditionalMetrics(
        {"policy/update_kl_exact": _COUNT_RANGE},
        lambda s: s.trust_region_kl == "exact",
        "trust_region_kl: exact",
    ),
    _ConditionalMetrics(
        {"policy/kl_after_max": _COUNT_RANGE, "policy/refused_steps": _SHARE_RANGE},
        lambda s: s.kl_max is not None,
        "kl_max",
    ),
    _ConditionalMetrics(
        {"policy/importance_mean": _COUNT_RANGE, "policy/effective_sample_share": _SHARE_RANGE},
        lambda s: s.importance != "none" or s.importance_mask != "none",
        "importance, or importance_mask",
    ),
    _ConditionalMetrics(
        {"policy/importance_dropped": _SHARE_RANGE},
        lambda s: s.importance_mask != "none",
        "importance_mask",
    ),
    _ConditionalMetrics(
        {"policy/clip_fraction_dual": _SHARE_RANGE},
        lambda s: s.dual_clip is not None and s.loss is None,
        "dual_clip",
    ),
    _ConditionalMetrics(
        {"policy/router_aux_loss": _ANY_RANGE},
        lambda s: s.router_aux_loss_coef > 0,
        "router_aux_loss_coef",
    ),
    _ConditionalMetrics(
        {"policy/staleness_mean": _COUNT_RANGE, "policy/staleness_max": _COUNT_RANGE},
        lambda s: s.rollouts.max_staleness > 0,
        "rollouts.max_staleness above 0",
    ),
    _ConditionalMetrics(
        {"policy/server_difference": _COUNT_RANGE},
        lambda s: s.rollouts.workers == "server",
        "rollouts.workers: server",
    ),
    _ConditionalMetrics(
        {"policy/numerics_difference": _COUNT_RANGE},
        lambda s: s.numerics.every > 0,
        "numerics.every above 0; it is observed once per comparison",
    ),
    _ConditionalMetrics(
        {
            "value/loss": _COUNT_RANGE,
            "value/clip_fraction": _SHARE_RANGE,
            "value/explained_variance": (-math.inf, 1.0),
            "value/returns_mean": _ANY_RANGE,
            "value/values_mean": _ANY_RANGE,
        },
        lambda s: s.value_function is not None,
        "a critic (algorithm: ppo, or critic)",
    ),
    _ConditionalMetrics(
        {"value/grad_norm": _COUNT_RANGE, "value/skipped_steps": _COUNT_RANGE},
        lambda s: s.value_function is not None and s.value_function.kind == "separate",
        "a critic with separate weights",
    ),
    _ConditionalMetrics(
        {"train/dropped_group_rate": _SHARE_RANGE},
        lambda s: s.sampling_tries > 0,
        "dynamic_sampling_tries above 0",
    ),
    _ConditionalMetrics(
        {
            "train/compared_turn_rate": _SHARE_RANGE,
            "train/turn_set_size": _COUNT_RANGE,
            "train/step_advantages_std": _COUNT_RANGE,
        },
        lambda s: s.turn_credit is not None,
        "turn_credit",
    ),
    _ConditionalMetrics(
        {"train/process_advantages_std": _COUNT_RANGE},
        lambda s: s.uses_step_credit and s.value_function is None,
        "the reward process with reward_options.process.credit: steps, without a critic",
    ),
    _ConditionalMetrics(
        {
            "train/payoff_by_player/0": _ANY_RANGE,
            "train/payoff_by_player/1": _ANY_RANGE,
            "train/illegal_game_rate": _SHARE_RANGE,
            "train/opponent_illegal_game_rate": _SHARE_RANGE,
            "train/moveless_rate": _SHARE_RANGE,
            "train/game_moves": _COUNT_RANGE,
        },
        lambda s: s.self_play is not None,
        "self_play",
    ),
    _ConditionalMetrics(
        {"train/pool_size": _COUNT_RANGE},
        lambda s: s.self_play is not None and s.self_play.opponent == "pool",
        "self_play.opponent: pool",
    ),
    _ConditionalMetrics(
        {
            f"eval/{name}/{opponent}": bounds
            for opponent in ("random", "first")
            for name, bounds in (
                ("payoff_against", _ANY_RANGE),
                ("win_rate_against", _SHARE_RANGE),
            )
        },
        lambda s: s.self_play is not None and s.eval_every > 0,
        "self_play, and eval_every above 0; it is observed once per evaluation",
    ),
    _ConditionalMetrics(
        {"eval/exploitability": _COUNT_RANGE, "eval/illegal_probability": _SHARE_RANGE},
        lambda s: s.self_play is not None and s.eval_every > 0,
        "self_play in a game that can be enumerated (kuhn_poker), and eval_every above 0",
    ),
    _ConditionalMetrics(
        {"reward/overlong": _ANY_RANGE}, lambda s: s.overlong_tokens > 0, "overlong_buffer"
    ),
    _ConditionalMetrics(
        {"train/masked_truncated": _COUNT_RANGE}, lambda s: s.mask_truncated, "mask_truncated: true"
    ),
    _ConditionalMetrics(
        {"train/grokfast_grad_norm": _COUNT_RANGE},
        lambda s: s.grokfast_lambda > 0,
        "grokfast_lambda above 0",
    ),
    _ConditionalMetrics(
        {"reward/masked_rate": _SHARE_RANGE},
        lambda s: any(":" in name or name in ("judge", "process") for name in s.rewards),
        "a custom reward function, the judge or process",
    ),
    _ConditionalMetrics(
        {"train/replayed_rollouts": _COUNT_RANGE}, lambda s: s.replay is not None, "replay"
    ),
)


def include_rewards(settings: PolicySettings, names: Iterable[str]) -> PolicySettings:
    """Return settings that name these reward components, too: those of a mixture's environments have metrics as well.

    For the names of metrics alone: nothing is checked again.
    """
    further = dict.fromkeys((name for name in names if name not in settings.rewards), 0.0)
    if not further:
        return settings
    extended = copy.copy(settings)
    object.__setattr__(extended, "rewards", {**settings.rewards, **further})
    return extended


def list_watchable_metrics(settings: PolicySettings) -> dict[str, MetricRange]:
    """Return the metrics that iterations with these settings log, with their ranges.

    Names that are known only during a run, such as those of tools, are not included: see `find_metric_range`.
    """
    ranges = ROLLOUT_METRICS | _UPDATE_METRICS | _OTHER_METRICS | _TOOL_METRICS
    ranges["reward/correlation/total"] = (-1.0, 1.0)
    for component in settings.rewards:
        name = component.replace(":", ".")
        ranges |= {f"reward/{name}": _ANY_RANGE, f"reward/weighted/{name}": _ANY_RANGE}
        ranges[f"reward/correlation/{name}"] = (-1.0, 1.0)
        for key, value in COMPONENT_METRICS.get(component, {}).items():
            ranges[f"reward/{name}/{key}"] = value
    levels = [level for stage in settings.curriculum for level in stage.levels]
    ranges |= {f"{_LEVEL_PREFIX}{level}": _SHARE_RANGE for level in levels}
    for group in _CONDITIONAL_METRICS:
        if group.is_logged(settings):
            ranges |= group.ranges
    return ranges


def find_metric_range(metric: str, settings: PolicySettings) -> MetricRange | None:
    """Return the range of a metric that iterations with these settings log; None if they do not log it.

    Args:
        metric: name as in settings; `success_rate` is short for `train/success_rate`.
    """
    name = expand_metric_name(metric)
    metric_range = list_watchable_metrics(settings).get(name)
    if metric_range is not None:
        return metric_range
    for prefix, prefix_range in _list_open_prefixes(settings).items():
        if name.startswith(prefix) and len(name) > len(prefix):
            return prefix_range
    return None


def _list_open_prefixes(settings: PolicySettings) -> dict[str, MetricRange]:
    """Return the ranges of names known only during a run, by prefix: tools, kinds, metrics of custom code."""
    ranges = {TOOL_SHARE_PREFIX: _SHARE_RANGE}
    ranges |= {
        f"reward/{name.replace(':', '.')}/": _ANY_RANGE for name in settings.rewards if ":" in name
    }
    if settings.reward_options.judge.mode == "rubric":
        ranges["reward/judge/criterion/"] = _SHARE_RANGE
    if settings.advantages is not None:
        ranges["train/advantages/"] = _ANY_RANGE
    if settings.loss is not None:
        ranges["policy/"] = _ANY_RANGE
    # Of a mixture: its environments, and the levels of an environment that a stage names.
    ranges |= {_ENVIRONMENT_PREFIXES[0]: _SHARE_RANGE, _ENVIRONMENT_PREFIXES[1]: _ANY_RANGE}
    ranges |= {
        f"{_LEVEL_PREFIX}{level}/": _SHARE_RANGE
        for stage in settings.curriculum
        for level in stage.levels
    }
    if settings.eval_every > 0:
        ranges |= dict.fromkeys(
            (
                "eval/success_rate_by_level/",
                "eval/success_rate_by_kind/",
                "eval/success_rate_by_environment/",
                "eval/pass_at_",
            ),
            _SHARE_RANGE,
        )
        ranges["eval/reward_mean_by_environment/"] = _ANY_RANGE
    return ranges


def list_watchable_names(settings: PolicySettings, environment: Environment) -> list[str]:
    """Return the names that iterations log, whether or not a curriculum stage draws the levels.

    Names known only during a run are included if the settings watch them: a tool may be used later.
    """
    from rl_core.environments.mixture import LabelledEnvironment  # imports torch

    mixed = [part for part in environment.parts if isinstance(part, LabelledEnvironment)]
    settings = include_rewards(settings, [name for part in mixed for name in part.settings.rewards])
    named = [expand_metric_name(metric) for metric in list_watched_metrics(settings)]
    return [
        *list_watchable_metrics(settings),
        *(f"{_LEVEL_PREFIX}{level}" for level in environment.levels),
        *(name for name in named if find_metric_range(name, settings) is not None),
    ]


def list_watched_metrics(settings: PolicySettings) -> list[str]:
    """Return the metrics that exits, early stop and rollbacks in the settings name."""
    parts = [
        *(stage.rollback for stage in settings.curriculum),
        settings.rollback,
        settings.early_stop,
    ]
    conditions = [condition for stage in settings.curriculum for condition in stage.exit_conditions]
    return [part.metric for part in (*parts, *conditions) if part is not None]


def describe_unlogged_metric(metric: str, environment: Environment) -> str:
    """Return the error if a metric is of a tool, environment or level that does not exist; "" otherwise.

    The share of a tool is accepted if the environment declares none: the tools in use are then unknown before a run.
    """
    if metric == VISUAL_TOOL_METRIC and not environment.tools.list_visual_tools():
        return (
            f"'{metric}': the environment has no visual tool, so it is never logged; declare one with "
            "Tool(..., is_visual=True), or watch tool/used_rate"
        )
    if "_by_environment/" in metric:
        label, labels = metric.rpartition("/")[2], [part.name for part in environment.parts]
        if len(labels) == 1:
            return f"'{metric}': there is one environment, so it is never logged; list several under environments"
        return "" if label in labels else f"'{metric}': {suggest_name(label, labels)}"
    level = expand_metric_name(metric).partition("_rate_by_level/")[2]
    if level and len(environment.parts) > 1 and level not in environment.levels:
        return f"'{metric}': no environment has the level '{level}'; {suggest_name(level, environment.levels)}"
    name = metric.removeprefix(TOOL_SHARE_PREFIX)
    if name == metric:
        return ""
    tools = environment.tools.tools
    if not tools or name in tools:
        return ""
    return f"'{metric}': the environment has no tool '{name}'; {suggest_name(name, tools)}"


def check_watched_tools(settings: PolicySettings, environment: Environment) -> None:
    """Raise SettingsError if the settings watch a tool, environment or level that does not exist."""
    for metric in list_watched_metrics(settings):
        problem = describe_unlogged_metric(metric, environment)
        if problem:
            raise SettingsError(f"metric: {problem}")


def find_missing_setting(name: str, settings: PolicySettings) -> str:
    """Return the setting that a metric needs and these settings lack; "" for logged or unknown metrics."""
    for group in _CONDITIONAL_METRICS:
        if name in group.ranges and not group.is_logged(settings):
            return group.required_setting
    return ""
