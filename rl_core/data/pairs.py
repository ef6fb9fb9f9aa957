"""Preference pairs: from scored rollouts (a success is preferred to a failure), and as token ids of preference rows.

Pairs over token rows are built on access: a million of them fit into memory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from rl_core.data.chat import ChatRenderer
from rl_core.data.row_uses import explain_misfit
from rl_core.data.text_steps import find_completing_tokens
from rl_core.data.training_sequences import TokenRows
from rl_core.errors import DataError
from rl_core.types import Message, Rollout, RolloutGroup


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
class PreferencePair:
    """Two completions of one prompt, the chosen and the rejected one."""

    chosen: PairSide
    rejected: PairSide
    margin: float = 0.0  # by which a reward model is to tell them apart, at least
    tie: bool = False  # True = neither is better
    # None = a preference. Otherwise `chosen` is a completion with this label, and `rejected` the same prompt with the
    # completion of another prompt, for KTO's reference point.
    desirable: bool | None = None
    score: float | None = None  # of `chosen`; `rejected` is the same. None = a pair
    # (index of its last token in the sequence, label) of each step of `chosen`; `rejected` is the same. () = a pair
    steps: tuple[tuple[int, float], ...] = ()

    @property
    def chosen_ids(self) -> list[int]:
        """Token ids of the chosen sequence, as read by a reward model."""
        return self.chosen.ids

    @property
    def rejected_ids(self) -> list[int]:
        """Token ids of the rejected sequence."""
        return self.rejected.ids


def build_pairs_from_groups(
    groups: Sequence[RolloutGroup], per_group: int, seed: int
) -> list[PreferencePair]:
    """Build pairs (success, failure) of the same prompt, at most `per_group` per group, without duplicates.

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
    pairs: list[PreferencePair] = []
    for group in groups:
        good = [r for r in group.rollouts if r.success and r.trajectory.is_grounded is not False]
        bad = [rollout for rollout in group.rollouts if rollout.success is False]
        choices = [(i, j) for i in range(len(good)) for j in range(len(bad))]
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for choice in rng.permutation(len(choices)):
            chosen, rejected = good[choices[choice][0]], bad[choices[choice][1]]
            tokens = (tuple(chosen.completion_ids), tuple(rejected.completion_ids))
            if len(seen) == per_group:
                break
            if tokens not in seen:
                seen.add(tokens)
                pairs.append(PreferencePair(_build_side(chosen), _build_side(rejected)))
    return pairs


def list_labelled_sides(pairs: Sequence[PreferencePair]) -> list[tuple[PairSide, bool]]:
    """Return both sides of preference pairs as labelled completions, each once: chosen = desirable."""
    sides: dict[tuple[tuple[int, ...], tuple[int, ...], bool], PairSide] = {}
    for pair in pairs:
        for side, label in ((pair.chosen, True), (pair.rejected, False)):
            sides.setdefault((tuple(side.prompt_ids), tuple(side.completion_ids), label), side)
    return [(side, key[2]) for key, side in sides.items()]


def build_mismatched_pairs(
    rows: Sequence[tuple[PairSide, bool]], seed: int, others: Sequence[tuple[PairSide, bool]] = ()
) -> list[PreferencePair]:
    """Return labelled completions, each with its prompt and the completion of another prompt, for KTO.

    The partner is the next row with another prompt in a seeded order of the rows, the same in every epoch.
    Args:
        rows: (prompt and completion, True = desirable).
        others: partners where all `rows` have the same prompt.
    Raises: DataError if there is no other prompt.
    """
    pool = [*rows, *others]
    prompts = [tuple(side.prompt_ids) for side, _ in pool]
    partners = choose_mismatched_partners(prompts[: len(rows)], seed, prompts[len(rows) :])
    pairs = []
    for (side, label), place in zip(rows, partners, strict=True):
        partner = pool[place][0]
        mismatched = PairSide(side.prompt_ids, partner.completion_ids, partner.loss_mask)
        pairs.append(PreferencePair(side, mismatched, desirable=label))
    return pairs


def choose_mismatched_partners(
    prompts: Sequence[Hashable], seed: int, others: Sequence[Hashable] = ()
) -> list[int]:
    """Return, for each prompt, the index in `prompts` and then `others` of its mismatched completion, see
    `build_mismatched_pairs`.

    Raises: DataError if there is no other prompt.
    """
    pool = prompts if len(set(prompts)) > 1 else [*prompts, *others]
    order = np.random.default_rng(seed).permutation(len(pool))
    place_of = np.argsort(order)
    partners = []
    for index, prompt in enumerate(prompts):
        following = (
            int(order[(place_of[index] + step) % len(pool)]) for step in range(1, len(pool))
        )
        partner = next((other for other in following if pool[other] != prompt), None)
        if partner is None:
            raise DataError(
                "kto: all rows have the same prompt, so its reference point cannot be estimated"
            )
        partners.append(partner)
    return partners


def _build_side(rollout: Rollout) -> PairSide:
    rollout.check_one_context("a preference pair")
    return PairSide(list(rollout.prompt_ids), list(rollout.completion_ids), list(rollout.loss_mask))


