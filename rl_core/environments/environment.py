"""Environment protocol, and the separation of held-out questions from training.

An environment is a task family; an episode is one instance, determined by (environment, level, seed) and used once.
Episodes have several turns; terminated and truncated as in Gymnasium.

    episode = environment.episode(seed=7, level="easy")
    messages = episode.reset()
    step = episode.step("zoom 2 3")          # text of one action of the policy
    step.messages, step.reward, step.terminated, step.truncated, step.info

Different seeds may give the same question (`arithmetic` has 1,200 easy ones), so disjoint seeds alone hold nothing out.
Therefore a digest of an episode's content decides its split, and no question is in both. The seeds of a generated split
come in blocks; each block stands for its first seed whose content belongs to the split.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

from rl_core.data.images import describe_images, join_message_parts
from rl_core.data.splits import normalize_prompt
from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError, suggest_name
from rl_core.types import Message, ToolCall
from rl_core.user_code.checks import USER_CODE_ERRORS

logger = logging.getLogger(__name__)

# Enough episodes are probed to expect this many held-out ones among them.
PROBED_HELDOUT_EPISODES = 20
MAX_REPEATED_SHARE = (
    0.05  # of equal pairs among them: fewer than about 20 different questions exceed it
)
BALANCE = (0.15, 3.0)  # allowed held-out share among them, in units of the requested share
# Seeds per block; the probability that none of them belongs to the split is below 1e-12.
BLOCK_SIZES = {"train": 64, "heldout": 1024}
MAX_FAILED_OPENINGS = 3  # consecutive failures after which the environment counts as broken
MIN_GENERATED_SEEDS = 2**20  # a split of fewer seeds is a list of rows, not a generator
# Generated environments train on seeds below it and evaluate on seeds from it on.
HELDOUT_START = 2**30
_MAX_CACHED_QUESTIONS = 4096  # digests in memory
_OPENING_TIMEOUT_S = 300.0  # for opening an episode only to read its question
MAX_COMPARED_ROWS = {False: 20_000, True: 1_000}  # rows compared at most, by `Environment.blocking`
_ESCAPED_SPACE = re.compile(r"\\[nrtf]")  # white space within the texts of JSON

HeldOutMethod = Literal["content", "seeds", "unchecked"]


@dataclass(frozen=True)
class HeldOutSeparation:
    """Separation of a level's held-out episodes from its training episodes."""

    # content: no question is in both splits; seeds: only the seeds differ; unchecked: too many rows to compare
    by: HeldOutMethod
    note: str = ""  # message for the user; "" = none
    # Held-out seeds whose question is in training too.
    shared: frozenset[int] = field(default=frozenset(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain dict with the number of shared seeds."""
        return {**asdict(self), "shared": len(self.shared)}


def compute_content_digest(content: Any) -> str:
    """Compute the digest of an episode's content, ignoring case, white space and Unicode composition.

    Args:
        content: text, numbers, None, and lists, tuples, sets, arrays, dataclasses and dicts of them.
    Raises: TypeError for anything else.
    """
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=_convert_to_json_value)
    if "\\" in text:
        text = _ESCAPED_SPACE.sub(" ", text)
    text = normalize_prompt(text)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _convert_to_json_value(value: Any) -> Any:
    """Convert a value that `json` cannot write."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "tolist"):  # arrays and numbers of numpy and torch
        return value.tolist()
    raise TypeError(
        f"hidden: a {type(value).__name__} has no digest; give text, numbers, lists or dicts of them"
    )


def _draw_place(block: int, size: int) -> int:
    """Draw a place in a block, the same one at every call."""
    digest = hashlib.blake2b(block.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % size


def is_heldout(key: str, share: float) -> bool:
    """Return whether a content is in the held-out share; `key`: its `compute_content_digest`."""
    return int(key[:16], 16) / 2**64 < share


class ContentSeeds(Sequence[int]):
    """Seeds of one split of a generated level: one of each block of candidates whose content is in the split.

    A block is read from a place drawn from its number. If it were read from its first candidate, whose number is a
    multiple of the block's size, an environment that takes `rows[seed % 100]` would play 25 of its 100 rows.
    """

    def __init__(
        self, candidates: range, split: str, key_of: Callable[[int], str], share: float
    ) -> None:
        self._candidates, self._compute_key, self._share = candidates, key_of, share
        self._is_heldout, self._block = split == "heldout", BLOCK_SIZES[split]

    def __len__(self) -> int:
        return len(self._candidates) // self._block

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # A negative index counts from the end; may raise IndexError.
        block = range(len(self))[index]
        num_failures = 0  # consecutive
        seeds = self._candidates[block * self._block : (block + 1) * self._block]
        start = _draw_place(block, self._block)
        for seed in itertools.chain(seeds[start:], seeds[:start]):
            try:
                key = self._compute_key(seed)
            except EnvironmentFault as error:  # in neither split: the episode is not played
                num_failures += 1
                if num_failures == MAX_FAILED_OPENINGS:
                    raise
                logger.warning("skipping an episode that cannot be opened: %s", error)
                continue
            num_failures = 0
            if is_heldout(key, self._share) == self._is_heldout:
                return seed
        raise EnvironmentFault(
            f"{self._block} seeds from {self._candidates[block * self._block]} gave no "
            f"{'held-out' if self._is_heldout else 'training'} question; too few of the questions differ"
        )

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, seed: object) -> bool:
        if not isinstance(seed, int) or seed not in self._candidates:
            return False
        block = self._candidates.index(seed) // self._block
        return block < len(self) and self[block] == seed


def probe_separation(
    candidates: Sequence[int], key_of: Callable[[int], str], share: float
) -> HeldOutSeparation:
    """Estimate the `HeldOutSeparation` of a generated level from its first episodes.

    Raises: SettingsError for a share out of range.
    """
    if not 0 <= share <= 0.5:
        raise SettingsError(f"heldout_share: {share} must be between 0 and 0.5")
    if not share:
        return HeldOutSeparation("seeds", "heldout_share is 0")
    seeds = candidates[: round(PROBED_HELDOUT_EPISODES / share)]
    keys = _compute_question_keys(seeds, key_of)
    counts = Counter(keys)
    repeated_share = sum(n * (n - 1) for n in counts.values()) / (len(keys) * (len(keys) - 1))
    if repeated_share > MAX_REPEATED_SHARE:
        return HeldOutSeparation(
            "seeds",
            f"{len(keys)} episodes began with {len(counts)} different question{'s' * (len(counts) > 1)}, too few to "
            "hold some out. If a hidden state makes episodes differ, set `self.hidden` in the episode",
        )
    heldout_fraction = sum(is_heldout(key, share) for key in keys) / len(keys)
    if not BALANCE[0] * share <= heldout_fraction <= BALANCE[1] * share:
        return HeldOutSeparation(
            "seeds",
            f"a few questions are so frequent that {heldout_fraction:.0%} of all episodes would be held out",
        )
    return HeldOutSeparation("content")


def _compute_question_keys(seeds: Sequence[int], key_of: Callable[[int], str]) -> list[str]:
    """Compute the keys of the episodes that can be opened. Raises: EnvironmentFault if more than a tenth cannot."""
    keys, failed = [], 0
    for seed in seeds:
        try:
            keys.append(key_of(seed))
        except EnvironmentFault as error:
            failed += 1
            if failed > len(seeds) / 10 or (not keys and failed == MAX_FAILED_OPENINGS):
                raise
            logger.warning("skipping an episode that cannot be opened: %s", error)
    return keys


def compare_splits(
    train: Sequence[int], heldout: Sequence[int], key_of: Callable[[int], str], *, blocking: bool
) -> HeldOutSeparation:
    """Compare the held-out rows of a level with its training rows."""
    if len(train) + len(heldout) > MAX_COMPARED_ROWS[blocking]:
        count = f"{len(train)} training and {len(heldout)} held-out episodes"
        return HeldOutSeparation(
            "unchecked", f"{count} are too many to compare; split them by question"
        )
    known = {key_of(seed) for seed in train}
    shared = frozenset(seed for seed in heldout if key_of(seed) in known)
    if shared and len(shared) == len(heldout):
        return HeldOutSeparation("seeds", "every held-out question is a training question too")
    if not shared:
        return HeldOutSeparation("content")
    counts = f"{len(shared)} of {len(heldout)} held-out episodes"
    note = f"{counts} ask a question of the training episodes; they are left out"
    return HeldOutSeparation("content", note, shared)


@functools.lru_cache(maxsize=256)  # each message is logged once
def warn_once(message: str) -> None:
    """Log a warning the first time that it occurs in this process."""
    logger.warning(message)


def call_with_time_limit(seconds: float, description: str, function: Callable[[], Any]) -> Any:
    """Call a function of a blocking environment. Raises: EnvironmentFault after the time limit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # re-raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="opening of an episode").start()
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        if future.done():  # raised by the environment itself
            raise
        raise EnvironmentFault(
            f"{description}: its reset has not returned within {seconds:g} s"
        ) from None


@dataclass(slots=True)
class Step:
    """Result of one action."""

    # Observations to append; [] when the episode ended.
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    terminated: bool = False  # the episode reached its end
    truncated: bool = False  # the environment cut the episode off
    tool_call: ToolCall | None = None  # the executed call, if the action was one
    # The calls after it, if the action made several.
    more_calls: list[ToolCall] = field(default_factory=list)
    is_error: bool = False  # misuse: the action did not parse, named no tool, or its tool failed
    answer: str | None = None  # the final answer, if the action gave one
    success: bool | None = None  # set at the end of the episode
    is_grounded: bool | None = None  # the answer follows from the observations; None = unknown
    # Plain values stored with the turn, for rewards and analysis.
    info: dict[str, Any] = field(default_factory=dict)
    # Key of the state in which the next action is taken, for `turn_credit`; None = the text of the messages is it.
    state: str | None = None


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
    `cut_reward`: added to the reward of an episode that a limit of the sampler ends (tokens, turns, context). In a game
    that a loser ends with -1, it is -1: else a policy that never makes its last move never loses.
    """

    hidden: Any = None
    cut_reward: float = 0.0

    def __init__(self, seed: int, level: str) -> None:
        self.seed = seed
        self.level = level
        self.kind = ""
        self.prompt = ""
        self.target = ""
        self.row: dict[str, Any] = {}  # columns of the episode's data row, for reward functions
        self._ended = False

    @property
    def next_target(self) -> str:
        """Right answer of the pending turn; episodes with several questions override it."""
        return self.target

    @abstractmethod
    def reset(self) -> list[Message]:
        """Return the opening messages."""

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
        """Close sessions or processes that the episode holds open; called after every episode, even a failed one."""


class Environment(ABC):
    """A family of episodes, a tool set and levels of difficulty."""

    name: ClassVar[str]
    levels: tuple[str, ...]
    # True = `reset` and `step` may block on a server, a subprocess or a slow tool: they run in a thread pool, one call
    # per episode at a time, with a time limit (settings: sampling.max_concurrent_steps, sampling.step_timeout_s).
    # False = they only compute, for milliseconds; called directly on the decoding thread.
    blocking: bool = True
    # False = episodes end without a notion of success (`Step.success` stays None), so no success rate is reported.
    knows_success: bool = True
    # Share of distinct questions held out from training; 0 = held-out episodes differ only in their seed.
    heldout_share: float = 0.2
    # Columns of `Episode.row`, known before any episode; () = episodes are not data rows, None = unknown.
    columns: tuple[str, ...] | None = None
    # True = the environment itself gives training and held-out seeds different questions.
    splits_itself: bool = False

    def __init__(self, data: Path | None = None) -> None:
        """Store `data`, the folder prepared by the data stage; unused by environments that generate their episodes."""
        self.data = data

    def iter_target_rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield (place, right answer, row) of the data rows that verifiers will read; none if they are unknown."""
        yield from ()

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the import paths among the options whose code runs when the environment is constructed."""
        return ()

    @property
    @abstractmethod
    def tools(self) -> Toolset:
        """Tools available to the policy."""

    @abstractmethod
    def episode(self, seed: int, level: str) -> Episode:
        """Return a new episode. Raises: SettingsError for an unknown level."""

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return the demonstration of an episode; None without a demonstrator."""
        return None

    def seeds(self, split: str) -> range:
        """Return the candidate seeds of 'train' or 'heldout' episodes; the two are disjoint."""
        return range(HELDOUT_START) if split == "train" else range(HELDOUT_START, 2 * HELDOUT_START)

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the seeds of a split at a level: the candidates whose question belongs to it, by a digest of the
        content.

        Environments over fixed rows override this method or `seeds`. If the questions differ too little to be split,
        all
        candidates are returned, with a warning (`held_out`).
        """
        candidates = self.seeds(split)
        if (
            self.splits_itself
            or len(candidates) < MIN_GENERATED_SEEDS
            or self._probe_level(level).by != "content"
        ):
            return candidates
        return ContentSeeds(
            candidates,
            split,
            lambda seed: self.question(seed, level),
            self.heldout_share,
        )

    def content(self, seed: int, level: str) -> Any:
        """Return the opening messages and hidden state of an episode; equal contents are the same question.

        Override it if `reset` is slow or leaves something open.
        """
        episode = self.episode(seed, level)
        messages = [
            [message["role"], f"{message['content']}{describe_images(message)}"]
            for message in map(join_message_parts, episode.reset())
        ]
        return [messages, episode.hidden]

    def question(self, seed: int, level: str) -> str:
        """Compute the digest of `content`, equal for episodes of the same question.

        Raises: EnvironmentFault naming the episode.
        """
        known: dict[tuple[int, str], str] = self.__dict__.setdefault("_questions", {})
        if (seed, level) not in known:
            if len(known) >= _MAX_CACHED_QUESTIONS:
                known.clear()
            known[seed, level] = compute_content_digest(self._read_content(seed, level))
        return known[seed, level]

    def held_out(self, level: str) -> HeldOutSeparation:
        """Return how a level's held-out episodes are separated from training; warn if their questions are not."""
        self.check_level(level)
        known: dict[str, HeldOutSeparation] = self.__dict__.setdefault("_held_out", {})
        if level not in known:
            train, heldout = self.seeds_of("train", level), self.seeds_of("heldout", level)
            if self.splits_itself or isinstance(heldout, ContentSeeds):
                known[level] = HeldOutSeparation("content")
            elif len(heldout) >= MIN_GENERATED_SEEDS:
                known[level] = self._probe_level(level)
            else:
                known[level] = compare_splits(
                    train,
                    heldout,
                    lambda seed: self.question(seed, level),
                    blocking=self.blocking,
                )
                self._warn_about_separation(level, known[level])
        return known[level]

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Write episode data (validated and split rows) into the data stage's folder and return a report."""
        return {}

    @property
    def parts(self) -> tuple[Environment, ...]:
        """The environments of a mixture; any other environment is its only part."""
        return (self,)

    @property
    def level_weights(self) -> dict[str, float]:
        """Sampling weights of the levels that are trained on without a curriculum."""
        return dict.fromkeys(self.levels, 1.0)

    def find_part(self, level: str) -> Environment:
        """Return the part that plays the level. Raises: SettingsError for an unknown level."""
        return self

    def expand_levels(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Replace names of a mixture's environments by their levels, which share the weight.

        Raises: SettingsError for a level that is named by itself and by its environment.
        """
        return dict(weights)

    def check_level(self, level: str) -> None:
        """Raise SettingsError for an unknown level."""
        if level not in self.levels:
            raise SettingsError(
                f"environment '{self.name}' has no level '{level}'; {suggest_name(level, self.levels)}"
            )

    def _probe_level(self, level: str) -> HeldOutSeparation:
        """Probe the separation of a generated level on its first episodes."""
        known: dict[str, HeldOutSeparation] = self.__dict__.setdefault("_probes", {})
        if level not in known:
            self.check_level(level)
            known[level] = probe_separation(
                self.seeds("train"),
                lambda seed: self.question(seed, level),
                self.heldout_share,
            )
            self._warn_about_separation(level, known[level])
        return known[level]

    def _warn_about_separation(self, level: str, separation: HeldOutSeparation) -> None:
        if separation.note:
            is_generated = len(self.seeds_of("heldout", level)) >= MIN_GENERATED_SEEDS
            methods = {
                "content": "by content",
                "seeds": "by seed only" if is_generated else "in name only",
                "unchecked": "unchecked",
            }
            warn_once(
                f"environment '{self.name}', level '{level}': held out {methods[separation.by]}: {separation.note}"
            )

    def _read_content(self, seed: int, level: str) -> Any:
        """Return `content`, with a time limit if the environment may block; errors name the episode."""
        label = f"environment '{self.name}', level '{level}', seed {seed}"
        try:
            if self.blocking:
                return call_with_time_limit(
                    _OPENING_TIMEOUT_S, label, lambda: self.content(seed, level)
                )
            return self.content(seed, level)
        except (SettingsError, EnvironmentFault):
            raise
        except USER_CODE_ERRORS as error:  # SystemExit: an environment must not end the run
            raise EnvironmentFault(f"{label}: {type(error).__name__}: {error}") from error
