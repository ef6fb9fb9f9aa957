"""Preference pairs from scored rollouts: a success is preferred to a failure on the same prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.errors import DataError
from rl_core.types import Rollout, RolloutGroup

__all__ = ["Pair", "PairSide", "labelled_sides", "mismatched_pairs", "mismatched_partners", "pairs_from_groups"]


@dataclass(frozen=True, slots=True)
class PairSide:
    """One side of a pair: prompt and completion."""

    prompt_ids: list[int]
    completion_ids: list[int]  # [T] all tokens after the prompt, observations included
    loss_mask: list[bool]  # [T] True = sampled by the policy; False = observation

    @property
    def ids(self) -> list[int]:
        """Token ids of prompt and completion."""
        return [*self.prompt_ids, *self.completion_ids]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of one prompt, the chosen and the rejected one."""

    chosen: PairSide
    rejected: PairSide
    margin: float = 0.0  # by which a reward model is to tell them apart, at least
    tie: bool = False  # True = neither is better
    # None = a preference. Otherwise `chosen` is a completion with this label, and `rejected` the same prompt with the
    # completion of another prompt, for KTO's reference point.
    desirable: bool | None = None
    score: float | None = None  # given to `chosen`; `rejected` is the same. None = a pair

    @property
    def chosen_ids(self) -> list[int]:
        """Token ids of the chosen sequence, as read by a reward model."""
        return self.chosen.ids

    @property
    def rejected_ids(self) -> list[int]:
        """Token ids of the rejected sequence."""
        return self.rejected.ids


def pairs_from_groups(groups: Sequence[RolloutGroup], per_group: int, seed: int) -> list[Pair]:
    """Pairs (success, failure) of the same prompt, at most `per_group` per group, without duplicates.

    Lucky successes (not grounded in the observations) are excluded, as no token tells them from a failure. Groups that
    only succeed or only fail yield no pairs. Truncated rollouts count as failures, as the environment says.
    Args:
        groups: rollouts with known `success`.
        per_group: maximum pairs per group, at least 1.
        seed: of the random choice among a group's pairs.
    Raises: DataError if per_group is below 1.
    """
    if per_group < 1:
        raise DataError(f"per_group: {per_group} must be at least 1")
    rng = np.random.default_rng(seed)
    pairs: list[Pair] = []
    for group in groups:
        good = [r for r in group.rollouts if r.success and r.trajectory.is_grounded is not False]
        bad = [rollout for rollout in group.rollouts if not rollout.success]
        choices = [(i, j) for i in range(len(good)) for j in range(len(bad))]
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for choice in rng.permutation(len(choices)):
            chosen, rejected = good[choices[choice][0]], bad[choices[choice][1]]
            tokens = (tuple(chosen.completion_ids), tuple(rejected.completion_ids))
            if len(seen) == per_group:
                break
            if tokens not in seen:
                seen.add(tokens)
                pairs.append(Pair(_side(chosen), _side(rejected)))
    return pairs


def labelled_sides(pairs: Sequence[Pair]) -> list[tuple[PairSide, bool]]:
    """Both sides of preference pairs as labelled completions, each once: chosen = desirable."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...], bool], PairSide] = {}
    for pair in pairs:
        for side, label in ((pair.chosen, True), (pair.rejected, False)):
            found.setdefault((tuple(side.prompt_ids), tuple(side.completion_ids), label), side)
    return [(side, key[2]) for key, side in found.items()]


def mismatched_pairs(
    rows: Sequence[tuple[PairSide, bool]], seed: int, others: Sequence[tuple[PairSide, bool]] = ()
) -> list[Pair]:
    """Labelled completions, each beside its prompt with the completion of another prompt, for KTO.

    The partner is the next row with another prompt in a seeded order of the rows, the same in every epoch.
    Args:
        rows: (prompt and completion, True = desirable).
        others: partners where all `rows` have the same prompt.
    Raises: DataError if there is no other prompt.
    """
    pool = [*rows, *others]
    prompts = [tuple(side.prompt_ids) for side, _ in pool]
    partners = mismatched_partners(prompts[: len(rows)], seed, prompts[len(rows) :])
    pairs = []
    for (side, label), place in zip(rows, partners, strict=True):
        partner = pool[place][0]
        mismatched = PairSide(side.prompt_ids, partner.completion_ids, partner.loss_mask)
        pairs.append(Pair(side, mismatched, desirable=label))
    return pairs


def mismatched_partners(prompts: Sequence[Hashable], seed: int, others: Sequence[Hashable] = ()) -> list[int]:
    """Place, in `prompts` and then `others`, of the completion that stands after each prompt. See `mismatched_pairs`.

    Raises: DataError if there is no other prompt.
    """
    pool = prompts if len(set(prompts)) > 1 else [*prompts, *others]
    order = np.random.default_rng(seed).permutation(len(pool))
    place_of = np.argsort(order)
    partners = []
    for index, prompt in enumerate(prompts):
        following = (int(order[(place_of[index] + step) % len(pool)]) for step in range(1, len(pool)))
        partner = next((other for other in following if pool[other] != prompt), None)
        if partner is None:
            raise DataError("kto: all rows have the same prompt, so its reference point cannot be estimated")
        partners.append(partner)
    return partners


def _side(rollout: Rollout) -> PairSide:
    rollout.check_one_context("a preference pair")
    return PairSide(list(rollout.prompt_ids), list(rollout.completion_ids), list(rollout.loss_mask))
