"""Names of the metrics that people look at most; the page shows the raw name on hover."""

from __future__ import annotations

__all__ = ["label_of"]

_LABELS = {
    "train/success_rate": "Success in training",
    "eval/success_rate": "Success, held out",
    "eval/accuracy": "Pairs ranked rightly, held out",
    "train/accuracy": "Pairs ranked rightly in training",
    "train/loss": "Loss in training",
    "eval/loss": "Loss, held out",
    "eval/perplexity": "Perplexity, held out",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "train/epoch": "Epochs",
    "train/turns": "Turns",
    "reward/mean": "Reward",
    "reward/std": "Spread of rewards",
    "policy/update_kl": "KL of the update",
    "policy/ref_kl": "KL to the reference",
    "policy/sampler_kl": "KL of sampler and trainer",
    "policy/entropy": "Entropy",
    "policy/clip_fraction": "Clipped tokens",
    "perf/tokens_per_second": "Throughput",
    "perf/memory_gb": "Memory",
    "tool/misuse_rate": "Calls that failed",
    "tool/calls": "Tool calls",
}


def label_of(name: str) -> str:
    """Name for people; the metric's own where there is none."""
    return _LABELS.get(name, name)
