"""Names of metrics for people; the raw name appears on hover, with its meaning from the metric reference."""

from __future__ import annotations

import functools
import re

from rl_core.analysis.metric_reference import GROUPS, Metric

__all__ = ["hint_of", "is_share", "label_of"]

_LABELS = {
    "train/success_rate": "Success in training",
    "train/success_rate_by_level/*": "Success in training, {}",
    "eval/success_rate": "Success, held out",
    "eval/success_rate_by_level/*": "Success, held out, {}",
    "eval/accuracy": "Pairs ranked rightly, held out",
    "train/accuracy": "Pairs ranked rightly in training",
    "train/margin": "Margin in training",
    "eval/margin": "Margin, held out",
    "train/loss": "Loss in training",
    "eval/loss": "Loss, held out",
    "eval/perplexity": "Perplexity, held out",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "train/epoch": "Epochs",
    "train/turns": "Turns",
    "train/action_tokens": "Sampled tokens",
    "train/action_tokens_p10": "Sampled tokens, 10th percentile",
    "train/action_tokens_p90": "Sampled tokens, 90th percentile",
    "train/completion_tokens": "Tokens after the prompt",
    "train/truncation_rate": "Cut by a limit",
    "train/loop_rate": "Rollouts with a loop",
    "train/coherent_rate": "Coherent rollouts",
    "train/right_action_rate": "Right action, right place",
    "train/exploration_efficiency": "Exploration efficiency",
    "train/advantages_mean": "Mean advantage",
    "train/advantages_std": "Spread of advantages",
    "train/zero_advantage_rate": "Samples with advantage 0",
    "train/trained_rollouts": "Rollouts trained on",
    "train/filtering_rate": "Samples filtered out",
    "train/failed_rate": "Failed episodes, share",
    "train/failed_episodes": "Failed episodes so far",
    "train/skipped_steps": "Skipped steps",
    "train/empty_updates": "Steps without a token to learn from",
    "train/tokens": "Tokens",
    "train/episode_return": "Return in training",
    "eval/episode_return": "Return, held out",
    "reward/mean": "Reward",
    "reward/std": "Spread of rewards",
    "reward/alarm": "Alarm: reward hacking",
    "reward/correlation/*": "Correlation with success, {}",
    "reward/weighted/*": "Weighted reward, {}",
    "reward/*": "Reward, {}",
    "policy/update_kl": "KL of the update",
    "policy/update_kl_k1": "KL of the update (k1)",
    "policy/ref_kl": "KL to the reference",
    "policy/sampler_kl": "KL of sampler and trainer",
    "policy/sampler_difference_max": "Largest difference of sampler and trainer",
    "policy/entropy": "Entropy",
    "policy/entropy_coef": "Weight of the entropy bonus",
    "policy/kl_coef": "Weight of the KL",
    "policy/loss": "Loss of the policy",
    "policy/mean_logprob": "Mean log-probability",
    "policy/ratio_mean": "Mean ratio",
    "policy/ratio_max": "Largest ratio",
    "policy/clip_fraction": "Clipped tokens",
    "policy/clip_fraction_low": "Tokens clipped below",
    "policy/clip_fraction_high": "Tokens clipped above",
    "perf/tokens_per_second": "Throughput",
    "perf/rollout_tokens_per_second": "Throughput of rollouts",
    "perf/memory_gb": "Memory",
    "perf/step_seconds": "Iteration",
    "perf/*_seconds": "Time: {}",
    "tool/misuse_rate": "Calls that failed",
    "tool/calls": "Tool calls",
    "tool/used_rate": "Rollouts with a call",
    "tool/hung_calls": "Calls that hang",
    "tool/share/*": "Share of calls, {}",
    "curriculum/stage": "Stage of the curriculum",
    "curriculum/stage_iterations": "Iterations in the stage",
    "curriculum/average/*": "Moving average, {}",
}


@functools.lru_cache(maxsize=4096)
def label_of(name: str) -> str:
    """Name for people; the metric's own where there is none."""
    if (label := _LABELS.get(name)) is not None:
        return label
    for pattern, label in _PATTERNS:
        if found := pattern.fullmatch(name):
            return label.format(found[1].replace("_", " "))
    return name


_PATTERNS = [
    (re.compile(re.escape(name).replace(r"\*", "([^/]+)")), label) for name, label in _LABELS.items() if "*" in name
]


@functools.lru_cache(maxsize=4096)
def hint_of(name: str) -> str:
    """Raw name, meaning and warning sign, for the mouse that rests on a name."""
    found = _row_of(name)
    if found is None:
        return name
    worry = f"\nWorry: {found.worry}" if found.worry else ""
    return f"{name}: {found.meaning}{worry}"


def is_share(name: str) -> bool:
    """True = the metric reference has it between 0 and 1, a part of a whole."""
    found = _row_of(name)
    return found is not None and found.unit == "share"


@functools.lru_cache(maxsize=4096)
def _row_of(name: str) -> Metric | None:
    exact, rows = _reference()
    return exact.get(name) or next((metric for pattern, metric in rows if pattern.fullmatch(name)), None)


@functools.cache
def _reference() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    """Rows by name, and those with fields, the ones with the most text outside their fields first."""
    metrics = [metric for group in GROUPS for metric in group.metrics]
    open_ones = [metric for metric in metrics if "{" in metric.name]
    open_ones.sort(key=lambda metric: -len(_FIELD.sub("", metric.name)))
    patterns = [(_pattern(metric.name), metric) for metric in open_ones]
    return {metric.name: metric for metric in metrics}, patterns


_FIELD = re.compile(r"\{\w+\}")


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(re.escape(part) for part in _FIELD.split(name)))
