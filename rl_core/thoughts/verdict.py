"""Verdict on whether thoughts are genuine: gain of the policy's thoughts, and its loss in the controls. Pure functions.

Suffix: E episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rl_core.analysis.significance_tests import run_gain_test
from rl_core.analysis.statistics import Difference, bootstrap_paired_difference
from rl_core.errors import DataError

POLICY_THOUGHTS = "own"  # the condition with the policy's thoughts, in results and metric names
CONTENT_FREE_CONTROLS = ("shuffled", "filler")  # controls without any of the thought's content


@dataclass(frozen=True)
class ThoughtVerdict:
    """Mean gain over episodes, in each condition, with bootstrap intervals."""

    gains: dict[str, Difference]  # of the policy's thoughts and each control
    drops: dict[str, Difference]  # policy's thoughts minus control, paired by episode
    lost: dict[str, float]  # share of the gain lost in each control; above 1 if it does harm
    failures: list[str]  # reasons against; [] = genuine
    episodes: int
    # One-sided: gain above 0, gain above that of the control.
    p_values: dict[str, float] = field(default_factory=dict)

    @property
    def genuine(self) -> bool:
        """True if the gain is significant and depends on the content of the thoughts."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON-serialisable dict."""
        row = asdict(self) | {"genuine": self.genuine}
        for name in ("gains", "drops"):
            row[name] = {key: value._asdict() for key, value in getattr(self, name).items()}
        return row

    def collect_metrics(self) -> dict[str, float]:
        """Return scalars for tracking, named `thoughts/...`."""
        metrics = {"thoughts/genuine": float(self.genuine)}
        for name, gain in self.gains.items():
            metrics[f"thoughts/gain_{name}"] = gain.difference
            metrics[f"thoughts/gain_{name}_low"] = gain.low
            metrics[f"thoughts/gain_{name}_high"] = gain.high
        for name, drop in self.drops.items():
            metrics[f"thoughts/drop_{name}"] = drop.difference
            metrics[f"thoughts/drop_{name}_low"] = drop.low
            metrics[f"thoughts/drop_{name}_high"] = drop.high
        metrics |= {f"thoughts/p_{name}": value for name, value in self.p_values.items()}
        return metrics

    def describe(self) -> str:
        """Describe the verdict in one sentence with all numbers."""
        texts = [
            f"{name} {gain.difference:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"
            for name, gain in self.gains.items()
        ]
        verdict = "genuine" if self.genuine else "NOT genuine: " + "; ".join(self.failures)
        return f"gain by thoughts: {', '.join(texts)}; {verdict}"


def judge_thoughts(
    gains: Mapping[str, Sequence[Sequence[float]]],
    *,
    min_dependence: float = 0.5,
    bootstrap_samples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> ThoughtVerdict:
    """Judge thoughts as genuine if they help, and help by their content.

    That is: the lower bound of the gain is above 0; the lower bound of (gain - gain of the control), paired by
    episode, is above 0 for every control; the exact test of each of them (`run_gain_test`, as at the promotion gate)
    has a p-value of at most (1 - confidence) / 2; and the shuffled and the filler thoughts lose at least
    `min_dependence` of the gain. A truncated thought may lose less: its first half has content. As all conditions must
    hold, the level needs no correction for their number (intersection-union, Berger 1982).

    Args:
        gains: POLICY_THOUGHTS and each control -> episode -> turns, in one order. Turns of an episode are averaged
            first, because episodes are the units drawn independently.
    Raises: DataError if conditions do not match or POLICY_THOUGHTS is missing.
    """
    if POLICY_THOUGHTS not in gains or len(gains) < 2:
        raise DataError(
            f"gains: needs '{POLICY_THOUGHTS}' and at least one control, found {', '.join(gains) or 'nothing'}"
        )
    shapes = {name: [len(turns) for turns in episodes] for name, episodes in gains.items()}
    num_turns = shapes[POLICY_THOUGHTS]
    is_matching = all(shape == num_turns for shape in shapes.values())
    if not is_matching or not num_turns or 0 in num_turns:
        raise DataError(
            "gains: every condition needs the same episodes, each with the same turns, at least one"
        )
    means_E = {
        name: np.array([np.mean(turns) for turns in episodes]) for name, episodes in gains.items()
    }
    options: dict[str, Any] = {"samples": bootstrap_samples, "seed": seed, "confidence": confidence}
    zeros_E = np.zeros_like(means_E[POLICY_THOUGHTS])
    mean_gains = {
        name: bootstrap_paired_difference(values_E, zeros_E, **options)
        for name, values_E in means_E.items()
    }
    controls = [name for name in gains if name != POLICY_THOUGHTS]
    drops = {
        name: bootstrap_paired_difference(means_E[POLICY_THOUGHTS], means_E[name], **options)
        for name in controls
    }
    gain = mean_gains[POLICY_THOUGHTS]
    lost = {
        name: drop.difference / gain.difference if gain.difference > 0 else 0.0
        for name, drop in drops.items()
    }
    level = (1 - confidence) / 2
    p_values = {}
    for name in gains:
        differences_E = means_E[POLICY_THOUGHTS] - (
            0.0 if name == POLICY_THOUGHTS else means_E[name]
        )
        test = run_gain_test(differences_E, bounded=False, level=level, seed=seed)
        p_values[name] = test.p_value
    failures = []
    if gain.low <= 0 or p_values[POLICY_THOUGHTS] > level:
        failures.append(
            f"the gain {gain.difference:.3f} is not significantly above 0 (lower bound {gain.low:.3f}, "
            f"p = {p_values[POLICY_THOUGHTS]:.2g})"
        )
    for name in controls:
        if drops[name].low <= 0 or p_values[name] > level:
            failures.append(
                f"{name} thoughts do not lose significantly (lower bound of the loss {drops[name].low:.3f}, "
                f"p = {p_values[name]:.2g})"
            )
        elif name in CONTENT_FREE_CONTROLS and gain.low > 0 and lost[name] < min_dependence:
            failures.append(
                f"{name} thoughts lose {lost[name]:.0%} of the gain, less than {min_dependence:.0%}"
            )
    return ThoughtVerdict(mean_gains, drops, lost, failures, len(zeros_E), p_values)
