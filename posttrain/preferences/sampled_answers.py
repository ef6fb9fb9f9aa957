"""Items to rate: answers of one or two models to the same episodes, and the reward posterior that chooses pairs.

The posterior is computed from a model's hidden states at the end of each answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.serving.served_model import ModelSource
from rl_core.api.policy import load_policy
from rl_core.data.chat import ChatRenderer
from rl_core.data.pairs import build_row_sides
from rl_core.environments.environment import Environment
from rl_core.errors import DataError
from rl_core.models import heads
from rl_core.models.causal_lm import use_eval_mode
from rl_core.preferences.items import RatedAnswer, RatedItem, extract_answer
from rl_core.preferences.question_order import (
    RewardPosterior,
    compute_principal_axes,
    project_head_on_axes,
)
from rl_core.rollouts.collect import TrainingSeedOrders, collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import ModelSettings, RatingSettings, SamplingSettings, resolve_defaults
from rl_core.types import Message, Trajectory
from tasks.config import PipelineSettings
from tasks.stages.loading import build_pipeline_environment

EPISODE_BATCH_SIZE = 64  # episodes played at a time
MAX_PADDED_TOKENS = 16384  # of one forward pass, padding included


@dataclasses.dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that answers, and the name stored with its answers."""

    name: str  # with the version
    path: Path | str


def find_models(
    settings: PipelineSettings, rating: RatingSettings, output: Path
) -> list[NamedModel]:
    """Find the models that answer. Raises: SettingsError that names a missing one; BackendError."""
    models = []
    for reference in rating.models or (f"models:/{settings.registered_model}@champion",):
        source = ModelSource(
            reference,
            output,
            settings.tracking.uri,
            alternative_hint="--set 'prefer.models=[FOLDER]'",
        )
        version = source.find_version()
        name = version.reference if version is not None else reference
        models.append(NamedModel(name, source.resolve_folder(version)))
    return models


def sample_items(
    settings: PipelineSettings,
    rating: RatingSettings,
    models: Sequence[NamedModel],
    say: Callable[[str], None],
) -> list[RatedItem]:
    """Sample the items of `rating.prompts` training episodes; leave out pairs with equal answers.

    Raises: SettingsError, ModelError; EnvironmentFault; DataError if all pairs have equal answers.
    """
    environment = build_pipeline_environment(settings, None)
    requests = _draw_requests(environment, rating, settings.seed)
    num_samples = 2 if rating.ask == "pairs" and len(models) == 1 else 1
    columns: list[tuple[str, list[Trajectory | None]]] = []  # model, and its answer to each request
    for model in models:
        twice = " twice" if num_samples == 2 else ""
        say(f"{model.name} answers {len(requests)} episodes{twice}")
        groups = _play_episodes(
            environment, settings, rating.sampling, model, requests, num_samples
        )
        for sample in range(num_samples):
            columns.append((model.name, [group[sample] for group in groups]))
    items: dict[str, RatedItem] = {}
    num_equal = 0
    for row, request in enumerate(requests):
        trajectories = [(name, column[row]) for name, column in columns]
        answers = [
            (name, extract_answer(trajectory))
            for name, trajectory in trajectories
            if trajectory is not None
        ]
        num_equal += len(answers) == 2 and answers[0][1] == answers[1][1]
        prompt = _format_prompt(environment.episode(request.seed, request.level).reset())
        name = environment.find_part(request.level).name
        about = {"environment": name, "level": request.level, "seed": request.seed}
        for item in _build_items(prompt, answers, about, rating):
            items.setdefault(item.id, item)
    if not items:
        raise DataError(
            "all answers to an episode are equal, so there is nothing to compare; name two models in prefer.models, or "
            "raise prefer.sampling.temperature"
        )
    if num_equal and rating.ask == "pairs":
        advice = ""
        if 2 * num_equal > len(requests):
            advice = (
                "; for more, name two models in prefer.models, or raise prefer.sampling.temperature"
            )
        say(f"{num_equal} of {len(requests)} pairs are left out: their answers are equal{advice}")
    return list(items.values())


def _build_items(
    prompt: RatedAnswer,
    answers: Sequence[tuple[str, RatedAnswer]],
    about: dict[str, Any],
    rating: RatingSettings,
) -> list[RatedItem]:
    if rating.ask != "pairs":
        return [RatedItem(prompt, (answer,), (name,), about) for name, answer in answers]
    if len(answers) != 2:
        return []
    (first_name, first), (second_name, second) = answers
    if first == second:
        return []
    return [RatedItem(prompt, (first, second), (first_name, second_name), about)]


