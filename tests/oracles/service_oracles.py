"""The service's losses written out token by token in numpy float64; nothing here imports the code that it judges.

`p` are current log-probabilities, `fixed` the same numbers where a formula stops the gradient; a list per datum.
"""

import math

import numpy as np

Rows = list[np.ndarray]


def ratio(p: float, q: float) -> float:
    return math.exp(min(max(p - q, -20.0), 20.0))


def cross_entropy(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    return -sum(float((row["weights"] * part).sum()) for part, row in zip(p, rows, strict=True))


def importance_sampling(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    return -sum(
        ratio(a, q) * w for part, row in zip(p, rows, strict=True) for a, q, w in tokens(part, row)
    )


def tokens(part: np.ndarray, row: dict):
    return zip(part, row["logprobs"], row["advantages"], strict=True)


def limits(row: dict, index: int, options: dict) -> tuple[float, float]:
    names = ("clip_low_threshold", "clip_high_threshold")
    low, high = (row[name][index] if name in row else options[name] for name in names)
    return low, high


def ppo(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    total = 0.0
    for part, row in zip(p, rows, strict=True):
        for index, (a, q, w) in enumerate(tokens(part, row)):
            low, high = limits(row, index, options)
            r = ratio(a, q)
            total -= min(r * w, min(max(r, low), high) * w)
    return total


def cispo(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    total = 0.0
    for part, still, row in zip(p, fixed, rows, strict=True):
        for index, (a, q, w) in enumerate(tokens(part, row)):
            low, high = limits(row, index, options)
            total -= min(max(ratio(still[index], q), low), high) * w * a
    return total


def dro(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    return -sum(
        w * a - options["beta"] / 2 * (a - q) ** 2
        for part, row in zip(p, rows, strict=True)
        for a, q, w in tokens(part, row)
    )


def gspo(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    total = 0.0
    for part, row in zip(p, rows, strict=True):
        inside = row["sequence_ratio_mask"] != 0
        s = math.exp(float((part - row["logprobs"])[inside].mean())) if inside.any() else 1.0
        for index, w in enumerate(row["advantages"]):
            low, high = limits(row, index, options)
            total -= min(s * w, min(max(s, low), high) * w)
    return total


def stable_reinforce(p: Rows, fixed: Rows, rows: list[dict], options: dict) -> float:
    """Sum over tokens; `p` are [T, 1 + K]: the target's log-probability, then those of the recorded tokens."""
    total = 0.0
    for part, row in zip(p, rows, strict=True):
        for t, recorded in enumerate(row["sampler_top_logprobs"]):
            known = [k for k, logq in enumerate(recorded) if logq > -1e4]
            if not known:
                continue
            kl = sum(math.exp(recorded[k]) * (recorded[k] - part[t][1 + k]) for k in known)
            rest = 1 - sum(math.exp(recorded[k]) for k in known)
            if rest > 1e-12:
                kl += rest * math.log(rest / (1 - sum(math.exp(part[t][1 + k]) for k in known)))
            a = row["advantages"][t]
            total -= a * part[t][0] + (a - options["kl_coeff"]) * kl
    return total


def generalised_advantages(rewards, values, mask, gamma: float, lam: float):
    """Compute advantages and returns over the masked tokens of one row, from the last to the first."""
    advantages, after, value_after = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            after = rewards[t] + gamma * value_after - values[t] + gamma * lam * after
            advantages[t], value_after = after, values[t]
    return advantages, np.where(mask, advantages + values, 0.0)


def k3(p: float, other: float) -> float:
    d = min(max(p - other, -10.0), 10.0)
    return math.exp(-d) - 1 + d


def enhanced_ppo(
    p: Rows, fixed: Rows, rows: list[dict], options: dict, values: Rows, entropy: Rows
) -> float:
    total = 0.0
    for part, row, v, h in zip(p, rows, values, entropy, strict=True):
        mask = row["mask"] != 0
        adv, ret = generalised_advantages(
            row["rewards"], row["values"], mask, options["gamma"], options["gae_lambda"]
        )
        for t in np.flatnonzero(mask):
            low, high = limits(row, t, options)
            r, clip = ratio(part[t], row["logprobs"][t]), options["value_clip"]
            bounded = row["values"][t] + min(max(v[t] - row["values"][t], -clip), clip)
            total -= min(r * adv[t], min(max(r, low), high) * adv[t])
            total += (
                options["value_coef"] * 0.5 * max((v[t] - ret[t]) ** 2, (bounded - ret[t]) ** 2)
            )
            total += (
                options["kl_coef"] * k3(part[t], row["ref_logprobs"][t])
                - options["entropy_coef"] * h[t]
            )
    return options["scale"] * total


def conservative_ppo(
    p: Rows, fixed: Rows, rows: list[dict], options: dict, values: Rows, entropy: Rows
) -> float:
    total = ppo(p, fixed, rows, options)
    for part, row, h in zip(p, rows, entropy, strict=True):
        for t in np.flatnonzero(row["advantages"]):
            total += (
                options["kl_coef"] * k3(part[t], row["ref_logprobs"][t])
                - options["entropy_coef"] * h[t]
            )
    return options["scale"] * total


def reward_modeling(scores: np.ndarray, rows: list[dict], options: dict) -> float:
    total = 0.0
    for first in range(0, len(rows), 2):
        pair = sorted((first, first + 1), key=lambda i: -rows[i]["preferred"][0])
        chosen, rejected = scores[pair[0]], scores[pair[1]]
        total += math.log1p(math.exp(-(chosen - rejected - rows[pair[0]]["margin"][0])))
        total += options["center_coef"] * (chosen + rejected) ** 2
    return options["scale"] * total
