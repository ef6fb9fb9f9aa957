"""Environment protocol: seeded, single-use, multi-turn episodes; terminated and truncated as in Gymnasium.

    episode = environment.episode(seed=7, level="easy")
    messages = episode.reset()
    step = episode.step("zoom 2 3")          # text of one action of the policy
    step.messages, step.reward, step.terminated, step.truncated, step.info

An environment is a task family; an episode is one instance, determined by (environment, level, seed) and used once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_core.environments.heldout import FEW, ContentSeeds, HeldOut, compared, digest, probed, warn_once, within
from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError, nearest
from rl_core.types import Message, ToolCall

__all__ = ["Demonstration", "Environment", "Episode", "HeldOut", "Step"]

HELDOUT_START = 2**30  # generated environments train on seeds below it and evaluate on seeds at or above it
_QUESTIONS_KEPT = 4096  # digests in memory
_OPENING_TIMEOUT_S = 300.0  # of an episode that is opened only to see its question


@dataclass(slots=True)
class Step:
    """Result of one action."""

    messages: list[Message] = field(default_factory=list)  # observations to append; [] when the episode ended
    reward: float = 0.0
    terminated: bool = False  # the episode reached its end
    truncated: bool = False  # the environment cut the episode off
    tool_call: ToolCall | None = None  # the executed call, if the action was one
    more_calls: list[ToolCall] = field(default_factory=list)  # those after it, of an action with several
    is_error: bool = False  # misuse: the action did not parse, named no tool, or its tool failed
    answer: str | None = None  # the final answer, if the action gave one
    success: bool | None = None  # set at the end of the episode
    is_grounded: bool | None = None  # the answer follows from the observations; None = unknown
    info: dict[str, Any] = field(default_factory=dict)  # kept with the turn, for rewards and analysis: plain values


@dataclass(slots=True)
class Demonstration:
    """One written-out episode: the messages from the first to the last answer."""

    messages: list[Message]
    level: str
    kind: str
    seed: int
    success: bool


class Episode(ABC):
    """One single-use episode; `kind`, `prompt`, `target` and `row` describe it for analysis.

    `hidden`: state that the opening messages do not show but the right answers depend on (an image, a maze, later
    questions). Two episodes are the same question if their opening messages and their `hidden` are equal.
    """

    hidden: Any = None

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

    def close(self) -> None:  # noqa: B027 most hold nothing open
        """End what the episode holds open (a session, a process); called once it is over, however that came about."""


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
    # Share of the different questions that is held out from training; 0 = held-out episodes differ in their seed alone.
    heldout_share: float = 0.2
    # Columns of `Episode.row`, known before anything is played; () = episodes are no rows of data, None = not known.
    columns: tuple[str, ...] | None = None
    # True = `episode` itself gives training and held-out seeds different questions.
    splits_itself: bool = False

    def __init__(self, data: Path | None = None) -> None:
        """`data`: folder prepared by the data stage; unused by environments that generate their episodes."""
        self.data = data

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Import paths among the options whose code runs when the environment is made."""
        return ()

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
        """Candidates for the seeds of 'train' or 'heldout' episodes; the two are disjoint."""
        return range(HELDOUT_START) if split == "train" else range(HELDOUT_START, 2 * HELDOUT_START)

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Seeds of a split at a level: those candidates whose question is of the split, by a digest of its content.

        Environments over fixed rows override it, or `seeds`. Where the questions differ too little to be split, all
        candidates, with a warning (`held_out`).
        """
        candidates = self.seeds(split)
        if self.splits_itself or len(candidates) < FEW or self._probed(level).by != "content":
            return candidates
        return ContentSeeds(candidates, split, lambda seed: self.question(seed, level), self.heldout_share)

    def content(self, seed: int, level: str) -> Any:
        """Opening messages and hidden state of an episode: equal contents are the same question.

        Environments whose `reset` is slow, or leaves something open, override it.
        """
        episode = self.episode(seed, level)
        messages = [[message["role"], message["content"]] for message in episode.reset()]
        return [messages, episode.hidden]

    def question(self, seed: int, level: str) -> str:
        """Digest of `content`: equal for episodes of the same question. Raises: EnvironmentFault naming the episode."""
        known: dict[tuple[int, str], str] = self.__dict__.setdefault("_questions", {})
        if (seed, level) not in known:
            if len(known) >= _QUESTIONS_KEPT:
                known.clear()
            known[seed, level] = digest(self._content(seed, level))
        return known[seed, level]

    def held_out(self, level: str) -> HeldOut:
        """Separation of a level's held-out episodes from training, with a warning where their questions are not."""
        self.check_level(level)
        known: dict[str, HeldOut] = self.__dict__.setdefault("_held_out", {})
        if level not in known:
            train, held = self.seeds_of("train", level), self.seeds_of("heldout", level)
            if self.splits_itself or isinstance(held, ContentSeeds):
                known[level] = HeldOut("content")
            elif len(held) >= FEW:
                known[level] = self._probed(level)
            else:
                known[level] = compared(train, held, lambda seed: self.question(seed, level), blocking=self.blocking)
                self._warn(level, known[level])
        return known[level]

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Write episode data (validated and split rows) into the data stage's folder; returns a report."""
        return {}

    def check_level(self, level: str) -> None:
        """Raise SettingsError for an unknown level."""
        if level not in self.levels:
            raise SettingsError(f"environment '{self.name}' has no level '{level}'; {nearest(level, self.levels)}")

    def _probed(self, level: str) -> HeldOut:
        """`held_out` of a generated level, from its first episodes."""
        known: dict[str, HeldOut] = self.__dict__.setdefault("_probes", {})
        if level not in known:
            self.check_level(level)
            known[level] = probed(self.seeds("train"), lambda seed: self.question(seed, level), self.heldout_share)
            self._warn(level, known[level])
        return known[level]

    def _warn(self, level: str, found: HeldOut) -> None:
        if found.note:
            kept = {"content": "by content", "seeds": "by seed only", "unchecked": "unchecked"}[found.by]
            warn_once(f"environment '{self.name}', level '{level}': held out {kept}: {found.note}")

    def _content(self, seed: int, level: str) -> Any:
        """`content`, within a time limit if the environment may wait; errors name the episode."""
        place = f"environment '{self.name}', level '{level}', seed {seed}"
        try:
            if self.blocking:
                return within(_OPENING_TIMEOUT_S, place, lambda: self.content(seed, level))
            return self.content(seed, level)
        except (SettingsError, EnvironmentFault):
            raise
        except (Exception, SystemExit) as error:  # SystemExit: an environment must not end the run
            raise EnvironmentFault(f"{place}: {type(error).__name__}: {error}") from error
