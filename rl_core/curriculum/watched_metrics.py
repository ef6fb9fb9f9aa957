"""Metrics that exit conditions, early stopping and rollback may watch: those that a policy stage logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from rl_core.curriculum.conditions import metric_name
from rl_core.errors import SettingsError, nearest
from rl_core.settings import PolicySettings

__all__ = [
    "ALWAYS",
    "COMPONENT_METRICS",
    "TOOL_SHARE",
    "check_tools",
    "missing_because",
    "unknown_tool",
    "watched_metrics",
    "watched_names",
    "watched_range",
]

Range = tuple[float, float]  # least and largest value
TOOL_SHARE = "tool/share/"

_SHARE, _COUNT, _ANY = (0.0, 1.0), (0.0, math.inf), (-math.inf, math.inf)

# Of every iteration, whatever the settings.
ALWAYS: dict[str, Range] = {
    "train/success_rate": _SHARE,
    "train/truncation_rate": _SHARE,
    "train/completion_tokens": _COUNT,
    "train/action_tokens": _COUNT,
    "train/action_tokens_p10": _COUNT,
    "train/action_tokens_p90": _COUNT,
    "train/turns": _COUNT,
    "train/loop_rate": _SHARE,
    "train/right_action_rate": _SHARE,
    "train/coherent_rate": _SHARE,
    "tool/calls": _COUNT,
    "tool/used_rate": _SHARE,
    "tool/misuse_rate": _SHARE,
    "tool/hung_calls": _COUNT,
    "policy/mean_logprob": (-math.inf, 0.0),
    "reward/mean": _ANY,
    "reward/std": _COUNT,
}
# Of every iteration with an update; one whose groups were all dropped has none.
_UPDATED: dict[str, Range] = {
    "train/loss": _ANY,
    "train/grad_norm": _COUNT,
    "train/learning_rate": _COUNT,
    "train/filtering_rate": _SHARE,
    "train/zero_advantage_rate": _SHARE,
    "train/advantages_mean": _ANY,
    "train/advantages_std": _COUNT,
    "policy/loss": _ANY,
    "policy/entropy": _COUNT,
    "policy/entropy_coef": _COUNT,
    "policy/kl_coef": _COUNT,
    "policy/update_kl": _COUNT,
    "policy/update_kl_k1": _ANY,
    "policy/sampler_kl": _ANY,
    "policy/sampler_difference_max": _COUNT,
    "train/empty_updates": _COUNT,
    "train/trained_rollouts": _COUNT,
    "train/skipped_steps": _COUNT,
    "train/exploration_efficiency": _SHARE,  # without an update too, but not without tool steps
}
# Of every iteration too, by parts of the trainer other than rollouts and rewards.
_BESIDE: dict[str, Range] = {
    "train/failed_rate": _SHARE,
    "train/failed_episodes": _COUNT,
    "reward/alarm": _SHARE,
}
# Of a component's own, as reward/COMPONENT/NAME; some of them only where there is something to tell.
COMPONENT_METRICS: dict[str, dict[str, Range]] = {
    "task": {"answered": _SHARE},
    "curiosity": {"transitions": _COUNT, "scale": _COUNT, "error": _COUNT},
    "coherence": {"repetitions": _COUNT, "contradictions": _COUNT, "similarity": (-1.0, 1.0), "in_band": _SHARE},
    "tool_use": {"misused_turns": _COUNT, "excess_calls": _COUNT, "bonus": _ANY},
    "learned": {"score": _ANY, "running_mean": _ANY, "running_std": _COUNT},
    "format": {"malformed_turns": _COUNT, "perfect": _SHARE, "timed_out": _COUNT},
    "length": {"tokens": _COUNT, "punished": _SHARE},
    "judge": {"asked": _COUNT, "cached": _COUNT, "failed": _COUNT},
    **{
        verifier: {"right": _SHARE, "timed_out": _COUNT, "failed": _COUNT}
        for verifier in ("exact", "numeric", "regex", "math", "code")
    },
}
_VALIDATION: dict[str, Range] = {
    "eval/success_rate": _SHARE,
    "eval/success_rate_low": _SHARE,
    "eval/success_rate_high": _SHARE,
    "eval/reward_mean": _ANY,
    "eval/turns_mean": _COUNT,
    "eval/tool_calls_mean": _COUNT,
    "eval/action_tokens_mean": _COUNT,
    "eval/misuse_rate": _SHARE,
    "eval/truncated_rate": _SHARE,
}


@dataclass(frozen=True, slots=True)
class _Conditional:
    """Metrics that some settings alone log."""

    ranges: dict[str, Range]
    is_logged: Callable[[PolicySettings], bool]
    needs: str


_CONDITIONAL = (
    _Conditional(_VALIDATION, lambda s: s.eval_every > 0, "eval_every above 0; it is observed once an evaluation"),
    _Conditional({"policy/ref_kl": _ANY}, lambda s: s.kl_coef > 0, "kl_coef above 0"),
    _Conditional(
        {"policy/ratio_mean": _COUNT, "policy/ratio_max": _COUNT},
        lambda s: s.algorithm != "reinforce" and s.loss is None, "an algorithm with a ratio (not reinforce)",
    ),
    _Conditional(
        {"policy/clip_fraction": _SHARE}, lambda s: s.algorithm not in ("sapo", "reinforce") and s.loss is None,
        "an algorithm that clips (not sapo or reinforce)",
    ),
    _Conditional(
        {"policy/clip_fraction_low": _SHARE, "policy/clip_fraction_high": _SHARE},
        lambda s: s.algorithm not in ("sapo", "reinforce", "cispo") and s.loss is None,
        "an algorithm that clips at both sides (not cispo, sapo or reinforce)",
    ),
    _Conditional({"policy/gate_mean": _COUNT}, lambda s: s.algorithm == "sapo" and s.loss is None, "algorithm: sapo"),
    _Conditional(
        {"policy/update_kl_exact": _COUNT}, lambda s: s.trust_region_kl == "exact", "trust_region_kl: exact"
    ),
    _Conditional(
        {"policy/kl_after_max": _COUNT, "policy/refused_steps": _SHARE}, lambda s: s.kl_max is not None, "kl_max"
    ),
    _Conditional(
        {"policy/importance_mean": _COUNT, "policy/effective_sample_share": _SHARE},
        lambda s: s.corrects_sampler, "importance, or importance_mask",
    ),
    _Conditional(
        {"policy/importance_dropped": _SHARE}, lambda s: s.importance_mask != "none",
        "importance_mask",
    ),
    _Conditional(
        {"policy/clip_fraction_dual": _SHARE}, lambda s: s.dual_clip is not None and s.loss is None, "dual_clip"
    ),
    _Conditional({"policy/router_aux_loss": _ANY}, lambda s: s.router_aux_loss_coef > 0, "router_aux_loss_coef"),
    _Conditional(
        {"policy/staleness_mean": _COUNT, "policy/staleness_max": _COUNT}, lambda s: s.rollouts.max_staleness > 0,
        "rollouts.max_staleness above 0",
    ),
    _Conditional(
        {"policy/server_difference": _COUNT}, lambda s: s.rollouts.workers == "server", "rollouts.workers: server"
    ),
    _Conditional(
        {"policy/numerics_difference": _COUNT}, lambda s: s.numerics.every > 0,
        "numerics.every above 0; it is observed once a comparison",
    ),
    _Conditional(
        {"value/loss": _COUNT, "value/clip_fraction": _SHARE, "value/explained_variance": (-math.inf, 1.0),
         "value/returns_mean": _ANY, "value/values_mean": _ANY},
        lambda s: s.value_function is not None, "a critic (algorithm: ppo, or critic)",
    ),
    _Conditional(
        {"value/grad_norm": _COUNT, "value/skipped_steps": _COUNT},
        lambda s: s.value_function is not None and s.value_function.kind == "separate", "a critic of its own weights",
    ),
    _Conditional(
        {"train/dropped_group_rate": _SHARE}, lambda s: s.sampling_tries > 0, "dynamic_sampling_tries above 0"
    ),
    _Conditional({"reward/overlong": _ANY}, lambda s: s.overlong_tokens > 0, "overlong_buffer"),
    _Conditional({"train/masked_truncated": _COUNT}, lambda s: s.mask_truncated, "mask_truncated: true"),
    _Conditional({"train/grokfast_grad_norm": _COUNT}, lambda s: s.grokfast_lambda > 0, "grokfast_lambda above 0"),
    _Conditional(
        {"reward/masked_rate": _SHARE}, lambda s: any(":" in name or name == "judge" for name in s.rewards),
        "a reward function of yours, or the judge",
    ),
    _Conditional({"train/replayed_rollouts": _COUNT}, lambda s: s.replay is not None, "replay"),
)  # fmt: skip


def watched_metrics(settings: PolicySettings) -> dict[str, Range]:
    """Names that iterations with these settings log, with the least and the largest value of each.

    Beside them are names that only a run knows, those of tools for one: see `watched_range`.
    """
    found = ALWAYS | _UPDATED | _BESIDE | {"reward/correlation/total": (-1.0, 1.0)}
    for name in settings.rewards:
        short = name.replace(":", ".")
        found |= {f"reward/{short}": _ANY, f"reward/weighted/{short}": _ANY}
        found[f"reward/correlation/{short}"] = (-1.0, 1.0)
        found |= {f"reward/{short}/{key}": value for key, value in COMPONENT_METRICS.get(name, {}).items()}
    levels = [level for stage in settings.curriculum for level in stage.levels]
    found |= {f"train/success_rate_by_level/{level}": _SHARE for level in levels}
    for group in _CONDITIONAL:
        if group.is_logged(settings):
            found |= group.ranges
    return found


def watched_range(metric: str, settings: PolicySettings) -> Range | None:
    """Least and largest value of a metric that iterations with these settings log; None = they log no such metric.

    Args:
        metric: name as in settings; `success_rate` is short for `train/success_rate`.
    """
    name = metric_name(metric)
    found = watched_metrics(settings).get(name)
    if found is not None:
        return found
    for prefix, values in _open_ended(settings).items():
        if name.startswith(prefix) and len(name) > len(prefix):
            return values
    return None


def _open_ended(settings: PolicySettings) -> dict[str, Range]:
    """Beginnings of the names that a run alone knows: of tools, kinds, and metrics of the user's own code."""
    found = {TOOL_SHARE: _SHARE}
    found |= {f"reward/{name.replace(':', '.')}/": _ANY for name in settings.rewards if ":" in name}
    if settings.advantages is not None:
        found["train/advantages/"] = _ANY
    if settings.loss is not None:
        found["policy/"] = _ANY
    if settings.eval_every > 0:
        found |= dict.fromkeys(("eval/success_rate_by_level/", "eval/success_rate_by_kind/", "eval/pass_at_"), _SHARE)
    return found


