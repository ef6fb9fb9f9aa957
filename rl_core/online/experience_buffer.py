"""Experience buffer in the worker's memory: prioritised sampling, eviction, caps per caller.

`experience_log` is the record on disk. Nothing here reads a clock: ages are relative to the newest experiences,
staleness to the version that answers. So the content depends only on the records and their order.

Source: Schaul et al. 2015, arXiv:1511.05952 (appendix B.2.1 for the sum tree).
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

# The median time of this many newest experiences is "now", so that a brief clock jump evicts nothing.
_NUM_NEWEST_TIMES = 9
# If segments are removed, the buffer may refer to this share of the log's bytes.
_MAX_LOG_SHARE = 0.5


class SumTree:
    """Sum tree over non-negative priorities of numbered leaves: sampling and updates in logarithmic time.

    A parent is always recomputed as the sum of its two children, never adjusted by a difference. So rounding errors do
    not
    accumulate, and equal priorities give equal trees whatever happened before.
    Source: Schaul et al. 2015, arXiv:1511.05952, appendix B.2.1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise DataError(f"capacity: {capacity} must be at least 1")
        self.capacity = capacity
        self.leaves = 1 << (capacity - 1).bit_length()
        # Node i has the children 2 i and 2 i + 1; leaf l is node leaves + l.
        self.nodes = np.zeros(2 * self.leaves)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self.nodes[1])

    @property
    def priorities(self) -> NDArray[np.float64]:
        """Priorities by leaf (a view)."""
        leaves: NDArray[np.float64] = self.nodes[self.leaves : self.leaves + self.capacity]
        return leaves

    def set_priority(self, leaf: int, priority: float) -> None:
        """Set one priority. Raises: DataError for an invalid leaf or priority."""
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
        """Return the leaf l with sum(priorities before l) <= mass < that sum + priority of l; never one of priority 0.

        Args:
            mass: 0 to `total`; if rounding makes it equal the total, it belongs to the last leaf with a priority.
        Raises: DataError if all priorities are 0.
        """
        if self.total <= 0:
            raise DataError("cannot sample: all priorities are 0")
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
        """Return the priorities."""
        return {"priorities": self.priorities.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; inverse of `state_dict`. Raises: DataError for a different capacity."""
        priorities = np.asarray(state["priorities"], dtype=np.float64)
        if priorities.shape != (self.capacity,):
            raise DataError(f"priorities: {priorities.shape}, the tree has {self.capacity} leaves")
        self.priorities[:] = priorities
        for node in range(self.leaves - 1, 0, -1):
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]


@dataclass(slots=True)
class BufferedExperience:
    """Experience in the buffer, and what is known about it so far."""

    number: int  # of its record in the log
    experience: Experience
    digest: str = ""  # of its record
    position: int = 0  # bytes of all records up to and including this one
    label: Label | None = None  # None until it can be learned from
    times_learned: int = 0
    agreed: bool | None = None  # whether feedback agreed with the consensus; None = unknown


@dataclass(frozen=True, slots=True)
class BufferSample:
    """Experiences drawn for an update."""

    experiences: tuple[BufferedExperience, ...]  # [n] an experience can be drawn twice
    weights: tuple[float, ...]  # [n] importance weights, the largest is 1


def compute_sampling_beta(update: int, *, start: float, updates: int) -> float:
    """Return the exponent of the importance weights: linear from `start` to 1 over `updates`.

    Source: arXiv:1511.05952.
    """
    return start + (1.0 - start) * min(1.0, update / updates)


def compute_importance_weights(
    probabilities_N: Sequence[float], count: int, beta: float
) -> list[float]:
    """Return (count p_i)^-beta divided by the largest.

    Args:
        count: experiences that could be drawn.
    Source: arXiv:1511.05952.
    """
    raw = [(count * p) ** -beta for p in probabilities_N]
    return [value / max(raw) for value in raw]


class ExperienceBuffer:
    """Buffer of at most `capacity` experiences.

    Those with a label can be drawn, in proportion to (error + floor)^alpha. A new or newly labelled experience gets the
    largest error seen so far, so that it is drawn soon.
    """

    def __init__(self, settings: OnlineBufferSettings) -> None:
        self.settings = settings
        self.tree = SumTree(settings.capacity)
        self.slots: dict[int, BufferedExperience] = {}
        self.slots_by_request: dict[str, int] = {}
        self.errors: dict[int, float] = {}  # by slot
        self.largest_error = 1.0
        self.newest_times: deque[float] = deque(maxlen=_NUM_NEWEST_TIMES)
        self.newest_position = 0
        self.evicted: Counter[str] = Counter()  # by reason
        self._free_slots = list(range(settings.capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_drawable(self) -> int:
        """Number of experiences with a label."""
        return sum(buffered.label is not None for buffered in self.slots.values())

    @property
    def now(self) -> float:
        """Time that ages are relative to: the (upper) median of the newest experiences' times."""
        if not self.newest_times:
            return 0.0
        return sorted(self.newest_times)[len(self.newest_times) // 2]

    @property
    def caller_cap(self) -> int:
        """Maximum number of experiences of one caller."""
        return max(1, math.floor(self.settings.capacity * self.settings.max_caller_share))

    def find_experience(self, request_id: str) -> BufferedExperience | None:
        """Return the experience of a request, or None if it is not in the buffer."""
        slot = self.slots_by_request.get(request_id)
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
        """Add an experience, after evicting what is too old, too stale, or above a cap.

        Args:
            version: of the answering policy, for staleness.
            digest: of the record.
            position: bytes of all records up to and including this one.
        Returns: False if the request is already in the buffer, or the experience itself is too old or too stale.
        """
        if experience.request_id in self.slots_by_request:
            self.evicted["repeated"] += 1
            return False
        self.newest_times.append(experience.time)
        self.newest_position = max(self.newest_position, position)
        self.evict_outdated(version)
        buffered = BufferedExperience(number, experience, digest, position)
        if self._find_eviction_reason(buffered, version):
            self.evicted["late"] += 1
            return False
        if self._count_for_caller(experience.caller) >= self.caller_cap:
            self._evict_slot(self._find_eviction_slot(experience.caller), "caller")
        elif not self._free_slots:
            self._evict_slot(self._find_eviction_slot(None), "priority")
        slot = self._free_slots.pop()
        self.slots[slot] = buffered
        self.slots_by_request[experience.request_id] = slot
        self.errors[slot] = self.largest_error
        if label is not None:
            self.set_label(experience.request_id, label)
        return True

    def set_label(self, request_id: str, label: Label) -> None:
        """Set the label of an experience; from now on it can be drawn, with the largest priority."""
        slot = self.slots_by_request[request_id]
        self.slots[slot].label = label
        self._set_error(slot, self.largest_error)

    def drop_labels(self, source: LabelSource) -> int:
        """Remove the labels of a source and return their number. Those experiences wait for another label."""
        slots = [
            slot
            for slot, buffered in self.slots.items()
            if buffered.label is not None and buffered.label.source == source
        ]
        for slot in slots:
            self.slots[slot].label = None
            self.tree.set_priority(slot, 0.0)
        return len(slots)

    def sample_experiences(self, count: int, beta: float, rng: np.random.Generator) -> BufferSample:
        """Draw `count` experiences, one from each of `count` equal parts of the total priority.

        Raises: DataError if none has a label.
        """
        total = self.tree.total
        masses = (np.arange(count) + rng.random(count)) * (total / count)
        slots = [self.tree.find_leaf(float(mass)) for mass in masses]
        probabilities = [float(self.tree.priorities[slot]) / total for slot in slots]
        weights = compute_importance_weights(probabilities, self.num_drawable, beta)
        return BufferSample(tuple(self.slots[slot] for slot in slots), tuple(weights))

    def record_error(self, request_id: str, error: float) -> None:
        """Record the error of an experience after an update. Raises: DataError for an invalid error."""
        if not 0 <= error < math.inf:
            raise DataError(f"error: {error} must be finite and at least 0")
        slot = self.slots_by_request.get(request_id)
        if slot is not None:
            self.slots[slot].times_learned += 1
            self.largest_error = max(self.largest_error, error)
            self._set_error(slot, error)

    def evict_outdated(self, version: int) -> None:
        """Evict every experience that is too old or too stale.

        Args:
            version: of the answering policy.
        """
        for slot in sorted(self.slots):
            reason = self._find_eviction_reason(self.slots[slot], version)
            if reason:
                self._evict_slot(slot, reason)

    def collect_referenced_versions(self) -> set[int]:
        """Return the policy versions that sampled an experience in the buffer."""
        return {buffered.experience.policy_version for buffered in self.slots.values()}

    def count_longest_answer_tokens(self) -> int:
        """Return the tokens of the longest answer, including the environment's turns; 0 for an empty buffer."""
        lengths = (
            len(rollout.completion_ids)
            for buffered in self.slots.values()
            for rollout in buffered.experience.rollouts
        )
        return max(lengths, default=0)

    def find_first_number(self) -> int | None:
        """Return the smallest record number in the buffer."""
        return min((buffered.number for buffered in self.slots.values()), default=None)

    def compute_metrics(self) -> dict[str, float]:
        """Return size, share of the largest caller, ages and evictions by reason."""
        experiences = [buffered.experience for buffered in self.slots.values()]
        by_caller = Counter(experience.caller for experience in experiences)
        ages = [max(0.0, self.now - experience.time) for experience in experiences]
        metrics = {
            "online/buffer_size": float(len(self.slots)),
            "online/buffer_drawable": float(self.num_drawable),
            "online/buffer_callers": float(len(by_caller)),
            "online/buffer_largest_caller": max(by_caller.values(), default=0)
            / max(1, len(self.slots)),
            "online/buffer_age_max_seconds": max(ages, default=0.0),
            "online/buffer_age_mean_seconds": math.fsum(ages) / max(1, len(ages)),
        }
        for reason, count in sorted(self.evicted.items()):
            metrics[f"online/evicted/{reason}"] = float(count)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the experiences, which are in the log under their numbers."""
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
            "free": list(self._free_slots),
            "largest_error": self.largest_error,
            "newest_times": list(self.newest_times),
            "newest_position": self.newest_position,
            "evicted": dict(self.evicted),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], experiences: Mapping[int, Experience]
    ) -> None:
        """Load a state; inverse of `state_dict`.

        Args:
            experiences: by record number; all that the state refers to.
        Raises: DataError if one is missing.
        """
        missing = [number for number in state["numbers"] if number not in experiences]
        if missing:
            raise DataError(
                f"the buffer's record {missing[0]} is missing, and {len(missing) - 1} more; the log was changed"
            )
        self.__init__(self.settings)  # type: ignore[misc]
        self._free_slots = list(state["free"])
        self.largest_error = float(state["largest_error"])
        self.newest_position = int(state["newest_position"])
        self.newest_times.extend(state["newest_times"])
        self.evicted.update(state["evicted"])
        rows = zip(
            state["slots"],
            state["numbers"],
            state["digests"],
            state["positions"],
            state["labels"],
            state["times_learned"],
            state["agreed"],
            state["errors"],
            strict=True,
        )
        for slot, number, digest, position, label_row, times, agreed, error in rows:
            experience = experiences[number]
            label = Label.from_json(label_row) if label_row is not None else None
            self.slots[slot] = BufferedExperience(
                number, experience, digest, position, label, times, agreed
            )
            self.slots_by_request[experience.request_id] = slot
            self.errors[slot] = error
            if label is not None:
                self._set_error(slot, error)

    def _find_eviction_reason(self, buffered: BufferedExperience, version: int) -> str:
        settings, experience = self.settings, buffered.experience
        if self.now - experience.time > settings.max_age_s:
            return "age"
        if version - experience.policy_version > settings.max_staleness:
            return "staleness"
        # An experience that is never evicted would keep all later segments, until the log is full.
        is_far = self.newest_position - buffered.position > settings.max_bytes * _MAX_LOG_SHARE
        return "log" if is_far and not settings.keep_segments else ""

    def _count_for_caller(self, caller: str) -> int:
        return sum(buffered.experience.caller == caller for buffered in self.slots.values())

    def _find_eviction_slot(self, caller: str | None) -> int:
        """Return the slot of the experience (of a caller) to evict: the one with the smallest error, then the oldest.

        Experiences without a label are evicted first if they use more than `waiting_share` of the capacity. Otherwise
        they
        stay, because labels arrive later than answers.
        """
        slots = [
            slot
            for slot, buffered in self.slots.items()
            if caller is None or buffered.experience.caller == caller
        ]
        capacity = self.settings.capacity if caller is None else self.caller_cap
        waiting = [slot for slot in slots if self.slots[slot].label is None]
        labelled = [slot for slot in slots if self.slots[slot].label is not None]
        has_many_waiting = len(waiting) > capacity * self.settings.waiting_share
        candidates = waiting if has_many_waiting or not labelled else labelled
        return min(candidates, key=lambda slot: (self.errors[slot], self.slots[slot].number))

    def _evict_slot(self, slot: int, reason: str) -> None:
        buffered = self.slots.pop(slot)
        del self.slots_by_request[buffered.experience.request_id], self.errors[slot]
        self.tree.set_priority(slot, 0.0)
        self._free_slots.append(slot)
        self.evicted[reason] += 1

    def _set_error(self, slot: int, error: float) -> None:
        self.errors[slot] = error
        base = error + self.settings.priority_floor
        self.tree.set_priority(slot, base**self.settings.priority_exponent)


def _encode_label(label: Label | None) -> dict[str, Any] | None:
    return None if label is None else label.to_json()
