"""`instructions`: one sentence that follows an instruction with several parts, each checked by a program.

    user    Write one question about the sea in 6 to 12 words. Use the word salt. Repeat no word.
    policy  Why does the sea taste of so much salt?

The reward is the share of parts that hold; the episode is a success if all do. Held-out episodes have other topics.
Level `unseen` has parts that no training level has, to see whether a policy learned to follow instructions or to please
these checks. One question, one answer; nothing is demonstrated.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.environments.environment import HELDOUT_START, Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.types import Message

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*", re.UNICODE)
_SENTENCE_END = re.compile(r"[.!?]+[\"'\u201d\u2019)]*(?=\s|$)")
_SHORT_WORD = 3  # letters: a, the, and may occur twice

FORMS = {"sentence": ".", "question": "?", "exclamation": "!"}  # and the mark at its end
NUM_WORDS = {"easy": 1, "medium": 2, "hard": 2, "unseen": 1}  # that have to be used


@dataclass(frozen=True)
class InstructionPart:
    """One part of an instruction and its check."""

    name: str
    text: str  # as the prompt says it; "" = said by the first sentence of the prompt
    holds: Callable[[str], bool]  # of the answer


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case; numbers and marks are none."""
    return [word.lower() for word in _WORD.findall(text)]


def is_one_sentence(text: str, mark: str) -> bool:
    """Return whether a text is one line with one sentence that begins with a capital and ends with the mark."""
    text = text.strip()
    ends = _SENTENCE_END.findall(text)
    first = next((character for character in text if character.isalpha()), "")
    return (
        "\n" not in text
        and len(ends) == 1
        and ends[0].rstrip("\"'\u201d\u2019)") == mark
        and text.endswith(ends[0])
        and first.isupper()
    )


def has_repeated_word(text: str) -> bool:
    """Return whether a word of more than three letters occurs twice, as in `A stone is a stone.`"""
    long_words = [word for word in split_words(text) if len(word) > _SHORT_WORD]
    return len(set(long_words)) < len(long_words)


@functools.cache
def _load_topics() -> dict[str, dict[str, list[str]]]:
    data = importlib.resources.files(__package__).joinpath("instruction_topics.json")
    topics: dict[str, dict[str, list[str]]] = json.loads(data.read_text(encoding="utf-8"))
    return topics


class InstructionEpisode(Episode):
    """One instruction; the first action is the answer."""

    def __init__(
        self, seed: int, level: str, form: str, topic: str, parts: list[InstructionPart]
    ) -> None:
        super().__init__(seed, level)
        self.kind = form
        self.parts = parts
        opening = next(part.text for part in parts if part.name == "length")
        others = [part.text for part in parts if part.text and part.name != "length"]
        self.prompt = " ".join([f"Write one {form} about {topic} {opening}.", *others])

    def reset(self) -> list[Message]:
        """Return the instruction."""
        return [Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Score the answer."""
        checks = {part.name: part.holds(text) for part in self.parts}
        return Step(
            reward=sum(checks.values()) / len(checks),
            terminated=True,
            answer=text.strip(),
            success=all(checks.values()),
            info={"checks": checks},
        )


class Instructions(Environment):
    """Instructions of several parts for one sentence."""

    name = "instructions"
    levels = tuple(NUM_WORDS)
    blocking = False
    splits_itself = True  # training and held-out episodes have other topics

    def __init__(self, data: Path | None = None) -> None:
        """Set up the environment; it has no options."""
        super().__init__(data)
        self._tools = Toolset([])

    @property
    def tools(self) -> Toolset:
        """No tools."""
        return self._tools

    def episode(self, seed: int, level: str) -> InstructionEpisode:
        """Return the episode of a level and seed."""
        self.check_level(level)
        rng = random.Random(f"instructions/{level}/{seed}")
        topics = _load_topics()["train" if seed < HELDOUT_START else "heldout"]
        topic = rng.choice(sorted(topics))
        words = rng.sample(topics[topic], NUM_WORDS[level])
        form = rng.choice(tuple(FORMS))
        parts = [
            _build_form_part(form),
            _build_length_part(rng, is_exact=level == "unseen"),
            *(_build_use_part(word) for word in words),
            InstructionPart("variety", "Repeat no word.", lambda text: not has_repeated_word(text)),
        ]
        if level == "hard":
            first = rng.choice(("The", "Every", "When", "My", "Some"))
            parts.append(_build_start_part(first))
        elif level == "unseen":
            parts.append(_build_avoidance_part(rng.choice(("the", "and", "is"))))
        return InstructionEpisode(seed, level, form, topic, parts)


def _build_form_part(form: str) -> InstructionPart:
    return InstructionPart("form", "", lambda text: is_one_sentence(text, FORMS[form]))


def _build_length_part(rng: random.Random, *, is_exact: bool) -> InstructionPart:
    if is_exact:
        count = rng.randint(7, 11)
        return InstructionPart(
            "length", f"in exactly {count} words", lambda text: len(split_words(text)) == count
        )
    low = rng.randint(5, 8)
    high = low + rng.randint(3, 6)
    return InstructionPart(
        "length", f"in {low} to {high} words", lambda text: low <= len(split_words(text)) <= high
    )


def _build_use_part(word: str) -> InstructionPart:
    return InstructionPart(
        f"use {word}", f"Use the word {word}.", lambda text: word in split_words(text)
    )


def _build_start_part(first: str) -> InstructionPart:
    def holds(text: str) -> bool:
        words: list[Any] = split_words(text)
        return words[:1] == [first.lower()]

    return InstructionPart("start", f"Begin with the word {first}.", holds)


def _build_avoidance_part(word: str) -> InstructionPart:
    return InstructionPart(
        "avoid", f"Do not use the word {word}.", lambda text: word not in split_words(text)
    )
