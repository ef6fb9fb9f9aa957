"""Policy-gradient objectives written out token by token in numpy float64, from the papers.

Nothing here imports the code that it judges. Arrays are [B, T]; a mask is True where a token counts.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Case:
    """One optimizer step: ragged rows with gaps (tool observations), some without any loss token."""

    mask: np.ndarray
    new: np.ndarray  # log-probs of the current policy
    old: np.ndarray  # of the policy before the update
    sampler: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray  # 0 where the mask is False
    values: np.ndarray
    bootstrap: np.ndarray  # [B]
    max_tokens: int  # limit of a completion, for the constant denominator


def draw(seed: int) -> Case:
    """Draw a random case; every fifth has log-ratios beyond the clamps."""
    rng = np.random.default_rng([20261122, seed])
    rows, width = int(rng.integers(1, 7)), int(rng.integers(1, 14))
    lengths = rng.integers(0, width + 1, size=rows)
    mask = (np.arange(width) < lengths[:, None]) & (rng.random((rows, width)) < 0.8)
    mask[0, 0] = True  # a step has at least one loss token
    spread = 15.0 if seed % 5 == 4 else 0.4
    near = lambda base: base + spread * rng.standard_normal((rows, width))  # noqa: E731
    old = -rng.exponential(2.0, (rows, width))
    case = Case(
        mask=mask,
        old=old,
        new=near(old),
        sampler=near(old),
        reference=near(old),
        advantages=rng.standard_normal((rows, width)),
        rewards=np.where(mask, rng.standard_normal((rows, width)), 0.0),
        values=rng.standard_normal((rows, width)),
        bootstrap=rng.standard_normal(rows),
        max_tokens=width + 3,
    )
    for array in (case.new, case.old, case.sampler, case.reference, case.advantages, case.values):
        array[~mask] = np.nan  # what stands outside the mask is never read
    return case


def weights(case: Case, aggregation: str) -> np.ndarray:
    """Compute the weight of each token in the loss of the step."""
    actual = np.zeros(case.mask.shape)
    sequences = sum(1 for row in case.mask if row.any())
    for b, row in enumerate(case.mask):
        for t in np.flatnonzero(row):
            actual[b, t] = {
                "token_mean": 1 / case.mask.sum(),
                "sequence_mean": 1 / sequences / row.sum(),
                "constant": 1 / (len(case.mask) * case.max_tokens),
            }[aggregation]
    return actual


def ratios(logprobs: np.ndarray, behavior: np.ndarray, mask: np.ndarray, level: str) -> np.ndarray:
    """Compute pi / mu of each token, of its sequence, or the geometric mean over its sequence."""
    actual = np.zeros(mask.shape)
    for b, row in enumerate(mask):
        where = np.flatnonzero(row)
        for t in where:
            logs = logprobs[b, where] - behavior[b, where]
            log = {
                "token": logprobs[b, t] - behavior[b, t],
                "sequence": logs.sum(),
                "geometric": logs.mean() if len(logs) else 0.0,
            }[level]
            actual[b, t] = np.exp(min(max(log, -20.0), 20.0))
    return actual


def importance(
    case: Case,
    weighting: str,
    cap: float,
    masking: str,
    low: float,
    high: float,
    target: np.ndarray,
):
    """Compute the importance weight of each token, 0 if it is dropped."""
    actual = np.where(case.mask, 1.0, 0.0)
    if weighting != "none":
        actual = np.minimum(ratios(target, case.sampler, case.mask, weighting), cap)
    if masking != "none":
        measured = ratios(target, case.sampler, case.mask, masking)
        actual = np.where((measured >= low) & (measured <= high), actual, 0.0)
    return actual


def policy_loss(case: Case, name: str, weight: np.ndarray, advantages: np.ndarray, **option: float):
    """Compute the loss of the step, and its derivative by each token's log-prob."""
    loss, slope = 0.0, np.zeros(case.mask.shape)
    for b, row in enumerate(case.mask):
        where = np.flatnonzero(row)
        if not len(where):
            continue
        full = float(advantages[b, where].mean())
        for t in where:
            log = case.new[b, t] - case.old[b, t]
            a, inside = advantages[b, t], abs(log) <= 20
            r = np.exp(min(max(log, -20.0), 20.0))
            if name == "clipped":
                value, d = clipped(r, a, option["low"], option["high"], option.get("dual"))
                d = d * r * inside
            elif name == "gspo":
                continue
            elif name == "cispo":
                value = -min(r, 1 + option["high"]) * a * case.new[b, t]
                d = -min(r, 1 + option["high"]) * a
            elif name == "dppo":
                value, d = masked_by_divergence(case.new[b, t], case.old[b, t], a, **option)
            elif name == "sapo":
                tau = option["positive"] if a > 0 else option["negative"]
                p = 1 / (1 + np.exp(-tau * (r - 1)))
                value, d = -4 / tau * p * a, -4 * p * (1 - p) * a * r * inside
            else:
                value, d = -a * case.new[b, t], -a
            loss += weight[b, t] * value
            slope[b, t] += weight[b, t] * d
        if name == "gspo":
            logs = case.new[b, where] - case.old[b, where]
            mean = logs.mean()
            s = np.exp(min(max(mean, -20.0), 20.0))
            value, d = clipped(s, full, option["low"], option["high"], None)
            share = weight[b, where].sum()
            loss += share * value
            slope[b, where] += share * d * s * (abs(mean) <= 20) / len(where)
    return loss, slope


