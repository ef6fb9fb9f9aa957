"""Demonstrations out of a recorded buffer: episodes and chat answers that were right under their label.

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
from rl_core.types import Conversation, Trajectory

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


def demonstrations(
    log: Path, settings: OnlineLabelSettings, environment: Environment | None
) -> Iterator[dict[str, Any]]:
    """One right answer of each request: its messages, `tools` where it had some, `request_id`, the label's source.

    In a conversation the answer alone is imitated: earlier turns of the assistant have weight 0.

    Args:
        environment: whose episodes were served; None = conversations.
    Raises: DataError where the log holds nothing of this environment that was right.
    """
    count = 0
    for experience, label in labelled_experiences(log, settings):
        try:
            rollouts = labelled_rollouts(experience, label, environment)
            best = next((r.trajectory for r in rollouts if r is not None and r.success and not r.is_truncated), None)
            if best is None:
                continue
            row = _answered(experience.conversation, best) if environment is None else _episode(environment, best)
        except (DataError, EnvironmentFault, SettingsError, KeyError, TypeError):  # of values of another type
            continue
        count += 1
        yield {**row, "request_id": experience.request_id, "label": label.source}
    if not count:
        what = "conversation" if environment is None else f"episode of environment '{environment.name}'"
        raise DataError(f"{log}: holds no {what} that is right under its label")


def _answered(conversation: Conversation | None, answer: Trajectory) -> dict[str, Any]:
    """A conversation with the answer at its end."""
    if conversation is None:
        raise DataError("was recorded without its messages, or is an episode")
    earlier = [
        {**message, "weight": 0} if message["role"] == "assistant" else dict(message)
        for message in conversation.messages
    ]
    row: dict[str, Any] = {"messages": [*earlier, {"role": "assistant", "content": answer.turns[-1].action}]}
    return {**row, "tools": conversation.tools} if conversation.tools else row


def _episode(environment: Environment, played: Trajectory) -> dict[str, Any]:
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
    return {"messages": messages}
