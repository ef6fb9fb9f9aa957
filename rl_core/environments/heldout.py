"""Held-out questions: a digest of an episode's content decides its split, so that no question is on both sides.

Different seeds may give the same question (`arithmetic` has 1,200 easy ones), so disjoint seeds alone hold nothing out.
The seeds of a generated split come in blocks; each block stands for its first seed whose content belongs to the split.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal, overload

from rl_core.data.splits import prompt_key
from rl_core.errors import EnvironmentFault, SettingsError

__all__ = ["ContentSeeds", "HeldOut", "compared", "digest", "is_heldout", "probed", "warn_once", "within"]

logger = logging.getLogger(__name__)

PROBED = 20  # held-out episodes expected among those looked at to see how much a level's questions differ
MOST_REPEATED = 0.05  # share of pairs of them that may be equal: fewer than about 20 different questions exceed it
BALANCE = (0.15, 3.0)  # held-out share among them, in units of the share that is asked for
BLOCK = {"train": 64, "heldout": 1024}  # seeds per block; the chance that none of them is of the split is below 1e-12
FAILED_OPENINGS = 3  # in a row, after which the environment counts as broken
FEW = 2**20  # a split of fewer seeds is a list of rows, not a generator
COMPARED = {False: 20_000, True: 1_000}  # rows compared at most, by `Environment.blocking`
_ESCAPED_SPACE = re.compile(r"\\[nrtf]")  # white space within the texts of JSON

By = Literal["content", "seeds", "unchecked"]


@dataclass(frozen=True)
class HeldOut:
    """Separation of a level's held-out episodes from its training episodes."""

    by: By  # content: no question is on both sides; seeds: only the seeds differ; unchecked: too many rows to compare
    note: str = ""  # for people; "" where there is nothing to say
    shared: frozenset[int] = field(default=frozenset(), repr=False)  # held-out seeds whose question is in training too

    def to_json(self) -> dict[str, Any]:
        """Plain dict with the number of shared seeds."""
        return {**asdict(self), "shared": len(self.shared)}


def digest(content: Any) -> str:
    """Digest of an episode's content: case, white space and Unicode composition are ignored.

    Args:
        content: text, numbers, None, and lists, tuples, sets, arrays, dataclasses and dicts of them.
    Raises: TypeError for anything else.
    """
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=_plain)
    if "\\" in text:
        text = _ESCAPED_SPACE.sub(" ", text)
    text = prompt_key(text)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Replacement of a value that `json` cannot write."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "tolist"):  # arrays and numbers of numpy and torch
        return value.tolist()
    raise TypeError(f"hidden: a {type(value).__name__} has no digest; give text, numbers, lists or dicts of them")


def is_heldout(key: str, share: float) -> bool:
    """True for the share of contents that is held out; `key` is a `digest`."""
    return int(key[:16], 16) / 2**64 < share


class ContentSeeds(Sequence[int]):
    """Seeds of one split of a generated level: of each block of candidates the first whose content is of the split."""

    def __init__(self, candidates: range, split: str, key_of: Callable[[int], str], share: float) -> None:
        self._candidates, self._key_of, self._share = candidates, key_of, share
        self._is_heldout, self._block = split == "heldout", BLOCK[split]

    def __len__(self) -> int:
        return len(self._candidates) // self._block

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # counts from the end where it is negative; IndexError beyond either end
        in_a_row = 0
        for seed in self._candidates[place * self._block : (place + 1) * self._block]:
            try:
                key = self._key_of(seed)
            except EnvironmentFault as error:  # of neither split: the episode is not played
                in_a_row += 1
                if in_a_row == FAILED_OPENINGS:
                    raise
                logger.warning("an episode that cannot be opened is passed over: %s", error)
                continue
            in_a_row = 0
            if is_heldout(key, self._share) == self._is_heldout:
                return seed
        raise EnvironmentFault(
            f"{self._block} seeds from {self._candidates[place * self._block]} gave no "
            f"{'held-out' if self._is_heldout else 'training'} question; too few of the questions differ"
        )

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, seed: object) -> bool:
        if not isinstance(seed, int) or seed not in self._candidates:
            return False
        place = self._candidates.index(seed) // self._block
        return place < len(self) and self[place] == seed


def probed(candidates: Sequence[int], key_of: Callable[[int], str], share: float) -> HeldOut:
    """`HeldOut` of a generated level, from its first episodes. Raises: SettingsError for a share out of range."""
    if not 0 <= share <= 0.5:
        raise SettingsError(f"heldout_share: {share} must be between 0 and 0.5")
    if not share:
        return HeldOut("seeds", "heldout_share is 0")
    seeds = candidates[: round(PROBED / share)]
    keys = _keys(seeds, key_of)
    times = Counter(keys)
    equal = sum(n * (n - 1) for n in times.values()) / (len(keys) * (len(keys) - 1))
    if equal > MOST_REPEATED:
        return HeldOut(
            "seeds",
            f"{len(keys)} episodes began with {len(times)} different question{'s' * (len(times) > 1)}, too few to hold "
            "some out. If a hidden state makes episodes differ, set `self.hidden` in the episode",
        )
    held = sum(is_heldout(key, share) for key in keys) / len(keys)
    if not BALANCE[0] * share <= held <= BALANCE[1] * share:
        return HeldOut("seeds", f"a few questions are so frequent that {held:.0%} of all episodes would be held out")
    return HeldOut("content")


def _keys(seeds: Sequence[int], key_of: Callable[[int], str]) -> list[str]:
    """Keys of the episodes that can be opened. Raises: EnvironmentFault where more than a tenth cannot."""
    keys, failed = [], 0
    for seed in seeds:
        try:
            keys.append(key_of(seed))
        except EnvironmentFault as error:
            failed += 1
            if failed > len(seeds) / 10 or (not keys and failed == FAILED_OPENINGS):
                raise
            logger.warning("an episode that cannot be opened is passed over: %s", error)
    return keys


def compared(train: Sequence[int], heldout: Sequence[int], key_of: Callable[[int], str], *, blocking: bool) -> HeldOut:
    """The same for a level whose episodes are rows: the held-out ones are compared with those of training."""
    if len(train) + len(heldout) > COMPARED[blocking]:
        count = f"{len(train)} training and {len(heldout)} held-out episodes"
        return HeldOut("unchecked", f"{count} are too many to compare; split them by question")
    known = {key_of(seed) for seed in train}
    shared = frozenset(seed for seed in heldout if key_of(seed) in known)
    if shared and len(shared) == len(heldout):
        return HeldOut("seeds", "every held-out question is a training question too")
    note = (
        f"{len(shared)} of {len(heldout)} held-out episodes ask a question of the training episodes; they are left out"
    )
    return HeldOut("content", note if shared else "", shared)


@functools.lru_cache(maxsize=256)  # each message is logged once
def warn_once(message: str) -> None:
    """Log a warning the first time that it occurs in this process."""
    logger.warning(message)


def within(seconds: float, place: str, function: Callable[[], Any]) -> Any:
    """Result of a call into a blocking environment. Raises: EnvironmentFault after the time limit."""
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
        raise EnvironmentFault(f"{place}: its reset has not returned within {seconds:g} s") from None