def masked_by_divergence(new: float, old: float, a: float, kind: str, low: float, high: float):
    """Compute DPPO's term and its derivative by the log-prob, from the probabilities of sampled or not."""
    p, q = np.exp(min(new, 0.0)), np.exp(min(old, 0.0))
    divergence = abs(p - q)
    if kind == "kl":
        rest = (1 - q) * np.log((1 - q) / max(1 - p, 1e-12)) if q < 1 else 0.0
        divergence = q * (min(old, 0.0) - min(new, 0.0)) + rest
    away_up, away_down = a > 0 and new > old, a < 0 and new < old
    if (away_up and divergence > high) or (away_down and divergence > low):
        return 0.0, 0.0
    weight = min(np.exp(min(max(new - old, -20.0), 20.0)), 20.0)
    return -weight * a * new, -weight * a


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None):
    """Compute PPO's clipped term and its derivative by the ratio; with dual clip at most -dual A if A < 0."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    baseline, held = -ratio * advantage, -bounded * advantage
    value, d = (baseline, -advantage) if baseline >= held else (held, 0.0)
    if baseline == held:
        d = -advantage
    if dual is not None and advantage < 0 and value > -dual * advantage:
        value, d = -dual * advantage, 0.0
    return value, d


def kl(case: Case, estimator: str, weight: np.ndarray) -> float:
    """Compute KL(policy || reference) of the step, k1, k2 or k3."""
    total = 0.0
    for b, t in zip(*np.nonzero(case.mask), strict=True):
        d = case.new[b, t] - case.reference[b, t]
        held = min(max(d, -10.0), 10.0)
        total += (
            weight[b, t] * {"k1": d, "k2": d * d / 2, "k3": np.exp(-held) - 1 + held}[estimator]
        )
    return total


def entropy(logits: np.ndarray) -> float:
    """Compute the entropy of one position."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def gae(case: Case, gamma: float, lam: float):
    """Compute advantages and returns, from the last loss token to the first."""
    ones = np.ones(case.mask.shape)
    return vtrace(case, ones, gamma, lam, 1.0, 1.0)


