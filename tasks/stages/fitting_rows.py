"""Rows that fit: those that are refused, too long, cut or left out, and the token ids of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import records
from rl_core.data.conversation import cut_sequences
from rl_core.data.formats import Kind
from rl_core.data.kept_rows import KeptRows
from rl_core.data.pair_rows import side_at
from rl_core.data.preference_rows import cut_sides
from rl_core.data.token_cache import Tokens
from rl_core.data.token_rows import TokenRows
from rl_core.errors import DataError
from rl_core.settings import DataSettings

__all__ = ["Fitting", "Found", "keep_what_fits"]

Row = dict[str, Any]


@dataclass
class Found:
    """Rows and the place of each, for messages."""

    rows: KeptRows = field(default_factory=KeptRows)
    source: str = ""
    places: list[tuple[str, int]] = field(default_factory=list)  # file and line

    def keep(self, kept: Sequence[int]) -> None:
        """Leave out all but these rows."""
        self.rows, self.places = self.rows.select(kept), [self.places[row] for row in kept]


@dataclass(frozen=True)
class Fitting:
    """Rows of a table of tokens that fit."""

    tokens: TokenRows
    kept: NDArray[np.int64]  # rows of the table, ascending
    places: NDArray[np.int64]  # of their sequences in the table
    max_tokens: int | None  # sequences are cut there; None = none is longer

    def part(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Places, in the table, of the sequences of some of the kept rows, which are counted from 0."""
        wanted = np.zeros(int(self.kept[-1]) + 1, np.bool_)
        wanted[self.kept[np.asarray(rows, np.int64)]] = True
        return self.places[wanted[self.tokens.rows[self.places]]]


def keep_what_fits(
    found: Found, tokens: Tokens, kind: Kind, longest: int, settings: DataSettings, summary: Row
) -> Fitting:
    """Refuse, cut, or leave out and count the rows that the template refuses or that are too long.

    Args:
        longest: context of the model.
        summary: gets the counts; a row that is cut gets `max_tokens`.
    Raises: RecordsError listing bad rows; DataError where no row is left.
    """
    limit = min(longest, settings.max_tokens or longest)
    holds = f"the context holds {longest}" if limit == longest else f"max_tokens is {limit}"
    lengths = tokens.longest(len(found.rows))
    too_long = np.flatnonzero(lengths > limit).tolist()
    reasons = dict(tokens.refused)
    cut: list[int] = []
    if settings.long_rows == "cut":
        for row, reason in _cut_problems(tokens.rows, kind, too_long, limit):
            reasons |= {row: reason} if reason else {}
            cut += [] if reason else [row]
        too_long = []
    elif settings.long_rows == "refuse":
        reasons |= {row: f"is {lengths[row]} tokens long, {holds}" for row in too_long}
    problems = [records.RowProblem(*found.places[row], "", reasons[row]) for row in sorted(reasons)]
    records.report(found.source, problems, len(found.rows), settings.on_bad_row)
    out = reasons.keys() | set(too_long)
    kept = [row for row in range(len(found.rows)) if row not in out]
    if not kept:
        raise DataError(f"{found.source}: every row is longer than {limit} tokens; raise max_tokens, or cut long_rows")
    for row in cut:
        found.rows.replace(row, {**found.rows[row], "max_tokens": limit})
    max_tokens = limit if cut else None
    places = tokens.rows.places_of(kept)
    if cut and kind == "demonstrations":  # a sequence that has no loss left is left out
        places = places[tokens.rows.select(places, max_tokens).loss_tokens > 0]
    summary[f"{kind}_too_long"] = len(too_long)  # bad rows, or left out
    summary[f"{kind}_cut"] = len(cut)
    summary[f"{kind}_tokens"] = int(Tokens(tokens.rows.select(places, max_tokens)).longest(len(found.rows)).sum())
    found.keep(kept)
    return Fitting(tokens.rows, np.asarray(kept, np.int64), places, max_tokens)


def _cut_problems(tokens: TokenRows, kind: Kind, rows: Sequence[int], limit: int) -> Iterator[tuple[int, str]]:
    """(row, why it cannot be cut); "" = it can."""
    for row in rows:
        places = tokens.places_of([row])
        try:
            if kind == "demonstrations":
                cut_sequences([tokens[int(place)] for place in places], limit)
            else:
                cut_sides([side_at(tokens, int(place)) for place in places], limit)
        except DataError as error:
            yield row, str(error)
        else:
            yield row, ""
