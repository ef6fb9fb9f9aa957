"""Sum tree: sampling in proportion to priorities, with updates in logarithmic time.

Source: Schaul et al. 2015, arXiv:1511.05952, appendix B.2.1.

The buffer as the worker holds it: prioritised sampling, eviction, caps per caller.

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
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.online.experience import Experience
from rl_core.online.labels import Label, LabelSource
from rl_core.settings import OnlineBufferSettings


class SumTree:
    """Non-negative priorities of numbered leaves, and the sums over every aligned power of two of them.

    A parent is always the sum of its two children as they are, never changed by a difference: so rounding does not add
    up, and equal priorities give equal trees whatever happened before.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise DataError(f"capacity: {capacity} must be at least 1")
        self.capacity = capacity
        self.leaves = 1 << (capacity - 1).bit_length()
        # node i has the children 2 i and 2 i + 1; leaf l is node leaves + l
        self.nodes = np.zeros(2 * self.leaves)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self.nodes[1])

    @property
    def priorities(self) -> NDArray[np.float64]:
        """Priorities by leaf (a view)."""
        found: NDArray[np.float64] = self.nodes[self.leaves : self.leaves + self.capacity]
        return found

    def set_priority(self, leaf: int, priority: float) -> None:
        """Change one priority. Raises: DataError for a leaf that is not there, or a priority that is none."""
        if not 0 <= leaf < self.capacity:
            raise DataError(f"leaf {leaf}: the tree has {self.capacity}")
        if not 0 <= priority < np.inf:
            raise DataError(f"priority: {priority} must be finite and at least 0")
        node = self.leaves + leaf
        self.nodes[node] = priority
        while node > 1:
            node //= 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find_leaf(self, mass: float) -> int:
        """The leaf l with sum(priorities before l) <= mass < that sum + priority of l; never one of priority 0.

        Args:
            mass: 0 to `total`; rounding may take it to the total, which belongs to the last leaf with a priority.
        Raises: DataError where all priorities are 0.
        """
        if self.total <= 0:
            raise DataError("nothing can be drawn: all priorities are 0")
        node = 1
        while node < self.leaves:
            left = float(self.nodes[2 * node])
            if mass < left or self.nodes[2 * node + 1] <= 0:
                node = 2 * node
            else:
                mass -= left
                node = 2 * node + 1
        return node - self.leaves

    def state_dict(self) -> dict[str, Any]:
        """The priorities."""
        return {"priorities": self.priorities.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Raises: DataError for another capacity."""
        priorities = np.asarray(state["priorities"], dtype=np.float64)
        if priorities.shape != (self.capacity,):
            raise DataError(f"priorities: {priorities.shape}, the tree has {self.capacity} leaves")
        self.priorities[:] = priorities
        for node in range(self.leaves - 1, 0, -1):
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]


_NUM_NEWEST_TIMES = 9  # experiences whose median time is the present, so that a clock that jumps for a moment evicts nothing
_MAX_LOG_SHARE = (
    0.5  # of the log's bytes that the buffer may reach back over, where segments are removed
)


@dataclass(slots=True)
class BufferedExperience:
    """An experience in the buffer, with what is known of it by now."""

    number: int  # of its record in the log
    experience: Experience
    digest: str = ""  # of its record
    position: int = 0  # bytes of all records up to this one
    label: Label | None = None  # None = nothing to learn from yet
    times_learned: int = 0
    agreed: bool | None = (
        None  # feedback agreed with the consensus; None = it did not tell, or there was none
    )


@dataclass(frozen=True, slots=True)
class BufferSample:
    """Experiences drawn for an update."""

    experiences: tuple[BufferedExperience, ...]  # [n] an experience may be drawn twice
    weights: tuple[float, ...]  # [n] importance weights, the largest is 1


def compute_sampling_beta(update: int, *, start: float, updates: int) -> float:
    """Exponent of the importance weights: from `start` to 1, linearly over `updates`. Source: arXiv:1511.05952."""
    return start + (1.0 - start) * min(1.0, update / updates)


def compute_importance_weights(
    probabilities_N: Sequence[float], count: int, beta: float
) -> list[float]:
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
        self.slots: dict[int, BufferedExperience] = {}
        self.slot_of: dict[str, int] = {}  # by request
        self.errors: dict[int, float] = {}  # by slot
        self.largest_error = 1.0
        self.newest_times: deque[float] = deque(maxlen=_NUM_NEWEST_TIMES)
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

    def find_experience(self, request_id: str) -> BufferedExperience | None:
        """The experience of a request; None = it is not here, or no longer."""
        slot = self.slot_of.get(request_id)
        return None if slot is None else self.slots[slot]

    def add_experience(
        self,
        number: int,
        experience: Experience,
        label: Label | None,
        *,
        version: int,
        digest: str = "",
        position: int = 0,
    ) -> bool:
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
        self.evict_outdated(version)
        kept = BufferedExperience(number, experience, digest, position)
        if self._find_eviction_reason(kept, version):
            self.evicted["late"] += 1
            return False
        if self._count_of_caller(experience.caller) >= self.caller_cap:
            self._evict_slot(self._find_eviction_slot(experience.caller), "caller")
        elif not self._free:
            self._evict_slot(self._find_eviction_slot(None), "priority")
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
        slots = [
            s
            for s, kept in self.slots.items()
            if kept.label is not None and kept.label.source == source
        ]
        for slot in slots:
            self.slots[slot].label = None
            self.tree.set_priority(slot, 0.0)
        return len(slots)

    def sample_experiences(self, count: int, beta: float, rng: np.random.Generator) -> BufferSample:
        """`count` experiences, one from each of `count` equal parts of the total priority.

        Raises: DataError where none has a label.
        """
        total = self.tree.total
        masses = (np.arange(count) + rng.random(count)) * (total / count)
        slots = [self.tree.find_leaf(float(mass)) for mass in masses]
        probabilities = [float(self.tree.priorities[slot]) / total for slot in slots]
        weights = compute_importance_weights(probabilities, self.num_drawable, beta)
        return BufferSample(tuple(self.slots[slot] for slot in slots), tuple(weights))

    def record_error(self, request_id: str, error: float) -> None:
        """Note the error of an experience after an update. Raises: DataError for one that is no error."""
        if not 0 <= error < math.inf:
            raise DataError(f"error: {error} must be finite and at least 0")
        slot = self.slot_of.get(request_id)
        if slot is not None:
            self.slots[slot].times_learned += 1
            self.largest_error = max(self.largest_error, error)
            self._set_error(slot, error)

    def evict_outdated(self, version: int) -> None:
        """Drop every experience that is too old or too stale. Args: version: of the policy that answers."""
        for slot in sorted(self.slots):
            if reason := self._find_eviction_reason(self.slots[slot], version):
                self._evict_slot(slot, reason)

    def collect_referenced_versions(self) -> set[int]:
        """Policy versions that sampled an experience which is still here."""
        return {kept.experience.policy_version for kept in self.slots.values()}

    def count_longest_answer_tokens(self) -> int:
        """Tokens of the longest answer that is here, those of an environment's turns included; 0 for none."""
        rollouts = (rollout for kept in self.slots.values() for rollout in kept.experience.rollouts)
        return max((len(rollout.completion_ids) for rollout in rollouts), default=0)

    def find_first_number(self) -> int | None:
        """The smallest record number that is still here."""
        return min((kept.number for kept in self.slots.values()), default=None)

    def compute_metrics(self) -> dict[str, float]:
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
        return found | {
            f"online/evicted/{reason}": float(count)
            for reason, count in sorted(self.evicted.items())
        }

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
            "labels": [_encode_label(self.slots[slot].label) for slot in slots],
            "errors": [self.errors[slot] for slot in slots],
            "free": list(self._free),
            "largest_error": self.largest_error,
            "newest_times": list(self.newest_times),
            "newest_position": self.newest_position,
            "evicted": dict(self.evicted),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], experiences: Mapping[int, Experience]
    ) -> None:
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
        self.largest_error, self.newest_position = (
            float(state["largest_error"]),
            int(state["newest_position"]),
        )
        self.newest_times.extend(state["newest_times"])
        self.evicted.update(state["evicted"])
        names = (
            "slots",
            "numbers",
            "digests",
            "positions",
            "labels",
            "times_learned",
            "agreed",
            "errors",
        )
        for slot, number, digest, position, label, times, agreed, error in zip(
            *(state[n] for n in names), strict=True
        ):
            experience = experiences[number]
            found = Label.from_json(label) if label is not None else None
            self.slots[slot] = BufferedExperience(
                number, experience, digest, position, found, times, agreed
            )
            self.slot_of[experience.request_id] = slot
            self.errors[slot] = error
            if found is not None:
                self._set_error(slot, error)

    def _find_eviction_reason(self, kept: BufferedExperience, version: int) -> str:
        settings, experience = self.settings, kept.experience
        if self.now - experience.time > settings.max_age_s:
            return "age"
        if version - experience.policy_version > settings.max_staleness:
            return "staleness"
        # one experience that is never evicted would hold all segments after its own, until the log takes nothing more
        is_far = self.newest_position - kept.position > settings.max_bytes * _MAX_LOG_SHARE
        return "log" if is_far and not settings.keep_segments else ""

    def _count_of_caller(self, caller: str) -> int:
        return sum(kept.experience.caller == caller for kept in self.slots.values())

    def _find_eviction_slot(self, caller: str | None) -> int:
        """Slot of the experience to go (of a caller): by error, then by age.

        Those without a label go first where they have more than `waiting_share` of the room. The rest of them stay: a
        label comes later than its answer.
        """
        slots = [
            s
            for s, kept in self.slots.items()
            if caller is None or kept.experience.caller == caller
        ]
        room = self.settings.capacity if caller is None else self.caller_cap
        waiting = [s for s in slots if self.slots[s].label is None]
        labelled = [s for s in slots if self.slots[s].label is not None]
        chosen = (
            waiting
            if len(waiting) > room * self.settings.waiting_share or not labelled
            else labelled
        )
        return min(chosen, key=lambda s: (self.errors[s], self.slots[s].number))

    def _evict_slot(self, slot: int, reason: str) -> None:
        kept = self.slots.pop(slot)
        del self.slot_of[kept.experience.request_id], self.errors[slot]
        self.tree.set_priority(slot, 0.0)
        self._free.append(slot)
        self.evicted[reason] += 1

    def _set_error(self, slot: int, error: float) -> None:
        self.errors[slot] = error
        self.tree.set_priority(
            slot, (error + self.settings.priority_floor) ** self.settings.priority_exponent
        )


def _encode_label(label: Label | None) -> dict[str, Any] | None:
    return None if label is None else label.to_json()
