"""Demonstrations out of a recorded buffer: the episodes that were right under their label, as conversations.

For a retraining: a file of them is new data of `prepare_data.demonstrations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.environments.environment import Environment
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.online.experience import Experience
from rl_core.online.experience_log import LogReader
from rl_core.online.labelled_rewards import labelled_rollouts
from rl_core.online.labels import Label, prevailing, pseudo_label
from rl_core.settings import OnlineLabelSettings
from rl_core.types import Trajectory

__all__ = ["demonstrations", "labelled_experiences"]


def labelled_experiences(log: Path, settings: OnlineLabelSettings) -> Iterator[tuple[Experience, Label]]:
    """Experiences of a log with the label that counts in the end, as the worker chooses it."""
    found: dict[str, tuple[Experience, Label | None]] = {}
    for record in LogReader(log).read():
        try:
            if record.kind == "experience":
                experience = record.experience()
                first = None
                if settings.use_consensus:
                    first = pseudo_label(
                        experience.vote, min_confidence=settings.min_confidence, min_votes=settings.min_votes,
                        confidence=settings.confidence,
                    )  # fmt: skip
                if first is None and settings.trust_environment:
                    first = Label("played", "environment")
                found.setdefault(experience.request_id, (experience, first))
            elif record.kind == "label" and (entry := found.get(record.value["request_id"])) is not None:
                found[record.value["request_id"]] = (entry[0], prevailing(entry[1], record.label()[1]))
        except (DataError, KeyError, TypeError):  # the worker leaves it out as well
            continue
    yield from ((experience, label) for experience, label in found.values() if label is not None)


def demonstrations(log: Path, settings: OnlineLabelSettings, environment: Environment) -> Iterator[dict[str, Any]]:
    """One right episode of each request: its messages, `request_id`, and the label's source.

    Raises: DataError where the log holds no experience of this environment that was right.
    """
    count = 0
    for experience, label in labelled_experiences(log, settings):
        try:
            rollouts = labelled_rollouts(experience, label, environment)
            best = next((r.trajectory for r in rollouts if r is not None and r.success and not r.is_truncated), None)
            if best is None:
                continue
            messages = _conversation(environment, best)
        except (DataError, EnvironmentFault, SettingsError):
            continue
        count += 1
        yield {"messages": messages, "request_id": experience.request_id, "label": label.source}
    if not count:
        raise DataError(f"{log}: holds no episode of environment '{environment.name}' that is right under its label")


def _conversation(environment: Environment, played: Trajectory) -> list[dict[str, Any]]:
    """The messages of an episode, played again."""
    episode = environment.episode(seed=played.seed, level=played.level)
    try:
        messages: list[dict[str, Any]] = [dict(message) for message in episode.reset()]
        for turn in played.turns:
            messages.append({"role": "assistant", "content": turn.action})
            step = episode.step(turn.action)
            if step.terminated or step.truncated:
                break
            messages += [dict(message) for message in step.messages]
    finally:
        episode.close()
    return messages
