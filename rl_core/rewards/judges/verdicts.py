"""Arithmetic of verdicts: weighted criteria, rankings and comparisons as win rates, and agreement with people.

Pure functions. K different candidates of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rl_core.errors import DataError


def compute_rubric_score(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute the weighted mean of the criteria: sum_c w_c s_c / sum_c w_c.

    Raises: DataError for no criterion, one without a score, or a weight that is not above 0.
    """
    if not weights or any(not weight > 0 for weight in weights.values()):
        raise DataError(f"weights: {dict(weights)} must hold a criterion, and each be above 0")
    if missing := [name for name in weights if name not in scores]:
        raise DataError(f"scores: criterion '{missing[0]}' has none")
    total = math.fsum(weights.values())
    return math.fsum(weight * scores[name] for name, weight in weights.items()) / total


def compute_ranking_wins(ranks: Sequence[int]) -> dict[tuple[int, int], float]:
    """Return what each candidate wins against each other one: 1 if its rank is lower, 0.5 for a tie, else 0.

    Args:
        ranks: of each candidate, 0 = best, equal = tied.
    Returns: value by (candidate, opponent), both orders of each pair.
    """
    return {
        (i, j): 1.0 if rank < other else 0.5 if rank == other else 0.0
        for i, rank in enumerate(ranks)
        for j, other in enumerate(ranks)
        if i != j
    }


def compute_win_rates(
    wins: Mapping[tuple[int, int], Sequence[float]], copies: Sequence[int]
) -> list[float | None]:
    """Compute the mean share that each candidate wins against the other samples of its prompt.

    s_i = (sum_j n_j w_ij + (n_i - 1) / 2) / (sum_j n_j + n_i - 1), over the opponents j with a verdict; w_ij is the
    mean of the verdicts (1, 0.5 or 0), n_i the samples that are equal to candidate i, which tie with each other. With a
    verdict on each pair it is the mid-rank, scaled to [0, 1]; its mean over all samples is then 1/2.

    Args:
        wins: verdicts by (candidate, opponent), both orders of each pair; a pair without a verdict is left out.
        copies: n_i of each candidate, at least 1.
    Returns: one number per candidate; None = no verdict. A single candidate has 0.5.
    Source: Copeland score, 1951; win rate with ties as halves, AlpacaEval and MT-Bench, arXiv:2306.05685, section 3.
    """
    if any(number < 1 for number in copies):
        raise DataError(f"copies: {list(copies)} must be at least 1")
    if len(copies) == 1:
        return [0.5]
    rates: list[float | None] = []
    for i, number in enumerate(copies):
        opponents = [j for j in range(len(copies)) if wins.get((i, j))]
        if not opponents:
            rates.append(None)
            continue
        won = [
            copies[j] * math.fsum(wins[i, j]) / len(wins[i, j]) for j in opponents
        ]  # of all copies of an opponent
        others = sum(copies[j] for j in opponents) + number - 1
        rates.append((math.fsum(won) + (number - 1) / 2) / others)
    return rates


def choose_pairs(size: int, opponents: int | None) -> list[tuple[int, int]]:
    """Choose the pairs of candidates to compare: all, or those at a distance of up to `opponents` / 2 on a ring."""
    if opponents is None or opponents >= size - 1:
        return [(i, j) for i in range(size) for j in range(i + 1, size)]
    pairs = {
        (min(i, j), max(i, j)): None
        for distance in range(1, -(-opponents // 2) + 1)
        for i in range(size)
        if (j := (i + distance) % size) != i
    }
    return list(pairs)


class PositionCounts:
    """Counts of verdicts on shown orders, for the metrics of position bias."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._ties: list[float] = []
        self._contradictions: list[float] = []

    def add_order(self, ranks: Sequence[int]) -> None:
        """Count the verdict on one shown order of different answers; `ranks`: in the order shown."""
        wins = compute_ranking_wins(ranks)
        self._first.append(math.fsum(wins[0, j] for j in range(1, len(ranks))) / (len(ranks) - 1))
        self._ties += [float(value == 0.5) for (i, j), value in wins.items() if i < j]

    def add_verdicts(self, verdicts: Sequence[float]) -> None:
        """Count the verdicts on one pair in several orders, each as what the same answer won."""
        self._contradictions += [float(a != b) for a, b in pairwise(verdicts)]

    def compute_metrics(self) -> dict[str, float]:
        """Return first_rate (mean win rate of the answer shown first; 0.5 = no position bias), tie_rate, and
        contradiction_rate (share of repeated comparisons whose verdict changed with the order)."""
        parts = {
            "first_rate": self._first,
            "tie_rate": self._ties,
            "contradiction_rate": self._contradictions,
        }
        return {name: math.fsum(part) / len(part) for name, part in parts.items() if part}


class PairAgreement(NamedTuple):
    """Agreement of two judges on pairs of answers, before any interval."""

    halves: int  # 2 for each pair with the same better answer, 1 where the judge ties
    decided: int  # pairs of which people found one better
    kappa: float | None  # over first, second and tie, on all pairs; None = chance alone would agree


def compute_pair_agreement(
    judged: Sequence[float], labels: Sequence[float]
) -> tuple[list[int], PairAgreement]:
    """Compare a judge's choices with people's, each 1 (first), 0 (second) or 0.5 (tie).

    Agreement is counted on the pairs that people decided; a tie of the judge is half of one, so that a coin has 0.5.
    kappa = (p_o - p_e) / (1 - p_e), p_o the share of equal choices, p_e = sum_c p_c q_c by the shares of each choice.
    Returns: half-successes (0, 1 or 2) of each decided pair, and their sum.
    Raises: DataError for lengths that differ, or no pair.
    Source: Cohen 1960, doi:10.1177/001316446002000104.
    """
    if len(judged) != len(labels) or not labels:
        raise DataError(f"labels: {len(labels)} for {len(judged)} judged pairs")
    halves = [
        2 if choice == label else 1 if choice == 0.5 else 0
        for choice, label in zip(judged, labels, strict=True)
        if label != 0.5
    ]
    count = len(labels)
    observed = sum(a == b for a, b in zip(judged, labels, strict=True)) / count
    choices: tuple[Hashable, ...] = (0.0, 0.5, 1.0)
    expected = math.fsum(
        sum(a == choice for a in judged) * sum(b == choice for b in labels) for choice in choices
    ) / (count * count)
    kappa = None if expected >= 1 else (observed - expected) / (1 - expected)
    return halves, PairAgreement(sum(halves), len(halves), kappa)
