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
    """One sampled answer as it votes, and where it came from."""

    answer: str | None  # None = the sample gave no answer; it counts against every other
    logprob: float = 0.0  # nats, of the sampled tokens together
    num_tokens: int = 1  # sampled tokens
    passed_check: bool | None = None  # verdict of the environment's own check; None = it has none
    sample: int = 0  # index among the samples of the request, which decides ties by order
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class VoteOutcome:
    """Result of a vote, with every ballot and its weight."""

    # as the winner's first ballot wrote it; None = nobody answered, or a tie that abstains
    answer: str | None
    confidence: float  # share of the weights, answerless ballots included; 0 without an answer
    low: float  # Wilson interval of that share
    high: float
    num_ballots: int
    effective_ballots: (
        float  # (sum w)^2 / sum w^2: the number of equal ballots behind the interval (Kish)
    )
    entropy: float  # nats, of the weights over different answers; 0 = all agree
    is_tie: bool
    is_early: bool  # True = fewer samples than allowed: the rest could not have changed the answer
    ballots: tuple[Ballot, ...]
    weights: tuple[float, ...]  # of the ballots, in order
    supporters: tuple[int, ...]  # indices of the ballots for the answer

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> VoteOutcome:
        """Inverse of `to_json`."""
        ballots = tuple(Ballot(**ballot) for ballot in row["ballots"])
        return cls(
            **{
                **row,
                "ballots": ballots,
                "weights": tuple(row["weights"]),
                "supporters": tuple(row["supporters"]),
            }
        )


def normalise_answer(answer: str) -> str:
    """Answer up to case and white space: ballots with equal texts vote for the same."""
    return " ".join(answer.casefold().split())


def compute_ballot_weight(ballot: Ballot, weights: VoteWeights) -> float:
    """Weight of a ballot, 0 to 1.

    equal: 1. logprob: exp(logprob), the probability of the whole sequence. mean_logprob: exp(logprob / num_tokens).
    check: 0 where the environment's check refuses the answer, else 1.
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
    first: int  # position of its first ballot
    logprob: float  # of its most probable ballot
    members: list[int]


def _group_ballots(
    ballots: Sequence[Ballot], weights: Sequence[float], normalise: AnswerNormaliser
) -> dict[str, _VoteCandidate]:
    """Answers by normal form. Ballots of weight 0 make no candidate."""
    found: dict[str, list[int]] = {}
    for index, ballot in enumerate(ballots):
        if ballot.answer is not None and weights[index] > 0:
            found.setdefault(normalise(ballot.answer), []).append(index)
    return {
        answer: _VoteCandidate(
            math.fsum(weights[i] for i in members),
            members[0],
            max(ballots[i].logprob for i in members),
            members,
        )
        for answer, members in found.items()
    }


def _choose_winner(
    candidates: Mapping[str, _VoteCandidate], ties: TieRule
) -> tuple[str | None, bool]:
    """(answer, True = several share the largest weight)."""
    if not candidates:
        return None, False
    most = max(candidate.weight for candidate in candidates.values())
    best = [answer for answer, candidate in candidates.items() if candidate.weight == most]
    if len(best) == 1:
        return best[0], False
    if ties == "abstain":
        return None, True
    order: Callable[[str], Any] = lambda answer: candidates[answer].first  # noqa: E731
    if ties == "logprob":
        order = lambda answer: (-candidates[answer].logprob, candidates[answer].first)  # noqa: E731
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
    """True = no further samples could change the answer.

    Every other answer, one not yet seen included, is given all remaining samples at the largest weight, 1. The leader
    must stay ahead of each, or win the tie: `first` if its first ballot is older; the other rules never.
    """
    left = max_samples - len(ballots)
    if left <= 0:
        return True
    if len(ballots) < min_samples:
        return False
    given = [compute_ballot_weight(ballot, weights) for ballot in ballots]
    candidates = _group_ballots(ballots, given, normalise)
    leader, is_tie = _choose_winner(candidates, ties)
    if leader is None:
        return False
    ahead = candidates.pop(leader)
    others = [(other.weight, other.first) for other in candidates.values()] + [(0.0, len(ballots))]
    if is_tie and ties != "first":
        return False
    for weight, first in others:
        most = weight + left
        if most > ahead.weight or (
            most == ahead.weight and not (ties == "first" and ahead.first < first)
        ):
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
    """Samples to draw next, together: the fewest after which the vote may be settled; 0 = it is.

    As many as it takes if each of them votes for the present leader with weight 1 (for a new answer where there is
    none), so that a batch is never larger than one-by-one sampling would have needed in the best case.
    """
    options: dict[str, Any] = {
        "min_samples": min_samples,
        "weights": weights,
        "ties": ties,
        "normal": normalise,
    }
    if is_settled(ballots, max_samples, **options):
        return 0
    left = max_samples - len(ballots)
    given = [compute_ballot_weight(ballot, weights) for ballot in ballots]
    candidates = _group_ballots(ballots, given, normalise)
    leader, _ = _choose_winner(candidates, "first")
    text = (
        ""
        if leader is None
        else next(
            b.answer for b in ballots if b.answer is not None and normalise(b.answer) == leader
        )
    )
    for count in range(1, left):
        hoped = [*ballots, *(Ballot(text, 0.0, 1, True, len(ballots) + i) for i in range(count))]
        if is_settled(hoped, max_samples, **options):
            return count
    return left


def tally_votes(
    ballots: Sequence[Ballot],
    *,
    max_samples: int | None = None,
    weights: VoteWeights = "equal",
    ties: TieRule = "first",
    confidence_level: float = 0.95,
    normalise: AnswerNormaliser = normalise_answer,
) -> VoteOutcome:
    """Answer of the largest weight, its share with a Wilson interval, and the agreement of all ballots.

    Shares are of all weights, those of ballots without an answer included. With weights, the interval is that of
    n = (sum w)^2 / sum w^2 equal ballots. Ballots of weight 0 count nowhere but in `num_ballots`.
    Args:
        max_samples: samples that were allowed; None = those that are there.
        normal: ballots whose answers have the same normal form vote for the same.
    Raises: DataError without ballots, or for one whose weight cannot be computed.
    Source: Wang et al. 2022, arXiv:2203.11171 (self-consistency); Wilson 1927; Kish 1965, section 8.2 (effective n).
    """
    if not ballots:
        raise DataError("a vote needs at least one ballot")
    given = tuple(compute_ballot_weight(ballot, weights) for ballot in ballots)
    candidates = _group_ballots(ballots, given, normalise)
    winner, is_tie = _choose_winner(candidates, ties)
    total, squares = math.fsum(given), math.fsum(weight * weight for weight in given)
    effective = total * total / squares if squares else 0.0
    members = candidates[winner].members if winner is not None else []
    share = min(1.0, candidates[winner].weight / total) if winner is not None else 0.0
    low, high = wilson_interval(share * effective, effective, confidence_level)
    silent = math.fsum(w for w, ballot in zip(given, ballots, strict=True) if ballot.answer is None)
    return VoteOutcome(
        answer=ballots[members[0]].answer if members else None,
        confidence=share,
        low=low,
        high=high,
        num_ballots=len(ballots),
        effective_ballots=effective,
        entropy=compute_entropy([*(candidate.weight for candidate in candidates.values()), silent]),
        is_tie=is_tie,
        is_early=max_samples is not None and len(ballots) < max_samples,
        ballots=tuple(ballots),
        weights=given,
        supporters=tuple(members),
    )
