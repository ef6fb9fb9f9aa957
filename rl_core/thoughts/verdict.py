"""Test of thoughts for being genuine: own gain, loss of the gain in the controls, verdict. Pure functions.

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

CONTENT_FREE_CONTROLS = ("shuffled", "filler")  # controls without any of the thought's content


@dataclass(frozen=True)
class ThoughtVerdict:
    """Mean gain over episodes, in each condition, with bootstrap intervals."""

    gains: dict[str, Difference]  # "own" and each control
    drops: dict[str, Difference]  # own minus control, paired by episode
    lost: dict[str, float]  # share of the own gain lost in each control; above 1 where it does harm
    failures: list[str]  # reasons against; [] = genuine
    episodes: int
    p_values: dict[str, float] = field(
        default_factory=dict
    )  # one-sided: own above 0, own above control

    @property
    def genuine(self) -> bool:
        """True = the gain is significant and depends on the content of the thoughts."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        row = asdict(self) | {"genuine": self.genuine}
        for name in ("gains", "drops"):
            row[name] = {key: value._asdict() for key, value in getattr(self, name).items()}
        return row

    def collect_metrics(self) -> dict[str, float]:
        """Scalars for tracking, named `thoughts/...`."""
        found = {"thoughts/genuine": float(self.genuine)}
        for name, gain in self.gains.items():
            found |= {
                f"thoughts/gain_{name}{suffix}": value for suffix, value in _list_bounds(gain)
            }
        for name, drop in self.drops.items():
            found |= {
                f"thoughts/drop_{name}{suffix}": value for suffix, value in _list_bounds(drop)
            }
        found |= {f"thoughts/p_{name}": value for name, value in self.p_values.items()}
        return found

    def describe(self) -> str:
        """One sentence with all numbers."""
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
    """Verdict: thoughts are genuine when they help, and help by their content.

    That is: the lower bound of the own gain is above 0; the lower bound of (own - control), paired by episode, is above
    0 for every control; the exact test of each of them (`run_gain_test`, as at the promotion gate) has a p-value of at most
    (1 - confidence) / 2; and the shuffled and the filler thoughts lose at least `min_dependence` of the own gain. A
    truncated thought may keep more: its first half has content. All have to hold, so the level needs no correction for
    their number (intersection-union, Berger 1982).

    Args:
        gains: "own" and each control -> episode -> turns, in one order. Turns of an episode are averaged first, since
            episodes are what is drawn independently.
    Raises: DataError when conditions do not fit together or "own" is missing.
    """
    if "own" not in gains or len(gains) < 2:
        raise DataError(
            f"gains: needs 'own' and at least one control, found {', '.join(gains) or 'nothing'}"
        )
    shapes = {name: [len(turns) for turns in episodes] for name, episodes in gains.items()}
    if (
        any(shape != shapes["own"] for shape in shapes.values())
        or not shapes["own"]
        or 0 in shapes["own"]
    ):
        raise DataError(
            "gains: every condition needs the same episodes, each with the same turns, at least one"
        )
    means_E = {
        name: np.array([np.mean(turns) for turns in episodes]) for name, episodes in gains.items()
    }
    options: dict[str, Any] = {"samples": bootstrap_samples, "seed": seed, "confidence": confidence}
    zeros_E = np.zeros_like(means_E["own"])
    found = {
        name: bootstrap_paired_difference(values_E, zeros_E, **options)
        for name, values_E in means_E.items()
    }
    controls = [name for name in gains if name != "own"]
    drops = {
        name: bootstrap_paired_difference(means_E["own"], means_E[name], **options)
        for name in controls
    }
    own = found["own"]
    lost = {
        name: drop.difference / own.difference if own.difference > 0 else 0.0
        for name, drop in drops.items()
    }
    level = (1 - confidence) / 2
    p_values = {
        name: run_gain_test(
            means_E["own"] - (0.0 if name == "own" else means_E[name]),
            bounded=False,
            level=level,
            seed=seed,
        ).p_value
        for name in gains
    }
    failures = []
    if own.low <= 0 or p_values["own"] > level:
        failures.append(
            f"the gain {own.difference:.3f} is not above 0 for sure (lower bound {own.low:.3f}, "
            f"p = {p_values['own']:.2g})"
        )
    for name in controls:
        if drops[name].low <= 0 or p_values[name] > level:
            failures.append(
                f"{name} thoughts do not lose for sure (lower bound of the loss {drops[name].low:.3f}, "
                f"p = {p_values[name]:.2g})"
            )
        elif name in CONTENT_FREE_CONTROLS and own.low > 0 and lost[name] < min_dependence:
            failures.append(
                f"{name} thoughts lose {lost[name]:.0%} of the gain, less than {min_dependence:.0%}"
            )
    return ThoughtVerdict(found, drops, lost, failures, len(zeros_E), p_values)


def _list_bounds(value: Difference) -> list[tuple[str, float]]:
    return [("", value.difference), ("_low", value.low), ("_high", value.high)]
