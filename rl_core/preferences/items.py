"""Items to rate: a prompt and one or two answers, each a text or the turns of a trajectory.

items.jsonl   {"id", "prompt", "answers", "sources", "about", "crc"}, one line each, written once
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data.files import BadRow
from rl_core.data.messages import validate_messages
from rl_core.data.records import read_preferences
from rl_core.errors import DataError
from rl_core.storage.append_log import encode_checked_line, read_records
from rl_core.storage.atomic_files import make_folder, replace_file
from rl_core.types import Message, Trajectory

# A text, or messages that start and end with the assistant's.
RatedAnswer = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RatedItem:
    """Prompt with one or two answers to rate."""

    prompt: RatedAnswer  # text of the user, or messages
    answers: tuple[RatedAnswer, ...]  # two to compare, or one to score
    sources: tuple[str, ...]  # model and version of each answer
    about: dict[str, Any] = field(default_factory=dict)  # level, seed, ... of the episode

    @property
    def id(self) -> str:
        """Digest of the displayed content; the order of the answers does not matter."""
        answers = sorted(json.dumps(answer, sort_keys=True) for answer in self.answers)
        content = json.dumps([self.prompt, answers], sort_keys=True)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def extract_answer(trajectory: Trajectory) -> RatedAnswer:
    """Return a policy's part of an episode: its text, or its turns with the observations in between."""
    turns = trajectory.turns
    if len(turns) == 1:
        return turns[0].action
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        messages.append({"role": "assistant", "content": turn.action})
        if turn.observation is not None and number < len(turns) - 1:
            messages.append({"role": "tool", "content": turn.observation})
    return messages


def load_items(path: Path, *, answers: int) -> list[RatedItem]:
    """Load items from rows {"prompt", "answers": [...], "sources": [...]}, or from preference rows in any format.

    Duplicate items and pairs with equal answers are skipped.
    Args:
        answers: 2 = pairs; 1 = each answer of a row is a separate item.
    Raises: DataError naming a row that cannot be used, or a file without items.
    """
    rows = list(_read_answer_rows(path)) or [
        _convert_preference_row(row) for row in read_preferences(path).rows
    ]
    items: dict[str, RatedItem] = {}
    for row_item in rows:
        for item in _split_item(row_item, answers):
            items.setdefault(item.id, item)
    if not items:
        noun = "answers" if answers > 1 else "answer"
        raise DataError(f"{path}: holds no item with {answers} different {noun}")
    return list(items.values())


def _convert_preference_row(row: Mapping[str, Any]) -> RatedItem:
    if "chosen" in row:
        answers = (row["chosen"], row["rejected"])
        return RatedItem(row["prompt"], answers, ("chosen", "rejected"))
    return RatedItem(row["prompt"], (row["completion"],), ("completion",))


def _split_item(item: RatedItem, answers: int) -> Iterable[RatedItem]:
    """Return the item as a list of pairs or of single answers."""
    if answers == 1:
        return [
            RatedItem(item.prompt, (answer,), (source,), item.about)
            for answer, source in zip(item.answers, item.sources, strict=True)
        ]
    return [item] if len(item.answers) == 2 and item.answers[0] != item.answers[1] else []


def _read_answer_rows(path: Path) -> Iterable[RatedItem]:
    """Yield the items of rows that have `answers`; nothing if the first row has none."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row_location = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{row_location}: not a JSON object: {error}") from None
            if not isinstance(row, dict) or "answers" not in row:
                if number == 1:
                    return
                raise DataError(f"{row_location}: has no answers, but earlier rows have them")
            yield _parse_item(row, row_location)


def _parse_item(row: Mapping[str, Any], row_location: str) -> RatedItem:
    answers = row["answers"]
    if not isinstance(answers, list) or not 1 <= len(answers) <= 2:
        raise DataError(f"{row_location}: answers must be a list of one or two")
    sources = row.get("sources") or [""] * len(answers)
    if not isinstance(sources, list) or len(sources) != len(answers):
        raise DataError(
            f"{row_location}: sources must name one model for each of the {len(answers)} answers"
        )
    checked = tuple(
        _check_answer(answer, f"{row_location}: answers[{index}]")
        for index, answer in enumerate(answers)
    )
    prompt = _check_answer(row.get("prompt"), f"{row_location}: prompt")
    return RatedItem(prompt, checked, tuple(map(str, sources)), dict(row.get("about") or {}))


def _check_answer(value: Any, row_location: str) -> RatedAnswer:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        try:
            return [dict(message) for message in validate_messages(value, row_location)]
        except BadRow as error:
            raise DataError(str(error)) from None
    raise DataError(f"{row_location}: must be text or a list of messages")


def write_items(path: Path, items: Sequence[RatedItem]) -> None:
    """Write the items atomically."""
    make_folder(path.parent)
    with replace_file(path, binary=True) as file:
        for item in items:
            row = {
                "prompt": item.prompt,
                "answers": item.answers,
                "sources": item.sources,
                "about": item.about,
            }
            file.write(encode_checked_line(row))


def read_items(path: Path) -> list[RatedItem]:
    """Read the items of a file in order; damaged lines are reported and skipped."""
    return [
        RatedItem(row["prompt"], tuple(row["answers"]), tuple(row["sources"]), row["about"])
        for row in read_records(path)
    ]


def build_prompt_messages(item: RatedItem) -> list[Message]:
    """Return the prompt as messages."""
    prompt: Any = item.prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return list(prompt)
