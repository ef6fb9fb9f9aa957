"""Token ids of preference rows and labelled completions, as `data.records.read_preferences` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.data.chat import ChatRenderer
from rl_core.data.pairs import Pair, PairSide
from rl_core.errors import DataError
from rl_core.types import Message

__all__ = ["cut_sides", "pair_of", "row_sides"]

Row = dict[str, Any]


def pair_of(row: Row, renderer: ChatRenderer) -> Pair:
    """A preference row as token ids. Errors: `row_sides`."""
    (chosen, _), (rejected, _) = row_sides(row, renderer)
    return Pair(chosen, rejected, row.get("margin", 0.0), bool(row.get("tie")))


def row_sides(row: Row, renderer: ChatRenderer) -> list[tuple[PairSide, bool]]:
    """Token ids of each completion of a row, with its label; chosen = True.

    Raises: DataError where the template refuses the messages, or as `cut_sides`.
    """
    renderer = renderer.with_tools(row.get("tools"))
    prompt = row["prompt"]
    prompt_ids = renderer.prompt_ids([Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt)

    def side(answer: str | list[Message]) -> PairSide:
        if isinstance(answer, str):
            completion_ids = renderer.action_ids(answer)
            return PairSide(prompt_ids, completion_ids, [True] * len(completion_ids))
        return PairSide(prompt_ids, *renderer.turns(answer, after_prompt=True))

    labels = {"completion": row.get("label", True)} if "completion" in row else {"chosen": True, "rejected": False}
    sides = cut_sides([side(row[name]) for name in labels], row.get("max_tokens"))
    return list(zip(sides, labels.values(), strict=True))


def cut_sides(sides: Sequence[PairSide], max_tokens: int | None) -> list[PairSide]:
    """The first tokens of each side, prompt and completion together; None = all.

    Raises: DataError if none that carries loss is among them, or two sides do not differ.
    """
    kept = [_cut(side, max_tokens) for side in sides]
    if len(kept) == 2 and kept[0].completion_ids == kept[1].completion_ids:
        raise DataError(f"chosen and rejected are the same in the tokens that are read ({len(kept[0].ids)})")
    return kept


def _cut(side: PairSide, max_tokens: int | None) -> PairSide:
    if max_tokens is None or len(side.ids) <= max_tokens:
        return side
    room = max(0, max_tokens - len(side.prompt_ids))
    if not any(side.loss_mask[:room]):
        raise DataError(f"nothing that carries loss is among the first {max_tokens} tokens")
    return PairSide(side.prompt_ids, side.completion_ids[:room], side.loss_mask[:room])
