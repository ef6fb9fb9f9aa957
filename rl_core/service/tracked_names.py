"""Names for trackers of what answers of the engine measure: `train/...`, `policy/...`, `value/...`.

Answers have names with a reduction (`clip_fraction:mean`), as clients add up parts of a request by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["tracked"]

_NAMES = {
    "loss:sum": "train/loss_sum",
    "loss_per_token:mean": "train/loss",
    "loss_per_pair:mean": "train/loss",
    "nll:mean": "train/nll",
    "tokens:sum": "train/tokens",
    "sequences:sum": "train/sequences",
    "grad_norm:mean": "train/grad_norm",
    "learning_rate:mean": "train/learning_rate",
    "advantage:mean": "train/advantages_mean",
    "accuracy:mean": "train/accuracy",
    "margin:mean": "train/margin",
    "ranking_loss:mean": "train/ranking_loss",
    "reward:mean": "reward/mean",
    "entropy:mean": "policy/entropy",
    "update_kl:mean": "policy/update_kl",
    "update_kl_k1:mean": "policy/update_kl_k1",
    "kl_after:max": "policy/kl_after_max",
    "refused:mean": "policy/refused_steps",
    "ref_kl:mean": "policy/ref_kl",
    "clip_fraction:mean": "policy/clip_fraction",
    "clip_fraction_low:mean": "policy/clip_fraction_low",
    "clip_fraction_high:mean": "policy/clip_fraction_high",
    "ratio:mean": "policy/ratio_mean",
    "ratio:max": "policy/ratio_max",
    "sampler_difference:max": "policy/sampler_difference_max",
    "effective_sample_share:mean": "policy/effective_sample_share",
    "value_loss:mean": "value/loss",
    "value_clip_fraction:mean": "value/clip_fraction",
    "explained_variance:mean": "value/explained_variance",
    "return:mean": "value/returns_mean",
    "value:mean": "value/values_mean",
}


def tracked(metrics: Mapping[str, float]) -> dict[str, float]:
    """An answer's metrics under the names that trainers log.

    The standard deviation of advantages follows from their mean and mean square. `policy/loss` is the loss per token
    of a policy loss (one that has a ratio).
    """
    found = {_NAMES[name]: float(value) for name, value in metrics.items() if name in _NAMES}
    if "advantage_square:mean" in metrics:
        square, mean = metrics["advantage_square:mean"], metrics["advantage:mean"]
        found["train/advantages_std"] = math.sqrt(max(0.0, square - mean**2))
    if "ratio:mean" in metrics and "train/loss" in found:
        found["policy/loss"] = found["train/loss"]
    return found
