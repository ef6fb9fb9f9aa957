"""Single-turn tasks over rows of data: the policy answers a prompt once, and reward functions judge the answer.

    Prompts([{"prompt": "2 + 3 = ?", "target": "5"}, ...])

A row's `target` is the right answer as text, its `level` (in all rows or none) a level of difficulty. All columns reach
reward functions as `trajectory.row`; the environment itself gives no reward and knows no success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.environments.environment import HELDOUT_START, Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.errors import DataError
from rl_core.types import Message

__all__ = ["Prompts"]

ONE_LEVEL = "all"


class PromptEpisode(Episode):
    """One row: its prompt, then the answer, which ends the episode."""

    def __init__(self, seed: int, level: str, row: Mapping[str, Any], system: str) -> None:
        super().__init__(seed, level)
        prompt = row["prompt"]
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
        self._messages = [Message(role="system", content=system)] * bool(system) + messages
        self.prompt = messages[-1]["content"]
        self.target = str(row.get("target", ""))
        self.kind = str(row.get("kind", ""))
        self.row = dict(row)

    def reset(self) -> list[Message]:
        """The prompt, after the system message where there is one."""
        return list(self._messages)

    def act(self, text: str) -> Step:
        """Take the answer."""
        return Step(terminated=True, answer=text)


class Prompts(Environment):
    """One episode a row; held-out rows are episodes of the held-out split."""

    name = "prompts"
    blocking = False
    knows_success = False

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]] = (), *, system: str = ""
    ) -> None:
        """Rows as `data.records.read_prompts` gives them; `system`: a system message before every prompt.

        Raises: DataError where there is no row, or some rows have a level and others none.
        """
        super().__init__()
        if not rows:
            raise DataError("prompts: there is no row to train on")
        self._rows = {"train": list(rows), "heldout": list(heldout)}
        self._system = system
        levels = [row.get("level") for part in self._rows.values() for row in part]
        if any(level is None for level in levels) and any(level is not None for level in levels):
            count = sum(level is None for level in levels)
            raise DataError(f"prompts: {count} of {len(levels)} rows have no level; give it in every row or in none")
        self.levels = tuple(dict.fromkeys(str(level) for level in levels if level is not None)) or (ONE_LEVEL,)
        self._seeds = {
            (split, level): [
                seed
                for seed, row in zip(self.seeds(split), part, strict=True)
                if len(self.levels) == 1 or str(row["level"]) == level
            ]
            for split, part in self._rows.items()
            for level in self.levels
        }

    @property
    def tools(self) -> Toolset:
        """None."""
        return Toolset([])

    def episode(self, seed: int, level: str) -> Episode:
        """The row of that seed."""
        self.check_level(level)
        part, index = ("heldout", seed - HELDOUT_START) if seed >= HELDOUT_START else ("train", seed)
        return PromptEpisode(seed, level, self._rows[part][index], self._system)

    def seeds(self, split: str) -> range:
        """One seed a row."""
        start = 0 if split == "train" else HELDOUT_START
        return range(start, start + len(self._rows[split]))

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Seeds of the rows of one level."""
        return self._seeds[split, level]

    def heldout_levels(self) -> list[tuple[str, int]]:
        """(level, seed) of every held-out row, in order."""
        found = {seed: level for level in self.levels for seed in self._seeds["heldout", level]}
        return [(found[seed], seed) for seed in self.seeds("heldout")]
