"""Tickets: episodes on their way from the trainer to a worker and back, one group each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.environments.step_pool import StepPool
from rl_core.inference.versioned_run import VersionStarts
from rl_core.rollouts.collect import EpisodeRequest, GroupPlan, Renderer, begin_group, make_group
from rl_core.rollouts.episode_sequence import EpisodeSequence
from rl_core.settings import SamplingSettings
from rl_core.types import Rollout, RolloutGroup

__all__ = ["FinishedTicket", "Ticket", "TicketGroup", "VersionedEpisode", "oldest_version", "token_versions"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """One group to play. Its number decides its random numbers, so it is the same group wherever it is played."""

    number: int
    request: EpisodeRequest
    group_size: int
    temperature: float
    seed: int  # of the sampling
    plays: int = 0  # times that it was given up as too old before

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {**dataclasses.asdict(self), "seed": str(self.seed)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Ticket:
        """Inverse of `to_json`."""
        return cls(**{**row, "request": EpisodeRequest(**row["request"]), "seed": int(row["seed"])})


@dataclass(frozen=True, slots=True)
class FinishedTicket:
    """A ticket's group, and its episodes that failed."""

    ticket: Ticket
    group: RolloutGroup
    failed: list[FailedEpisode]


class VersionedEpisode(EpisodeSequence):
    """An episode that notes the versions of the weights that it was sampled with."""

    def __init__(self, *arguments: Any) -> None:
        self.version_starts: VersionStarts = []
        super().__init__(*arguments)


class TicketGroup:
    """The sequences of one ticket; those that are dropped are begun anew, each for itself."""

    def __init__(
        self, ticket: Ticket, environment: Environment, renderer: Renderer, sampling: SamplingSettings,
        pool: StepPool | None, max_length: int,
    ) -> None:  # fmt: skip
        """Begin the ticket's episodes. Raises: as `rollouts.collect.begin_group`."""
        self.ticket, self.failed = ticket, list[FailedEpisode]()
        self._max_length = max_length
        own = dataclasses.replace(sampling, temperature=ticket.temperature)
        self._make: Callable[[], list[VersionedEpisode]] = lambda: make_group(
            environment, renderer, GroupPlan(ticket.request, 0), ticket.group_size, own, pool, ticket.seed,
            self.failed.append, VersionedEpisode,
        )  # fmt: skip
        self.sequences = self._make()
        begin_group(self.sequences, max_length)

    def again(self, sequence: VersionedEpisode) -> VersionedEpisode:
        """The same episode from its beginning, in place of this one."""
        place = self.sequences.index(sequence)
        sequence.close()
        made = self._make()
        for index, other in enumerate(made):
            if index != place:
                other.close()
        made[place].begin(self._max_length)
        self.sequences[place] = made[place]
        return made[place]

    @property
    def is_over(self) -> bool:
        """True = every episode has ended or failed."""
        return all(sequence.has_failed or sequence.is_over for sequence in self.sequences)

    def finished(self) -> FinishedTicket:
        """The group, closed."""
        rollouts = []
        for sequence in self.sequences:
            sequence.close()
            if not sequence.has_failed:
                rollout = sequence.rollout(min(version for _, version in sequence.version_starts))
                rollout.version_starts = sequence.version_starts
                rollouts.append(rollout)
        return FinishedTicket(self.ticket, RolloutGroup(rollouts), self.failed)


def token_versions(rollout: Rollout) -> list[int]:
    """Version that each sampled token was drawn under."""
    sampled, versions = sum(rollout.loss_mask), list[int]()
    starts = [*rollout.version_starts, (sampled, 0)]
    for (start, version), (end, _) in pairwise(starts):
        versions += [version] * (min(end, sampled) - min(start, sampled))
    return versions


def oldest_version(rollouts: Sequence[Rollout], default: int) -> int:
    """Oldest version that any of the rollouts was begun or sampled with."""
    return min((version for rollout in rollouts for _, version in rollout.version_starts), default=default)
