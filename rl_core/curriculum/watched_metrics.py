"""Metrics that exit conditions, early stopping and rollback may watch: those that a policy stage logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl_core.settings import PolicySettings

__all__ = ["ALWAYS", "missing_because", "watched_metrics", "watched_names"]

Range = tuple[float, float]  # least and largest value

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
    "train/exploration_efficiency": _SHARE,  # without an update too, but not without tool steps
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
        lambda s: s.importance in ("token", "sequence"), "importance: token or sequence",
    ),
    _Conditional(
        {"value/loss": _COUNT, "value/explained_variance": (-math.inf, 1.0), "value/returns_mean": _ANY,
         "value/values_mean": _ANY},
        lambda s: s.value_function is not None, "a critic (algorithm: ppo, or critic)",
    ),
    _Conditional(
        {"train/dropped_group_rate": _SHARE}, lambda s: s.sampling_tries > 0, "dynamic_sampling_tries above 0"
    ),
    _Conditional({"train/replayed_rollouts": _COUNT}, lambda s: s.replay is not None, "replay"),
)  # fmt: skip


def watched_metrics(settings: PolicySettings) -> dict[str, Range]:
    """Names that iterations with these settings log, with the least and the largest value of each."""
    parts = [f"{kind}/{name.replace(':', '.')}" for name in settings.rewards for kind in ("reward", "reward/weighted")]
    found = ALWAYS | _UPDATED | dict.fromkeys(parts, _ANY)
    found |= {f"train/success_rate_by_level/{lv}": _SHARE for stage in settings.curriculum for lv in stage.levels}
    for group in _CONDITIONAL:
        if group.is_logged(settings):
            found |= group.ranges
    return found


def watched_names(settings: PolicySettings, levels: Iterable[str]) -> list[str]:
    """Names that iterations on these levels log, whether or not a stage of the curriculum draws them."""
    return [*watched_metrics(settings), *(f"train/success_rate_by_level/{level}" for level in levels)]


def missing_because(name: str, settings: PolicySettings) -> str:
    """Setting that a metric needs and that these settings lack; "" for one that is logged, or that nothing logs."""
    for group in _CONDITIONAL:
        if name in group.ranges and not group.is_logged(settings):
            return group.needs
    return ""