Row = dict[str, Any]


def build_pair(row: Row, renderer: ChatRenderer) -> PreferencePair:
    """Return a preference row as token ids. Errors: `build_row_sides`."""
    (chosen, _), (rejected, _) = build_row_sides(row, renderer)
    return PreferencePair(chosen, rejected, row.get("margin", 0.0), bool(row.get("tie")))


def build_row_sides(row: Row, renderer: ChatRenderer) -> list[tuple[PairSide, bool]]:
    """Return the token ids of each completion of a row, with its label; chosen = True.

    Raises: DataError where the template refuses the messages, or as `truncate_sides`.
    """
    renderer = renderer.with_tools(row.get("tools"))
    prompt = row["prompt"]
    prompt_ids = renderer.prompt_ids(
        [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    )

    def side(answer: str | list[Message]) -> PairSide:
        if isinstance(answer, str):
            completion_ids = renderer.action_ids(answer)
            return PairSide(prompt_ids, completion_ids, [True] * len(completion_ids))
        return PairSide(prompt_ids, *renderer.encode_turns(answer, after_prompt=True))

    labels = (
        {"completion": row.get("label", True)}
        if "completion" in row
        else {"chosen": True, "rejected": False}
    )
    sides = truncate_sides([side(row[name]) for name in labels], row.get("max_tokens"))
    return list(zip(sides, labels.values(), strict=True))


def truncate_sides(sides: Sequence[PairSide], max_tokens: int | None) -> list[PairSide]:
    """Return the first tokens of each side, prompt and completion together; None = all.

    Raises: DataError if none that carries loss is among them, or two sides do not differ.
    """
    truncated = [_truncate_side(side, max_tokens) for side in sides]
    if len(truncated) == 2 and truncated[0].completion_ids == truncated[1].completion_ids:
        raise DataError(
            f"chosen and rejected are the same in the tokens that are read ({len(truncated[0].ids)})"
        )
    return truncated


def _truncate_side(side: PairSide, max_tokens: int | None) -> PairSide:
    if max_tokens is None or len(side.ids) <= max_tokens:
        return side
    room = max(0, max_tokens - len(side.prompt_ids))
    if not any(side.loss_mask[:room]):
        raise DataError(f"nothing that carries loss is among the first {max_tokens} tokens")
    return PairSide(side.prompt_ids, side.completion_ids[:room], side.loss_mask[:room])


PreferenceUse = Literal[
    "dpo", "ipo", "simpo", "orpo", "kto", "reward_model", "reward_regression", "process_reward"
]


class PreferencePairRows(Sequence[PreferencePair]):
    """Pairs whose token ids lie in `TokenRows`."""

    def __init__(
        self,
        sides: TokenRows,
        chosen: NDArray[np.int64],
        rejected: NDArray[np.int64],
        margins: Sequence[float] | None = None,
        desirable: Sequence[bool] | None = None,
        ties: Sequence[int] | None = None,
        scores: Sequence[float] | None = None,
        steps: Sequence[tuple[tuple[int, float], ...]] | None = None,
    ) -> None:
        """`chosen`, `rejected`: place of each side of each pair.

        Args:
            margins: of each pair; None = 0.
            desirable: labels of KTO: `chosen` is the completion that has it, and of `rejected` the completion alone is
                taken, after the same prompt. None = preferences.
            ties: 1 for each pair of which neither side is better; None = all are ordered.
            scores: of each completion, for regression; `chosen` and `rejected` are both that completion.
            steps: of each completion, for a reward model of steps; likewise.
        """
        self._ties, self._scores, self._steps = ties, scores, steps
        self._sides, self._chosen, self._rejected = sides, chosen, rejected
        self._margins, self._desirable = margins, desirable

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> PreferencePair: ...
    @overload
    def __getitem__(self, index: slice) -> list[PreferencePair]: ...
    def __getitem__(self, index: int | slice) -> PreferencePair | list[PreferencePair]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        chosen, rejected = (
            read_side(self._sides, self._chosen[place]),
            read_side(self._sides, self._rejected[place]),
        )
        margin = 0.0 if self._margins is None else self._margins[place]
        if self._steps is not None:
            return PreferencePair(chosen, chosen, steps=self._steps[place])
        if self._scores is not None:
            return PreferencePair(chosen, chosen, score=self._scores[place])
        if self._desirable is None:
            return PreferencePair(chosen, rejected, margin, bool(self._ties and self._ties[place]))
        mismatched = PairSide(chosen.prompt_ids, rejected.completion_ids, rejected.loss_mask)
        return PreferencePair(chosen, mismatched, margin, desirable=bool(self._desirable[place]))


def read_side(sides: TokenRows, index: int) -> PairSide:
    """Return the side of a preference row, or the labelled completion, at an index."""
    ids, mask = sides[int(index)]
    count = int(sides.prompts[index])
    return PairSide(ids[:count], ids[count:], mask[count:])


@dataclass(slots=True)
class PreferenceSplit:
    """Preference rows or labelled completions: their token ids, and the columns other than their texts."""

    sides: TokenRows
    margins: array[float] = field(default_factory=lambda: array("d"))  # of each row
    labels: bytearray = field(default_factory=bytearray)  # of each side; chosen = 1
    ties: bytearray = field(default_factory=bytearray)  # of each row; 1 = neither side is better
    scores: array[float] = field(default_factory=lambda: array("d"))  # of each row that has one
    # (characters of the completion up to its end, label) of each step, of each row that has labels of steps
    steps: list[list[tuple[int, float]]] = field(default_factory=list)

    @classmethod
    def from_rows(
        cls, sides: TokenRows, rows: Iterable[Mapping[str, Any]], use: PreferenceUse, name: str
    ) -> PreferenceSplit:
        """Return the split of these rows; `name`: training, held-out. Raises: DataError for a row not for that use."""
        part = cls(sides)
        for place, row in enumerate(rows):
            if reason := explain_misfit(row, use):
                raise DataError(
                    f"{name} row {place + 1}: {reason}; its prompt is {row['prompt'][:80]!r}"
                )
            part.margins.append(row.get("margin", 0.0))
            part.ties.append(bool(row.get("tie")))
            if "score" in row:
                part.scores.append(row["score"])
            if "step_ends" in row:
                part.steps.append(list(zip(row["step_ends"], row["step_labels"], strict=True)))
            part.labels.extend([row.get("label", 1)] if "completion" in row else [1, 0])
        if len(part.labels) != len(sides):
            raise DataError(
                f"{name} rows have {len(part.labels)} sides, but {len(sides)} are tokenised"
            )
        return part


def build_pair_rows(
    train: PreferenceSplit,
    heldout: PreferenceSplit,
    use: PreferenceUse,
    seed: int,
    renderer: ChatRenderer | None = None,
) -> tuple[PreferencePairRows, PreferencePairRows]:
    """Return a loss's pairs: `kto` takes each completion with its label, regression with its score, others pairs.

    Args:
        renderer: whose tokenizer the sides have; needed for the ends of steps.
    Raises: DataError for `kto` where all rows have the same prompt.
    """
    if use == "process_reward":
        assert renderer is not None
        return _build_stepwise_rows(train, renderer), _build_stepwise_rows(heldout, renderer)
    if use == "reward_regression":
        return _build_scored_pairs(train), _build_scored_pairs(heldout)
    if use != "kto":
        pairs = [
            PreferencePairRows(
                part.sides, *_list_side_indices(part.sides), part.margins, ties=part.ties
            )
            for part in (train, heldout)
        ]
        return pairs[0], pairs[1]
    prompts = [_compute_prompt_digests(part.sides) for part in (train, heldout)]
    joined = heldout.sides.join_rows(train.sides)
    return _build_labelled_pairs(
        train.sides, train, choose_mismatched_partners(prompts[0], seed)
    ), _build_labelled_pairs(
        joined, heldout, choose_mismatched_partners(prompts[1], seed, prompts[0])
    )


def _build_scored_pairs(part: PreferenceSplit) -> PreferencePairRows:
    places = np.arange(len(part.sides))
    return PreferencePairRows(part.sides, places, places, scores=part.scores)


def _build_stepwise_rows(part: PreferenceSplit, renderer: ChatRenderer) -> PreferencePairRows:
    """Find the last token of each step. Steps beyond a cut are left out. Raises: DataError for a row without one."""
    steps: list[tuple[tuple[int, float], ...]] = []
    for place, row_steps in enumerate(part.steps):
        side = read_side(part.sides, place)
        num_characters = len(renderer.action_text(side.completion_ids))
        complete = [step for step in row_steps if step[0] <= num_characters]
        if not complete:
            raise DataError(
                f"row {place + 1}: no complete step is among its first {len(side.ids)} tokens"
            )
        ends = find_completing_tokens(
            side.completion_ids, [end for end, _ in complete], renderer.action_text
        )
        if len(complete) == len(
            row_steps
        ):  # the end of turn belongs to the last step, as in a rollout
            ends[-1] = len(side.completion_ids) - 1
        start = len(side.prompt_ids)
        labels = [label for _, label in complete]
        steps.append(tuple(zip((start + end for end in ends), labels, strict=True)))
    places = np.arange(len(part.sides))
    return PreferencePairRows(part.sides, places, places, steps=steps)


def _build_labelled_pairs(
    sides: TokenRows, part: PreferenceSplit, partners: Sequence[int]
) -> PreferencePairRows:
    places = np.arange(len(part.sides))
    return PreferencePairRows(
        sides, places, np.asarray(partners, np.int64), None, [bool(label) for label in part.labels]
    )


def _list_side_indices(sides: TokenRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    places = np.arange(len(sides))
    return places[0::2], places[1::2]


def _compute_prompt_digests(sides: TokenRows) -> list[bytes]:
    """Compute a 16-byte digest of each side's prompt."""
    digests = []
    for place, count in enumerate(sides.prompts.tolist()):
        ids, _ = sides.read_arrays(place)
        digests.append(hashlib.blake2b(ids[:count].tobytes(), digest_size=16).digest())
    return digests
