"""The buffer as the worker holds it: prioritised sampling, eviction, caps per caller.

It is in memory; `experience_log` is the record on the disk.

Nothing here reads a clock: ages are against the newest experiences, staleness against the version that answers. So the
content follows from the records and their order alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.errors import DataError
from rl_core.online.experience import Experience
from rl_core.online.labels import Label, LabelSource
from rl_core.online.sum_tree import SumTree
from rl_core.settings import OnlineBufferSettings

__all__ = ["Draw", "ExperienceBuffer", "KeptExperience", "importance_weights", "sampling_beta"]

_NEWEST = 9  # experiences whose median time is the present, so that a clock that jumps for a moment evicts nothing
_LOG_SHARE = 0.5  # of the log's bytes that the buffer may reach back over, where segments are removed


@dataclass(slots=True)
class KeptExperience:
    """An experience in the buffer, with what is known of it by now."""

    number: int  # of its record in the log
    experience: Experience
    digest: str = ""  # of its record
    position: int = 0  # bytes of all records up to this one
    label: Label | None = None  # None = nothing to learn from yet
    times_learned: int = 0
    agreed: bool | None = None  # feedback agreed with the consensus; None = it did not tell, or there was none


@dataclass(frozen=True, slots=True)
class Draw:
    """Experiences drawn for an update."""

    kept: tuple[KeptExperience, ...]  # [n] an experience may be drawn twice
    weights: tuple[float, ...]  # [n] importance weights, the largest is 1


def sampling_beta(update: int, *, start: float, updates: int) -> float:
    """Exponent of the importance weights: from `start` to 1, linearly over `updates`. Source: arXiv:1511.05952."""
    return start + (1.0 - start) * min(1.0, update / updates)


def importance_weights(probabilities_N: Sequence[float], count: int, beta: float) -> list[float]:
    """(count p_i)^-beta over their largest. Args: count: experiences that could be drawn. Source: arXiv:1511.05952."""
    raw = [(count * p) ** -beta for p in probabilities_N]
    return [value / max(raw) for value in raw]


class ExperienceBuffer:
    """At most `capacity` experiences; those with a label can be drawn, in proportion to (error + floor)^alpha.

    A new or newly labelled experience has the largest error seen so far, so that it is drawn soon.
    """

    def __init__(self, settings: OnlineBufferSettings) -> None:
        self.settings = settings
        self.tree = SumTree(settings.capacity)
        self.slots: dict[int, KeptExperience] = {}
        self.slot_of: dict[str, int] = {}  # by request
        self.errors: dict[int, float] = {}  # by slot
        self.largest_error = 1.0
        self.newest_times: deque[float] = deque(maxlen=_NEWEST)
        self.newest_position = 0
        self.evicted: Counter[str] = Counter()  # by reason
        self._free = list(range(settings.capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_drawable(self) -> int:
        """Experiences with a label."""
        return sum(kept.label is not None for kept in self.slots.values())

    @property
    def now(self) -> float:
        """Time that ages are taken against: the median of the newest experiences' (of an even number, the later)."""
        return sorted(self.newest_times)[len(self.newest_times) // 2] if self.newest_times else 0.0

    @property
    def caller_cap(self) -> int:
        """Experiences that one caller may hold."""
        return max(1, math.floor(self.settings.capacity * self.settings.max_caller_share))

    def find(self, request_id: str) -> KeptExperience | None:
        """The experience of a request; None = it is not here, or no longer."""
        slot = self.slot_of.get(request_id)
        return None if slot is None else self.slots[slot]

    def add(
        self, number: int, experience: Experience, label: Label | None, *, version: int, digest: str = "",
        position: int = 0,
    ) -> bool:  # fmt: skip
        """Take an experience in, after evicting what is too old, too stale, or beyond a cap.

        Args:
            version: of the policy that answers, for staleness. digest: of the record. position: bytes of all records
                up to it.
        Returns: False where the request is here already, or the experience itself is too old or too stale.
        """
        if experience.request_id in self.slot_of:
            self.evicted["repeated"] += 1
            return False
        self.newest_times.append(experience.time)
        self.newest_position = max(self.newest_position, position)
        self.evict_old(version)
        kept = KeptExperience(number, experience, digest, position)
        if self._reason_to_go(kept, version):
            self.evicted["late"] += 1
            return False
        if self._held_by(experience.caller) >= self.caller_cap:
            self._evict(self._least(experience.caller), "caller")
        elif not self._free:
            self._evict(self._least(None), "priority")
        slot = self._free.pop()
        self.slots[slot] = kept
        self.slot_of[experience.request_id] = slot
        self.errors[slot] = self.largest_error
        if label is not None:
            self.set_label(experience.request_id, label)
        return True

    def set_label(self, request_id: str, label: Label) -> None:
        """Give an experience its label; it may be drawn from now on, with the largest priority."""
        slot = self.slot_of[request_id]
        self.slots[slot].label = label
        self._set_error(slot, self.largest_error)

    def drop_labels(self, source: LabelSource) -> int:
        """Take the labels of a source back; returns how many there were. Those experiences wait for another label."""
        slots = [s for s, kept in self.slots.items() if kept.label is not None and kept.label.source == source]
        for slot in slots:
            self.slots[slot].label = None
            self.tree.set(slot, 0.0)
        return len(slots)

    def draw(self, count: int, beta: float, rng: np.random.Generator) -> Draw:
        """`count` experiences, one from each of `count` equal parts of the total priority.

        Raises: DataError where none has a label.
        """
        total = self.tree.total
        masses = (np.arange(count) + rng.random(count)) * (total / count)
        slots = [self.tree.find(float(mass)) for mass in masses]
        probabilities = [float(self.tree.priorities[slot]) / total for slot in slots]
        weights = importance_weights(probabilities, self.num_drawable, beta)
        return Draw(tuple(self.slots[slot] for slot in slots), tuple(weights))

    def learned(self, request_id: str, error: float) -> None:
        """Note the error of an experience after an update. Raises: DataError for one that is no error."""
        if not 0 <= error < math.inf:
            raise DataError(f"error: {error} must be finite and at least 0")
        slot = self.slot_of.get(request_id)
        if slot is not None:
            self.slots[slot].times_learned += 1
            self.largest_error = max(self.largest_error, error)
            self._set_error(slot, error)

    def evict_old(self, version: int) -> None:
        """Drop every experience that is too old or too stale. Args: version: of the policy that answers."""
        for slot in sorted(self.slots):
            if reason := self._reason_to_go(self.slots[slot], version):
                self._evict(slot, reason)

    def referenced_versions(self) -> set[int]:
        """Policy versions that sampled an experience which is still here."""
        return {kept.experience.policy_version for kept in self.slots.values()}

    def longest_answer(self) -> int:
        """Tokens of the longest answer that is here, those of an environment's turns included; 0 for none."""
        rollouts = (rollout for kept in self.slots.values() for rollout in kept.experience.rollouts)
        return max((len(rollout.completion_ids) for rollout in rollouts), default=0)

    def first_number(self) -> int | None:
        """The smallest record number that is still here."""
        return min((kept.number for kept in self.slots.values()), default=None)

    def metrics(self) -> dict[str, float]:
        """Size, share of the largest caller, ages, evictions by reason."""
        held = Counter(kept.experience.caller for kept in self.slots.values())
        ages = [max(0.0, self.now - kept.experience.time) for kept in self.slots.values()]
        found = {
            "online/buffer_size": float(len(self.slots)),
            "online/buffer_drawable": float(self.num_drawable),
            "online/buffer_callers": float(len(held)),
            "online/buffer_largest_caller": max(held.values(), default=0) / max(1, len(self.slots)),
            "online/buffer_age_max_seconds": max(ages, default=0.0),
            "online/buffer_age_mean_seconds": math.fsum(ages) / max(1, len(ages)),
        }
        return found | {f"online/evicted/{reason}": float(count) for reason, count in sorted(self.evicted.items())}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the experiences themselves, which are in the log under their numbers."""
        slots = sorted(self.slots)
        return {
            "slots": slots,
            "numbers": [self.slots[slot].number for slot in slots],
            "digests": [self.slots[slot].digest for slot in slots],
            "positions": [self.slots[slot].position for slot in slots],
            "times_learned": [self.slots[slot].times_learned for slot in slots],
            "agreed": [self.slots[slot].agreed for slot in slots],
            "labels": [_plain(self.slots[slot].label) for slot in slots],
            "errors": [self.errors[slot] for slot in slots],
            "free": list(self._free),
            "largest_error": self.largest_error,
            "newest_times": list(self.newest_times),
            "newest_position": self.newest_position,
            "evicted": dict(self.evicted),
        }

    def load_state_dict(self, state: Mapping[str, Any], experiences: Mapping[int, Experience]) -> None:
        """Inverse of `state_dict`.

        Args:
            experiences: by record number; all that the state names.
        Raises: DataError where one is missing.
        """
        missing = [number for number in state["numbers"] if number not in experiences]
        if missing:
            raise DataError(
                f"the buffer's record {missing[0]} is gone, and {len(missing) - 1} more; the log was changed"
            )
        self.__init__(self.settings)  # type: ignore[misc]
        self._free = list(state["free"])
        self.largest_error, self.newest_position = float(state["largest_error"]), int(state["newest_position"])
        self.newest_times.extend(state["newest_times"])
        self.evicted.update(state["evicted"])
        names = ("slots", "numbers", "digests", "positions", "labels", "times_learned", "agreed", "errors")
        for slot, number, digest, position, label, times, agreed, error in zip(*(state[n] for n in names), strict=True):
            experience = experiences[number]
            found = Label.from_json(label) if label is not None else None
            self.slots[slot] = KeptExperience(number, experience, digest, position, found, times, agreed)
            self.slot_of[experience.request_id] = slot
            self.errors[slot] = error
            if found is not None:
                self._set_error(slot, error)

    def _reason_to_go(self, kept: KeptExperience, version: int) -> str:
        settings, experience = self.settings, kept.experience
        if self.now - experience.time > settings.max_age_s:
            return "age"
        if version - experience.policy_version > settings.max_staleness:
            return "staleness"
        # one experience that is never evicted would hold all segments after its own, until the log takes nothing more
        is_far = self.newest_position - kept.position > settings.max_bytes * _LOG_SHARE
        return "log" if is_far and not settings.keep_segments else ""

    def _held_by(self, caller: str) -> int:
        return sum(kept.experience.caller == caller for kept in self.slots.values())

    def _least(self, caller: str | None) -> int:
        """Slot of the experience to go (of a caller): by error, then by age.

        Those without a label go first where they have more than `waiting_share` of the room. The rest of them stay: a
        label comes later than its answer.
        """
        slots = [s for s, kept in self.slots.items() if caller is None or kept.experience.caller == caller]
        room = self.settings.capacity if caller is None else self.caller_cap
        waiting = [s for s in slots if self.slots[s].label is None]
        labelled = [s for s in slots if self.slots[s].label is not None]
        chosen = waiting if len(waiting) > room * self.settings.waiting_share or not labelled else labelled
        return min(chosen, key=lambda s: (self.errors[s], self.slots[s].number))

    def _evict(self, slot: int, reason: str) -> None:
        kept = self.slots.pop(slot)
        del self.slot_of[kept.experience.request_id], self.errors[slot]
        self.tree.set(slot, 0.0)
        self._free.append(slot)
        self.evicted[reason] += 1

    def _set_error(self, slot: int, error: float) -> None:
        self.errors[slot] = error
        self.tree.set(slot, (error + self.settings.priority_floor) ** self.settings.priority_exponent)


def _plain(label: Label | None) -> dict[str, Any] | None:
    return None if label is None else label.to_json()
