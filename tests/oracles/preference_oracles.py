"""Preference losses and their gradients in numpy float64, from token log-probabilities row by row.

Written from the papers, independent of `rl_core`: a row is (log-probabilities of the sampled tokens under the policy,
those under the reference); sums over rows are plain loops.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "bradley_terry",
    "cdpo",
    "dpo",
    "ipo",
    "kto",
    "kto_point",
    "odds",
    "orpo",
    "sigmoid",
    "simpo",
]


def sigmoid(x):
    """Compute 1 / (1 + e^-x) for either sign of x."""
    return 1 / (1 + np.exp(-x)) if x >= 0 else np.exp(x) / (1 + np.exp(x))


def minus_log_sigmoid(x):
    """-log sigmoid(x) = log(1 + e^-x)."""
    return np.log1p(np.exp(-x)) if x >= 0 else -x + np.log1p(np.exp(x))


def _ratio(pair):
    (chosen, ref_chosen), (rejected, ref_rejected) = pair
    return (np.sum(chosen) - np.sum(ref_chosen)) - (np.sum(rejected) - np.sum(ref_rejected))


def dpo(pairs, beta):
    """Compute arXiv:2305.18290, eq. 7: mean of -log sigmoid(beta h), h from sums over the tokens."""
    return np.mean([minus_log_sigmoid(beta * _ratio(pair)) for pair in pairs])


def cdpo(pairs, beta, share):
    """Compute conservative DPO (Mitchell 2023): a share of the labels is assumed to be swapped."""
    right = [minus_log_sigmoid(beta * _ratio(pair)) for pair in pairs]
    swapped = [minus_log_sigmoid(-beta * _ratio(pair)) for pair in pairs]
    return (1 - share) * np.mean(right) + share * np.mean(swapped)


def ipo(pairs, beta):
    """Compute arXiv:2310.12036, eq. 17, on means over the tokens."""
    losses = []
    for (chosen, ref_chosen), (rejected, ref_rejected) in pairs:
        h = (np.mean(chosen) - np.mean(ref_chosen)) - (np.mean(rejected) - np.mean(ref_rejected))
        losses.append((h - 0.5 / beta) ** 2)
    return np.mean(losses)


def simpo(pairs, beta, gamma):
    """Compute arXiv:2405.14734, eq. 6: -log sigmoid(beta/|c| log pi(c) - beta/|r| log pi(r) - gamma)."""
    losses = []
    for (chosen, _), (rejected, _) in pairs:
        reward_c, reward_r = (
            beta / len(chosen) * np.sum(chosen),
            beta / len(rejected) * np.sum(rejected),
        )
        losses.append(minus_log_sigmoid(reward_c - reward_r - gamma))
    return np.mean(losses)


def odds(tokens):
    """Compute arXiv:2403.07691, eq. 4, of the geometric mean of the tokens' probabilities."""
    p = np.exp(np.mean(tokens))
    return p / (1 - p)


def orpo(pairs, weight):
    """Compute arXiv:2403.07691, eqs. 6 and 7: cross-entropy of the chosen side, plus the odds-ratio term."""
    losses = []
    for (chosen, _), (rejected, _) in pairs:
        ratio = odds(chosen) / odds(rejected)
        losses.append(
            -np.mean(chosen) + weight * -np.log(ratio / (1 + ratio))
        )  # sigmoid(log x) = x / (1 + x)
    return np.mean(losses)


def kto_point(mismatched):
    """Compute arXiv:2402.01306, sec. 4.1: max(0, mean of the log-ratios of mismatched completions)."""
    return max(
        0.0,
        float(np.mean([np.sum(policy) - np.sum(reference) for policy, reference in mismatched])),
    )


def kto(rows, labels, point, beta, desirable_weight, undesirable_weight):
    """Compute arXiv:2402.01306, eqs. 7 and 8: mean of weight - value."""
    losses = []
    for (policy, reference), label in zip(rows, labels, strict=True):
        reward = np.sum(policy) - np.sum(reference)
        if label:
            losses.append(desirable_weight - desirable_weight * sigmoid(beta * (reward - point)))
        else:
            losses.append(
                undesirable_weight - undesirable_weight * sigmoid(beta * (point - reward))
            )
    return np.mean(losses)


def bradley_terry(chosen, rejected, margins, center):
    """Compute arXiv:2307.09288, eq. 2 (margin), and arXiv:2312.09244 (centring)."""
    losses = [
        minus_log_sigmoid(c - r - m) + center * (c + r) ** 2
        for c, r, m in zip(chosen, rejected, margins, strict=True)
    ]
    return np.mean(losses)
