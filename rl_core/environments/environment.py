"""Environment protocol: seeded, single-use, multi-turn episodes; terminated and truncated as in Gymnasium.

    episode = environment.episode(seed=7, level="easy")
    messages = episode.reset()
    step = episode.step("zoom 2 3")          # text of one action of the policy
    step.messages, step.reward, step.terminated, step.truncated, step.info

An environment is a task family; an episode is one instance, determined by (environment, level, seed) and used once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError, nearest
from rl_core.types import Message, ToolCall

__all__ = ["Demonstration", "Environment", "Episode", "Step"]

HELDOUT_START = 2**30  # generated environments train on seeds below it and evaluate on seeds at or above it


@dataclass(slots=True)
class Step:
    """Result of one action."""

    messages: list[Message] = field(default_factory=list)  # observations to append; [] when the episode ended
    reward: float = 0.0
    terminated: bool = False  # the episode reached its end
    truncated: bool = False  # the environment cut the episode off
    tool_call: ToolCall | None = None  # the executed call, if the action was one
    is_error: bool = False  # misuse: the action did not parse, named no tool, or its tool failed
    answer: str | None = None  # the final answer, if the action gave one
    success: bool | None = None  # set at the end of the episode
    is_grounded: bool | None = None  # the answer follows from the observations; None = unknown
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Demonstration:
    """One written-out episode: the messages from the first to the last answer."""

    messages: list[Message]
    level: str
    kind: str
    seed: int
    success: bool


class Episode(ABC):
    """One single-use episode; `kind`, `prompt`, `target` and `row` describe it for analysis."""

    def __init__(self, seed: int, level: str) -> None:
        self.seed = seed
        self.level = level
        self.kind = ""
        self.prompt = ""
        self.target = ""
        self.row: dict[str, Any] = {}  # columns of the data row behind the episode, for reward functions
        self._ended = False

    @property
    def next_target(self) -> str:
        """Right answer of the pending turn; episodes with several questions override it."""
        return self.target

    @abstractmethod
    def reset(self) -> list[Message]:
        """The opening messages."""

    @abstractmethod
    def act(self, text: str) -> Step:
        """Execute one action; called by `step`, never after the end."""

    def step(self, text: str) -> Step:
        """Execute one action of the policy.

        Raises: EnvironmentFault if the episode has already ended.
        """
        if self._ended:
            raise EnvironmentFault(
                f"episode {self.level}/{self.seed} was stepped after its end; episodes are single-use"
            )
        step = self.act(text)
        self._ended = step.terminated or step.truncated
        return step


class Environment(ABC):
    """A family of episodes, a tool set and levels of difficulty."""

    name: ClassVar[str]
    levels: tuple[str, ...]
    # True = `reset` and `step` may wait for a server, a subprocess or a slow tool: they run in a thread pool, one call
    # per episode at a time, with a time limit (settings: sampling.max_concurrent_steps, sampling.step_timeout_s).
    # False = they only compute, for milliseconds: called directly on the decoding thread.
    blocking: bool = True
    # False = episodes end without a notion of success (`Step.success` stays None), so no success rate is reported.
    knows_success: bool = True

    def __init__(self, data: Path | None = None) -> None:
        """`data`: folder prepared by the data stage; unused by environments that generate their episodes."""
        self.data = data

    @property
    @abstractmethod
    def tools(self) -> Toolset:
        """Tools available to the policy."""

    @abstractmethod
    def episode(self, seed: int, level: str) -> Episode:
        """A new episode. Raises SettingsError for an unknown level."""

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Demonstration of an episode; None without a demonstrator."""
        return None

    def seeds(self, split: str) -> range:
        """Seeds of the 'train' or the 'heldout' episodes; the two are disjoint."""
        return range(HELDOUT_START) if split == "train" else range(HELDOUT_START, 2 * HELDOUT_START)

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Seeds of a split that exist at a level; environments over fixed rows override it."""
        return self.seeds(split)

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Write episode data (validated and split rows) into the data stage's folder; returns a report."""
        return {}

    def check_level(self, level: str) -> None:
        """Raise SettingsError for an unknown level."""
        if level not in self.levels:
            raise SettingsError(f"environment '{self.name}' has no level '{level}'; {nearest(level, self.levels)}")
