"""The gate of snapshots: a paired test that may be looked at after every episode, for as long as the service lives.

Candidate and live model (and the champion) answer the same canary episodes, which nobody trains on. With d the
difference of their successes, -1 to 1, the hypothesis to be refuted is "worse by the margin or more": mean d <=
-margin.

Within a candidate: the wealth mean_l prod_i (1 + l (d_i + margin)) of the betting test (`betting_test`) is a
non-negative supermartingale under the hypothesis, so it ever exceeds 1 / level with probability `level` at most,
however often one looks (Ville's inequality): its reciprocal is an anytime-valid p-value.
Over candidates: the k-th is tested at alpha / (k (k + 1)) (`spent_alpha`); the levels of all of them add up to alpha,
so by the union bound the chance that any snapshot worse by the margin ever goes live is at most alpha.
Against two models: both hypotheses have to be refuted at the full level, since a bad candidate is bad against one of
them, whose test it then has to pass (intersection-union test).

The price of the spending: the k-th candidate needs a wealth of k (k + 1) / alpha, whose logarithm grows as 2 log k.

Source: Waudby-Smith and Ramdas 2024, arXiv:2010.09686; Ramdas, Grünwald, Vovk and Shafer 2023, arXiv:2210.01948 (Ville,
e-processes); Tian and Ramdas 2021, arXiv:1910.04900 (alpha-spending); Berger 1982, doi:10.1080/00401706.1982.10487790.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from rl_core.analysis.paired_tests import betting_test, spent_alpha
from rl_core.errors import DataError
from rl_core.settings import OnlineGateSettings

__all__ = ["GateDecision", "SequentialGate"]

GateDecision = Literal["wait", "promote", "reject"]
RIVALS = ("live", "champion")


class SequentialGate:
    """One candidate at a time; the number of candidates is what the error is spent over, and never goes back."""

    def __init__(self, settings: OnlineGateSettings) -> None:
        self.settings = settings
        self.candidates = 0  # opened so far
        self.version: int | None = None  # of the candidate that is tested; None = there is none
        self.episodes = 0
        self.differences: dict[str, Counter[float]] = {rival: Counter() for rival in RIVALS}
        self.decisions: Counter[str] = Counter()

    @property
    def level(self) -> float:
        """Level of the present candidate."""
        return spent_alpha(self.settings.alpha, max(1, self.candidates))

    def open(self, version: int) -> None:
        """Begin with a candidate. Raises: DataError while another one is being tested."""
        if self.version is not None:
            raise DataError(f"gate: snapshot {self.version} is still being tested")
        self.candidates += 1
        self.version = version
        self.episodes = 0
        self.differences = {rival: Counter() for rival in RIVALS}

    def observe(self, candidate: float, live: float, champion: float) -> None:
        """Take one canary episode in: the success of each model on it, 0 to 1. Raises: DataError."""
        if self.version is None:
            raise DataError("gate: no snapshot is being tested; open one first")
        if not all(0 <= value <= 1 for value in (candidate, live, champion)):
            raise DataError(f"gate: successes {candidate}, {live}, {champion} must lie between 0 and 1")
        self.episodes += 1
        self.differences["live"][candidate - live] += 1
        self.differences["champion"][candidate - champion] += 1

    def p_value(self, rival: str) -> float:
        """Anytime-valid p-value of "worse than this rival by the margin or more"; 1 without an episode."""
        return self._betting(rival, 1.0)

    def worse_p_value(self, rival: str) -> float:
        """Anytime-valid p-value of "better than worse by the margin": small = it is worse."""
        return self._betting(rival, -1.0)

    def _betting(self, rival: str, sign: float) -> float:
        counts = self.differences[rival]
        if not counts:
            return 1.0
        values = sorted(counts)
        return betting_test([sign * v for v in values], [counts[v] for v in values], -sign * self.settings.margin)

    def decide(self) -> GateDecision:
        """The decision by now; any but `wait` closes the candidate.

        Promoted where both hypotheses are refuted. Rejected where it is proven to be worse than a rival by the margin
        (which decides nothing about the error), or after `max_episodes`.
        """
        if self.version is None:
            raise DataError("gate: no snapshot is being tested; open one first")
        level = self.level
        if all(self.p_value(rival) <= level for rival in RIVALS):
            return self._close("promote")
        is_worse = any(self.worse_p_value(rival) <= self.settings.alpha for rival in RIVALS)
        if is_worse or self.episodes >= self.settings.max_episodes:
            return self._close("reject")
        return "wait"

    def abandon(self) -> None:
        """Give the candidate up undecided: its rivals have changed. Its share of the error stays spent."""
        self.version = None
        self.decisions["abandon"] += 1

    def _close(self, decision: GateDecision) -> GateDecision:
        self.version = None
        self.decisions[decision] += 1
        return decision

    def metrics(self) -> dict[str, float]:
        """Candidates and decisions so far, and the present test."""
        return {
            "online/gate_candidates": float(self.candidates),
            "online/gate_promoted": float(self.decisions["promote"]),
            "online/gate_rejected": float(self.decisions["reject"]),
            "online/gate_episodes": float(self.episodes),
            "online/gate_p_value": max(self.p_value(rival) for rival in RIVALS),
            "online/gate_level": self.level,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything; the number of candidates above all."""
        return {
            "candidates": self.candidates,
            "version": self.version,
            "episodes": self.episodes,
            "differences": {rival: sorted(counts.items()) for rival, counts in self.differences.items()},
            "decisions": dict(self.decisions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.candidates, self.version, self.episodes = state["candidates"], state["version"], state["episodes"]
        self.differences = {rival: Counter(dict(pairs)) for rival, pairs in state["differences"].items()}
        self.decisions = Counter(state["decisions"])
