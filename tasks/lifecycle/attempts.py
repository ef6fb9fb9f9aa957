"""Attempts at the promotion gate, counted by the held-out episodes that they share.

Every comparison of a challenger with a champion is one attempt. It is a tag of the registered model, so it is there for
every run, process and pipeline that promotes this model, and stays when versions are removed:

    gate.attempt.<id>    JSON: the fields of `Attempt`; episodes as one text of digests

The id is a digest of both models and of the outcomes of all their episodes. A comparison that is made again (a cached,
resumed or repeated stage) has the same id, so it is counted once; other weights, another champion or other outcomes on
the same episodes make a new attempt. Claims come before counting: of two processes that claim at the same time at least
one sees the other, so no two get a lower number than they should.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rl_core.evaluation import Evaluation
from rl_core.storage.faults import fault
from tasks.tracking import Tracking

__all__ = ["Attempt", "attempt_of", "claim", "comparison_id", "earlier", "episodes_sketch", "note", "read_attempts"]

logger = logging.getLogger(__name__)

PREFIX = "gate.attempt."
DIGITS = 8  # of the digest of an episode
SKETCH = 128  # digests kept of a set of episodes: two sets that share a twentieth of their union are noticed for sure


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One comparison of a challenger with a champion."""

    id: str
    comparison: str  # of these two models, whatever the episodes
    draw: int  # of the held-out episodes
    episodes: tuple[str, ...]  # sketch of them
    version: int  # challenger
    champion: int
    number: int | None = None  # among the attempts that share episodes, from 1; None = claimed, not counted yet
    level: float | None = None  # that it was tested at
    p_value: float | None = None
    decision: str = ""

    def shares_episodes(self, episodes: Iterable[str]) -> bool:
        """True = it was made on some of these episodes (given as a sketch)."""
        return not set(self.episodes).isdisjoint(episodes)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def comparison_id(challenger: str, champion: str) -> str:
    """Name of a comparison of two models, by the digests of their weights."""
    return _digest(challenger, champion)


def episodes_sketch(environment: str, keys: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The `SKETCH` smallest digests of the episodes (level, seed): two sketches meet where the sets overlap.

    Source: Broder 1997, On the resemblance and containment of documents (bottom-k sketches).
    """
    found = (hashlib.sha256(f"{environment}/{level}/{seed}".encode()).hexdigest()[:DIGITS] for level, seed in keys)
    return tuple(sorted(set(found))[:SKETCH])


def attempt_of(
    environment: str, comparison: str, draw: int, *, version: int, champion: int, ours: Evaluation, theirs: Evaluation
) -> Attempt:
    """The attempt that these two evaluations are. `ours`: the challenger's."""
    outcomes = [
        sorted([e.level, e.seed, e.samples, e.successes, e.reward] for e in found.episodes) for found in (ours, theirs)
    ]
    return Attempt(
        id=_digest(comparison, environment, outcomes),
        comparison=comparison,
        draw=draw,
        episodes=episodes_sketch(environment, (episode.key for episode in ours.episodes)),
        version=version,
        champion=champion,
    )


def read_attempts(tracking: Tracking, name: str) -> list[Attempt]:
    """All attempts of a registered model, in the order of their ids. A tag that cannot be read is passed over."""
    found = []
    for key, value in sorted(tracking.model_tags(name).items()):
        if not key.startswith(PREFIX):
            continue
        try:
            row = json.loads(value)
            digits = str(row["episodes"])
            sketch = tuple(digits[start : start + DIGITS] for start in range(0, len(digits), DIGITS))
            found.append(Attempt(**{**row, "episodes": sketch}, id=key.removeprefix(PREFIX)))
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("registered model %s: tag %s is no attempt at its gate: %s", name, key, error)
    return found


def earlier(attempts: Iterable[Attempt], attempt: Attempt) -> list[Attempt]:
    """Other attempts that share episodes with `attempt` and came before it, the first one first."""
    mine = attempt.number or float("inf")
    shared = [a for a in attempts if a.id != attempt.id and a.shares_episodes(attempt.episodes)]
    return sorted((a for a in shared if (a.number or float("inf")) <= mine), key=lambda a: (a.number or 0, a.id))


def claim(tracking: Tracking, name: str, attempt: Attempt) -> Attempt:
    """The attempt with its number, which is recorded now unless it was before."""
    recorded = {found.id: found for found in read_attempts(tracking, name)}
    known = recorded.get(attempt.id)
    if known is not None and known.number is not None:
        return dataclasses.replace(known, version=attempt.version, champion=attempt.champion)
    note(tracking, name, attempt)
    fault("attempt.claimed")
    others = [a for a in read_attempts(tracking, name) if a.id != attempt.id and a.shares_episodes(attempt.episodes)]
    counted = dataclasses.replace(attempt, number=1 + len(others))
    note(tracking, name, counted)
    fault("attempt.counted")
    return counted


def note(tracking: Tracking, name: str, attempt: Attempt) -> None:
    """Record an attempt as it stands."""
    row = {key: value for key, value in dataclasses.asdict(attempt).items() if key != "id" and value is not None}
    row["episodes"] = "".join(row.pop("episodes"))  # last, as it is nothing to read
    tracking.tag_model(name, PREFIX + attempt.id, json.dumps(row))