def watched_names(settings: PolicySettings, levels: Iterable[str]) -> list[str]:
    """Names that iterations on these levels log, whether or not a stage of the curriculum draws them.

    Those that only a run knows are among them where the settings watch them: a tool may be used later.
    """
    named = [metric_name(metric) for metric in watched_by(settings)]
    return [
        *watched_metrics(settings),
        *(f"train/success_rate_by_level/{level}" for level in levels),
        *(name for name in named if watched_range(name, settings) is not None),
    ]


def watched_by(settings: PolicySettings) -> list[str]:
    """Metrics that the settings' exits, early stop and rollbacks name."""
    parts = [*(stage.rollback for stage in settings.curriculum), settings.rollback, settings.early_stop]
    conditions = [condition for stage in settings.curriculum for condition in stage.exit_conditions]
    return [part.metric for part in (*parts, *conditions) if part is not None]


def unknown_tool(metric: str, tools: Collection[str]) -> str:
    """Message where a metric is the share of a tool that the environment does not have; "" for any other.

    Args:
        tools: the environment's; () = it has none that it names, and what policies call is not known before a run.
    """
    name = metric.removeprefix(TOOL_SHARE)
    if name == metric or not tools or name in tools:
        return ""
    return f"'{metric}': the environment has no tool '{name}'; {nearest(name, tools)}"


def check_tools(settings: PolicySettings, tools: Collection[str]) -> None:
    """Raise SettingsError where the settings watch the share of a tool that the environment does not have."""
    for metric in watched_by(settings):
        if problem := unknown_tool(metric, tools):
            raise SettingsError(f"metric: {problem}")


def missing_because(name: str, settings: PolicySettings) -> str:
    """Setting that a metric needs and that these settings lack; "" for one that is logged, or that nothing logs."""
    for group in _CONDITIONAL:
        if name in group.ranges and not group.is_logged(settings):
            return group.needs
    return ""
