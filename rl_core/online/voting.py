"""Voting over sampled answers: early stopping, winner, confidence, agreement, provenance. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl_core.analysis.statistics import compute_entropy, wilson_interval
from rl_core.errors import DataError

VoteWeights = Literal["equal", "logprob", "mean_logprob", "check"]
TieRule = Literal["first", "logprob", "abstain"]
AnswerNormaliser = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Ballot:
    """Vote of one sampled answer, and its origin."""

    answer: str | None  # None = no answer, which counts against every answer
    logprob: float = 0.0  # nats, total of the sampled tokens
    num_tokens: int = 1  # sampled tokens
    passed_check: bool | None = None  # verdict of the environment's check; None = it has none
    sample: int = 0  # index among the samples of the request; decides ties by order
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class VoteOutcome:
    """Result of a vote, with every ballot and its weight."""

    # As written in the winner's first ballot; None = no ballot has an answer, or an abstaining tie.
    answer: str | None
    confidence: float  # share of all weights, including ballots without an answer; 0 if None
    low: float  # Wilson interval of that share
    high: float
    num_ballots: int
    effective_ballots: float  # (sum w)^2 / sum w^2: equivalent number of equal ballots (Kish)
    entropy: float  # nats, of the weights over different answers; 0 = all agree
    is_tie: bool
    is_early: bool  # stopped early: further samples could not have changed the answer
    ballots: tuple[Ballot, ...]
    weights: tuple[float, ...]  # of the ballots, in order
    supporters: tuple[int, ...]  # indices of the ballots for the answer

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> VoteOutcome:
        """Parse the output of `to_json`."""
        fields = dict(row)
        fields["ballots"] = tuple(Ballot(**ballot) for ballot in row["ballots"])
        fields["weights"] = tuple(row["weights"])
        fields["supporters"] = tuple(row["supporters"])
        return cls(**fields)


def normalise_answer(answer: str) -> str:
    """Return the answer without differences in case and white space; answers with equal results count as the same."""
    return " ".join(answer.casefold().split())


def compute_ballot_weight(ballot: Ballot, weights: VoteWeights) -> float:
    """Return the weight of a ballot, 0 to 1.

    equal: 1. logprob: exp(logprob), the probability of the complete sequence. mean_logprob: exp(logprob / num_tokens).
    check: 0 if the environment's check refuses the answer, else 1.
    Raises: DataError for a log-probability above 0 or not finite, or a ballot without tokens.
    """
    if weights == "equal":
        return 1.0
    if weights == "check":
        return 0.0 if ballot.passed_check is False else 1.0
    if not -math.inf < ballot.logprob <= 0 or ballot.num_tokens < 1:
        raise DataError(
            f"ballot {ballot.sample}: logprob {ballot.logprob} of {ballot.num_tokens} tokens; must be <= 0"
        )
    return math.exp(ballot.logprob if weights == "logprob" else ballot.logprob / ballot.num_tokens)


@dataclass(slots=True)
class _VoteCandidate:
    weight: float
    first: int  # index of its first ballot
    logprob: float  # of its most probable ballot
    members: list[int]


def _group_ballots(
    ballots: Sequence[Ballot], weights: Sequence[float], normalise: AnswerNormaliser
) -> dict[str, _VoteCandidate]:
    """Group the ballots by normal form of their answers; ballots of weight 0 are ignored."""
    members_by_answer: dict[str, list[int]] = {}
    for index, ballot in enumerate(ballots):
        if ballot.answer is not None and weights[index] > 0:
            members_by_answer.setdefault(normalise(ballot.answer), []).append(index)
    return {
        answer: _VoteCandidate(
            math.fsum(weights[i] for i in members),
            members[0],
            max(ballots[i].logprob for i in members),
            members,
        )
        for answer, members in members_by_answer.items()
    }


def _choose_winner(
    candidates: Mapping[str, _VoteCandidate], ties: TieRule
) -> tuple[str | None, bool]:
    """Return (answer, whether several share the largest weight)."""
    if not candidates:
        return None, False
    largest = max(candidate.weight for candidate in candidates.values())
    best = [answer for answer, candidate in candidates.items() if candidate.weight == largest]
    if len(best) == 1:
        return best[0], False
    if ties == "abstain":
        return None, True

    def order(answer: str) -> tuple[float, int]:
        candidate = candidates[answer]
        return (-candidate.logprob if ties == "logprob" else 0.0), candidate.first

    return min(best, key=order), True


def is_settled(
    ballots: Sequence[Ballot],
    max_samples: int,
    *,
    min_samples: int = 1,
    weights: VoteWeights = "equal",
    ties: TieRule = "first",
    normalise: AnswerNormaliser = normalise_answer,
) -> bool:
    """Return whether no further samples could change the answer.

    Assume that all remaining samples vote with the largest weight, 1, for one other answer, possibly a new one. The
    leader
    must stay ahead of it, or win the tie: with `first` if its first ballot is older; with the other rules never.
    """
    num_remaining = max_samples - len(ballots)
    if num_remaining <= 0:
        return True
    if len(ballots) < min_samples:
        return False
    ballot_weights = [compute_ballot_weight(ballot, weights) for ballot in ballots]
    candidates = _group_ballots(ballots, ballot_weights, normalise)
    leader, is_tie = _choose_winner(candidates, ties)
    if leader is None:
        return False
    leading = candidates.pop(leader)
    others = [(other.weight, other.first) for other in candidates.values()] + [(0.0, len(ballots))]
    if is_tie and ties != "first":
        return False
    for weight, first in others:
        largest = weight + num_remaining
        wins_tie = ties == "first" and leading.first < first
        if largest > leading.weight or (largest == leading.weight and not wins_tie):
            return False
    return True


def count_samples_to_draw(
    ballots: Sequence[Ballot],
    max_samples: int,
    *,
    min_samples: int = 1,
    weights: VoteWeights = "equal",
    ties: TieRule = "first",
    normalise: AnswerNormaliser = normalise_answer,
) -> int:
    """Return how many samples to draw next: the fewest after which the vote may be settled; 0 if it is settled.

    It assumes that each of them votes for the current leader with weight 1 (for a new answer if there is none), so a
    batch
    is never larger than one-by-one sampling would need in the best case.
    """
    options: dict[str, Any] = {
        "min_samples": min_samples,
        "weights": weights,
        "ties": ties,
        "normalise": normalise,
    }
    if is_settled(ballots, max_samples, **options):
        return 0
    num_remaining = max_samples - len(ballots)
    ballot_weights = [compute_ballot_weight(ballot, weights) for ballot in ballots]
    candidates = _group_ballots(ballots, ballot_weights, normalise)
    leader, _ = _choose_winner(candidates, "first")
    answer: str | None = ""
    if leader is not None:
        answer = ballots[candidates[leader].first].answer
    imagined = list(ballots)
    for count in range(1, num_remaining):
        imagined.append(Ballot(answer, 0.0, 1, True, len(imagined)))
        if is_settled(imagined, max_samples, **options):
            return count
    return num_remaining


def tally_votes(
    ballots: Sequence[Ballot],
    *,
    max_samples: int | None = None,
    weights: VoteWeights = "equal",
    ties: TieRule = "first",
    confidence_level: float = 0.95,
    normalise: AnswerNormaliser = normalise_answer,
) -> VoteOutcome:
    """Return the answer of the largest weight, its share with a Wilson interval, and the agreement of all ballots.

    Shares are of all weights, including ballots without an answer. With weights, the interval is that of
    n = (sum w)^2 / sum w^2 equal ballots. Ballots of weight 0 count only in `num_ballots`.
    Args:
        max_samples: allowed number of samples; None = as many as there are ballots.
        normalise: answers with the same normal form count as the same.
    Raises: DataError without ballots, or for one whose weight cannot be computed.
    Source: Wang et al. 2022, arXiv:2203.11171 (self-consistency); Wilson 1927; Kish 1965, section 8.2 (effective n).
    """
    if not ballots:
        raise DataError("a vote needs at least one ballot")
    ballot_weights = tuple(compute_ballot_weight(ballot, weights) for ballot in ballots)
    candidates = _group_ballots(ballots, ballot_weights, normalise)
    winner, is_tie = _choose_winner(candidates, ties)
    total = math.fsum(ballot_weights)
    squares = math.fsum(weight * weight for weight in ballot_weights)
    effective = total * total / squares if squares else 0.0
    members = candidates[winner].members if winner is not None else []
    share = min(1.0, candidates[winner].weight / total) if winner is not None else 0.0
    low, high = wilson_interval(share * effective, effective, confidence_level)
    unanswered = math.fsum(
        weight
        for weight, ballot in zip(ballot_weights, ballots, strict=True)
        if ballot.answer is None
    )
    answer_weights = [candidate.weight for candidate in candidates.values()]
    return VoteOutcome(
        answer=ballots[members[0]].answer if members else None,
        confidence=share,
        low=low,
        high=high,
        num_ballots=len(ballots),
        effective_ballots=effective,
        entropy=compute_entropy([*answer_weights, unanswered]),
        is_tie=is_tie,
        is_early=max_samples is not None and len(ballots) < max_samples,
        ballots=tuple(ballots),
        weights=ballot_weights,
        supporters=tuple(members),
    )