def _draw_requests(
    environment: Environment, rating: RatingSettings, seed: int
) -> list[EpisodeRequest]:
    """Draw training episodes of the levels in turn, each once if there are enough."""
    chosen = tuple(environment.expand_levels(dict.fromkeys(rating.levels, 1.0)))
    for level in chosen:
        environment.check_level(level)
    orders, rng = TrainingSeedOrders(environment, seed), np.random.default_rng(seed)
    wanted = chosen or tuple(environment.level_weights)
    levels = [level for level in wanted if len(environment.seeds_of("train", level))]
    if not levels:
        raise DataError(
            f"environment '{environment.name}' has no training episodes of {', '.join(wanted)}"
        )
    return [
        EpisodeRequest(level, orders.draw_seed(level, rng))
        for level in (levels * rating.prompts)[: rating.prompts]
    ]


def _play_episodes(
    environment: Environment,
    settings: PipelineSettings,
    sampling: SamplingSettings,
    model: NamedModel,
    requests: Sequence[EpisodeRequest],
    samples: int,
) -> list[list[Trajectory | None]]:
    """Play the episodes of each request; None for an episode that failed."""
    policy = load_policy(model.path, dataclasses.replace(settings.model, path=None, lora=None))
    sampling = resolve_defaults(sampling, policy.kind, policy.context)
    backend = policy.backend()
    trajectories: list[list[Trajectory | None]] = []
    for start in range(0, len(requests), EPISODE_BATCH_SIZE):
        groups = collect_rollouts(
            environment,
            backend,
            policy.renderer,
            requests[start : start + EPISODE_BATCH_SIZE],
            group_size=samples,
            sampling=sampling,
            seed=settings.seed + start,
        )
        for group in groups:
            played: list[Trajectory | None] = [rollout.trajectory for rollout in group.rollouts]
            trajectories.append(played + [None] * (samples - len(played)))
    return trajectories


def _format_prompt(messages: Sequence[Message]) -> RatedAnswer:
    """Format the opening: as text if it is a single user message, else as messages."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return [dict(message) for message in messages]


def build_reward_posterior(
    items: Sequence[RatedItem],
    settings: ModelSettings,
    *,
    policy: Path | str | None,
    reward_model: Path | str | None,
) -> RewardPosterior:
    """Build the posterior over pairs before anything is rated.

    Args:
        policy: model whose states are used, with a new head; ignored with a reward model.
        reward_model: model whose states are used; a linear head is the posterior's mean.
    Raises: ModelError.
    """
    settings = dataclasses.replace(settings, path=None, lora=None)
    if reward_model is not None:
        model, tokenizer = heads.load_reward_model(reward_model, settings)
    else:
        assert policy is not None
        loaded = load_policy(policy, settings)
        model, tokenizer = loaded.model, loaded.tokenizer
    states_ND = _compute_state_differences(model, ChatRenderer(tokenizer, settings), items)
    axes_DK = compute_principal_axes(states_ND)
    head = getattr(model, "score", None) if reward_model is not None else None
    mean_K = None
    if isinstance(head, torch.nn.Linear):
        mean_K = project_head_on_axes(head.weight.detach().float().cpu().numpy()[0], axes_DK)
    return RewardPosterior(states_ND @ axes_DK, mean_D=mean_K)


def _compute_state_differences(
    model: Any, renderer: ChatRenderer, items: Sequence[RatedItem]
) -> Any:
    """Compute the state after the first answer minus that after the second: float [N, D]."""
    rows = []
    for item in items:
        row = {"prompt": item.prompt, "chosen": item.answers[0], "rejected": item.answers[1]}
        rows += [side.ids for side, _ in build_row_sides(row, renderer)]
    states = np.zeros((len(rows), model.config.get_text_config().hidden_size), dtype=np.float32)
    with use_eval_mode(model), torch.no_grad():
        for batch in heads.build_score_batches([len(row) for row in rows], MAX_PADDED_TOKENS):
            batch_rows = [rows[index] for index in batch]
            states_BD = heads.compute_last_states(model, batch_rows, pad_id=renderer.pad_id)
            states[batch] = states_BD.float().cpu().numpy()
    return states[0::2] - states[1::2]