def vtrace(case: Case, ratio: np.ndarray, gamma: float, lam: float, rho_cap: float, c_cap: float):
    """Compute advantages and targets by the definition: a sum over all later loss tokens (Espeholt et al., eq. 1)."""
    advantages, targets = np.zeros(case.mask.shape), np.zeros(case.mask.shape)
    for b, row in enumerate(case.mask):
        where = np.flatnonzero(row)
        n = len(where)
        v, r = case.values[b, where], case.rewards[b, where]
        after = np.append(v[1:], case.bootstrap[b]) if n else v
        rho, c = np.minimum(ratio[b, where], rho_cap), lam * np.minimum(ratio[b, where], c_cap)
        delta = rho * (r + gamma * after - v)
        errors = np.array(
            [
                sum(gamma ** (k - s) * np.prod(c[s:k]) * delta[k] for k in range(s, n))
                for s in range(n)
            ]
        )
        for i, t in enumerate(where):
            later = errors[i + 1] if i + 1 < n else 0.0
            targets[b, t] = v[i] + errors[i]
            advantages[b, t] = rho[i] * (r[i] + gamma * (after[i] + lam * later) - v[i])
    return advantages, targets


def distillation(case: Case, gamma: float) -> np.ndarray:
    """Compute advantages with the reference as teacher: log p_teacher - log p_student, and the later ones."""
    rewards = np.zeros(case.mask.shape)
    for b, t in zip(*np.nonzero(case.mask), strict=True):
        rewards[b, t] = case.reference[b, t] - case.old[b, t]
    return discounted(rewards, case.mask, gamma)


def aligned_distillation(
    student: np.ndarray,
    teacher: np.ndarray,
    student_spans: np.ndarray,
    teacher_spans: np.ndarray,
    gamma: float,
) -> np.ndarray:
    """Compute a span's advantage: the sum of its reward, log p_teacher - log p_student of all its tokens, and later
    spans'.
    """
    actual = np.zeros(student.shape)
    for b in range(len(student)):
        spans = sorted(int(j) for j in set(student_spans[b]) if j >= 0)
        rewards = [
            sum(teacher[b, u] for u in np.flatnonzero(teacher_spans[b] == j))
            - sum(student[b, t] for t in np.flatnonzero(student_spans[b] == j))
            for j in spans
        ]
        for i, j in enumerate(spans):
            value = sum(reward * (gamma**k if k else 1.0) for k, reward in enumerate(rewards[i:]))
            actual[b, student_spans[b] == j] = value
    return actual


def discounted(rewards: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    """Sum of a token's reward and the later ones of its row, each gamma^distance in loss tokens."""
    actual = np.zeros(mask.shape)
    for b, row in enumerate(mask):
        where = np.flatnonzero(row)
        for i, t in enumerate(where):
            actual[b, t] = sum(
                rewards[b, u] * (gamma**k if k else 1.0) for k, u in enumerate(where[i:])
            )
    return actual


def compare(values: np.ndarray, method: str) -> np.ndarray:
    """Advantages of one set of compared rewards or returns."""
    n = len(values)
    if n == 1:
        return np.zeros(1)
    centered = np.array([value - sum(values) / n for value in values])
    if method == "dr_grpo":
        return centered
    if method == "rloo":
        return np.array([v - (sum(values) - v) / (n - 1) for v in values])
    deviation = np.sqrt(sum(c * c for c in centered) / (n - 1))
    return centered / (deviation + 1e-4) if deviation >= 1e-3 else np.zeros(n)


def turn_advantages(rewards, keys, episodes, gamma, episode_weight, step_weight, method):
    """Advantages of the turns of one group; a key of None is not compared.

    Every turn's return is summed from the definition, every set collected by a search over all turns.
    """
    returns = [
        [sum(gamma ** (m - n) * row[m] for m in range(n, len(row))) for n in range(len(row))]
        for row in rewards
    ]
    places = [(j, n) for j, row in enumerate(rewards) for n in range(len(row))]
    actual = []
    for j, row in enumerate(rewards):
        values = []
        for n in range(len(row)):
            step = 0.0
            if keys[j][n] is not None:
                peers = [(a, b) for a, b in places if keys[a][b] == keys[j][n]]
                compared = compare(np.array([returns[a][b] for a, b in peers]), method)
                step = compared[peers.index((j, n))]
            values.append(episode_weight * episodes[j] + step_weight * step)
        actual.append(values)
    return actual
