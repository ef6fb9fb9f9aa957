"""Answers of one or two models to the same episodes, as items to rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flows.serving.served_model import ModelPlace
from rl_core.api.policy import load_policy
from rl_core.environments.environment import Environment
from rl_core.errors import DataError
from rl_core.preferences.items import Answer, RatedItem, answer_of
from rl_core.rollouts.collect import EpisodeRequest, collect
from rl_core.rollouts.training_seeds import SeedOrders
from rl_core.settings import RatingSettings, SamplingSettings, resolve_defaults
from rl_core.types import Message, Trajectory
from tasks.config import PipelineSettings
from tasks.stages.loading import make_environment

__all__ = ["NamedModel", "find_models", "sampled_items"]

TOGETHER = 64  # episodes played at a time


@dataclasses.dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that answers, and the name under which its answers are kept."""

    name: str  # with its version
    place: Path | str


def find_models(settings: PipelineSettings, rating: RatingSettings, output: Path) -> list[NamedModel]:
    """The models that answer. Raises: SettingsError naming one that is not there; BackendError."""
    found = []
    for reference in rating.models or (f"models:/{settings.registered_model}@champion",):
        place = ModelPlace(reference, output, settings.tracking.uri, other="--set 'prefer.models=[FOLDER]'")
        version = place.find()
        found.append(NamedModel(version.reference if version is not None else reference, place.folder(version)))
    return found


def sampled_items(
    settings: PipelineSettings, rating: RatingSettings, models: Sequence[NamedModel], say: Callable[[str], None]
) -> list[RatedItem]:
    """Items of `rating.prompts` training episodes; pairs with equal answers are left out.

    Raises: SettingsError, ModelError; EnvironmentFault; DataError if all pairs have equal answers.
    """
    environment = make_environment(settings, None)
    requests = _requests(environment, rating, settings.seed)
    number = 2 if rating.ask == "pairs" and len(models) == 1 else 1
    columns: list[tuple[str, list[Trajectory | None]]] = []  # model, and its answer to each request
    for model in models:
        say(f"{model.name} answers {len(requests)} episodes{' twice' if number == 2 else ''}")
        played = _play(environment, settings, rating.sampling, model, requests, number)
        columns += [(model.name, [group[sample] for group in played]) for sample in range(number)]
    items: dict[str, RatedItem] = {}
    equal = 0
    for row, request in enumerate(requests):
        answers = [(name, answer_of(found)) for name, column in columns if (found := column[row]) is not None]
        equal += len(answers) == 2 and answers[0][1] == answers[1][1]
        prompt = _prompt(environment.episode(request.seed, request.level).reset())
        about = {"environment": environment.name, "level": request.level, "seed": request.seed}
        for item in _as_items(prompt, answers, about, rating):
            items.setdefault(item.id, item)
    if not items:
        raise DataError(
            "all answers to an episode are equal, so there is nothing to compare; name two models in prefer.models, or "
            "raise prefer.sampling.temperature"
        )
    if equal and rating.ask == "pairs":
        more = "; for more, name two models in prefer.models, or raise prefer.sampling.temperature"
        say(
            f"{equal} of {len(requests)} pairs are left out: their answers are equal"
            f"{more if 2 * equal > len(requests) else ''}"
        )
    return list(items.values())


def _as_items(
    prompt: Answer, answers: Sequence[tuple[str, Answer]], about: dict[str, Any], rating: RatingSettings
) -> list[RatedItem]:
    if rating.ask != "pairs":
        return [RatedItem(prompt, (answer,), (name,), about) for name, answer in answers]
    if len(answers) != 2 or answers[0][1] == answers[1][1]:
        return []
    return [RatedItem(prompt, (answers[0][1], answers[1][1]), (answers[0][0], answers[1][0]), about)]


def _requests(environment: Environment, rating: RatingSettings, seed: int) -> list[EpisodeRequest]:
    """Training episodes of the levels in turn, each once where there are enough."""
    for level in rating.levels:
        environment.check_level(level)
    orders, rng = SeedOrders(environment, seed), np.random.default_rng(seed)
    asked = rating.levels or environment.levels
    levels = [level for level in asked if len(environment.seeds_of("train", level))]
    if not levels:
        raise DataError(f"environment '{environment.name}' has no training episodes of {', '.join(asked)}")
    return [EpisodeRequest(level, orders.draw(level, rng)) for level in (levels * rating.prompts)[: rating.prompts]]


def _play(
    environment: Environment,
    settings: PipelineSettings,
    sampling: SamplingSettings,
    model: NamedModel,
    requests: Sequence[EpisodeRequest],
    samples: int,
) -> list[list[Trajectory | None]]:
    """Trajectories of each request; None for an episode that failed."""
    policy = load_policy(model.place, dataclasses.replace(settings.model, path=None, lora=None))
    sampling = resolve_defaults(sampling, policy.kind, policy.context)
    backend = policy.backend()
    found: list[list[Trajectory | None]] = []
    for start in range(0, len(requests), TOGETHER):
        groups = collect(
            environment, backend, policy.renderer, requests[start : start + TOGETHER], group_size=samples,
            sampling=sampling, seed=settings.seed + start,
        )  # fmt: skip
        for group in groups:
            trajectories: list[Trajectory | None] = [rollout.trajectory for rollout in group.rollouts]
            found.append(trajectories + [None] * (samples - len(trajectories)))
    return found


def _prompt(messages: Sequence[Message]) -> Answer:
    """The opening as text, where it is one message of the user."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return [dict(message) for message in messages]
