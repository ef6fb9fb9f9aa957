"""Preference pairs over token rows, made where they are asked for: a million of them fit into memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from rl_core.data.pairs import Pair, PairSide, mismatched_partners
from rl_core.data.row_uses import misfit
from rl_core.data.token_rows import TokenRows
from rl_core.errors import DataError

__all__ = ["PairRows", "PreferencePart", "Use", "pairs_of", "side_at"]

Use = Literal["dpo", "ipo", "simpo", "orpo", "kto", "reward_model", "reward_regression"]


class PairRows(Sequence[Pair]):
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
    ) -> None:
        """`chosen`, `rejected`: place of each side of each pair.

        Args:
            margins: of each pair; None = 0.
            desirable: labels of KTO: `chosen` is the completion that has it, and of `rejected` the completion alone is
                taken, after the same prompt. None = preferences.
            ties: 1 for each pair of which neither side is better; None = all are ordered.
            scores: of each completion, for regression; `chosen` and `rejected` are both that completion.
        """
        self._ties, self._scores = ties, scores
        self._sides, self._chosen, self._rejected = sides, chosen, rejected
        self._margins, self._desirable = margins, desirable

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        chosen, rejected = side_at(self._sides, self._chosen[place]), side_at(self._sides, self._rejected[place])
        margin = 0.0 if self._margins is None else self._margins[place]
        if self._scores is not None:
            return Pair(chosen, chosen, score=self._scores[place])
        if self._desirable is None:
            return Pair(chosen, rejected, margin, bool(self._ties and self._ties[place]))
        mismatched = PairSide(chosen.prompt_ids, rejected.completion_ids, rejected.loss_mask)
        return Pair(chosen, mismatched, margin, desirable=bool(self._desirable[place]))


def side_at(sides: TokenRows, place: int) -> PairSide:
    """The side of a preference row, or the labelled completion, at a place."""
    ids, mask = sides[int(place)]
    count = int(sides.prompts[place])
    return PairSide(ids[:count], ids[count:], mask[count:])


@dataclass(slots=True)
class PreferencePart:
    """Preference rows or labelled completions: their token ids, and what they say beside their texts."""

    sides: TokenRows
    margins: array[float] = field(default_factory=lambda: array("d"))  # of each row
    labels: bytearray = field(default_factory=bytearray)  # of each side; chosen = 1
    ties: bytearray = field(default_factory=bytearray)  # of each row; 1 = neither side is better
    scores: array[float] = field(default_factory=lambda: array("d"))  # of each row that has one

    @classmethod
    def of(cls, sides: TokenRows, rows: Iterable[Mapping[str, Any]], use: Use, name: str) -> PreferencePart:
        """The part that these rows are; `name`: training, held-out. Raises: DataError for a row not for that use."""
        part = cls(sides)
        for place, row in enumerate(rows):
            if reason := misfit(row, use):
                raise DataError(f"{name} row {place + 1}: {reason}; its prompt is {row['prompt'][:80]!r}")
            part.margins.append(row.get("margin", 0.0))
            part.ties.append(bool(row.get("tie")))
            if "score" in row:
                part.scores.append(row["score"])
            part.labels.extend([row.get("label", 1)] if "completion" in row else [1, 0])
        if len(part.labels) != len(sides):
            raise DataError(f"{name} rows have {len(part.labels)} sides, but {len(sides)} are tokenised")
        return part


def pairs_of(train: PreferencePart, heldout: PreferencePart, use: Use, seed: int) -> tuple[PairRows, PairRows]:
    """The pairs of a loss: `kto` takes each completion with its label, regression with its score, others pairs alone.

    Raises: DataError for `kto` where all rows have the same prompt.
    """
    if use == "reward_regression":
        return _scored(train), _scored(heldout)
    if use != "kto":
        pairs = [PairRows(part.sides, *_halves(part.sides), part.margins, ties=part.ties) for part in (train, heldout)]
        return pairs[0], pairs[1]
    prompts = [_prompts(part.sides) for part in (train, heldout)]
    joined = heldout.sides.joined(train.sides)
    return _labelled(train.sides, train, mismatched_partners(prompts[0], seed)), _labelled(
        joined, heldout, mismatched_partners(prompts[1], seed, prompts[0])
    )


def _scored(part: PreferencePart) -> PairRows:
    places = np.arange(len(part.sides))
    return PairRows(part.sides, places, places, scores=part.scores)


def _labelled(sides: TokenRows, part: PreferencePart, partners: Sequence[int]) -> PairRows:
    places = np.arange(len(part.sides))
    return PairRows(sides, places, np.asarray(partners, np.int64), None, [bool(label) for label in part.labels])


def _halves(sides: TokenRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    places = np.arange(len(sides))
    return places[0::2], places[1::2]


def _prompts(sides: TokenRows) -> list[bytes]:
    """16 bytes that stand for the prompt of each side."""
    found = []
    for place, count in enumerate(sides.prompts.tolist()):
        ids, _ = sides.arrays(place)
        found.append(hashlib.blake2b(ids[:count].tobytes(), digest_size=16).digest())
    return found
