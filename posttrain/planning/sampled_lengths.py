"""Lengths of prompts and rows, measured on a sample with the tokenizer of the model.

Only a model that exists has a tokenizer; a preset's is made by `prepare_data`. No code of the user is run, and no
server is asked: the sample is of data files and of shipped environments that only compute.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.planning.target import PlanLengths, find_data_file
from rl_core.data.files import BadRow, list_data_files, read_rows
from rl_core.data.images import join_message_parts
from rl_core.environments import SHIPPED_ENVIRONMENTS, list_environment_code, make_environment
from rl_core.errors import PosttrainError
from tasks.config import PipelineSettings

if TYPE_CHECKING:
    from rl_core.data.chat import ChatRenderer
    from rl_core.environments.environment import Environment

log = logging.getLogger(__name__)

SAMPLE_SIZE = 64  # prompts or rows


def sample_lengths(settings: PipelineSettings, lengths: PlanLengths) -> PlanLengths:
    """Return the lengths with those of a sample for the stages that it covers; unchanged without a tokenizer.

    A prompt counts at the longest of the sample, which decides memory; a row at the mean.
    """
    renderer = _load_renderer(settings)
    if renderer is None:
        return lengths
    environment = _build_environment(settings)
    prompts = _measure(lambda: _iter_prompt_lengths(environment, renderer))
    rows = _measure(lambda: _iter_demonstration_lengths(settings, environment, renderer))
    sides = _measure(lambda: _iter_side_lengths(settings, renderer))
    return replace(
        lengths,
        sampled_prompt=max(prompts, default=None),
        sampled_row=round(statistics.fmean(rows)) if rows else None,
        sampled_side=round(statistics.fmean(side for side, _ in sides)) if sides else None,
        sampled_side_prompt=round(statistics.fmean(prompt for _, prompt in sides))
        if sides
        else None,
    )


def _load_renderer(settings: PipelineSettings) -> ChatRenderer | None:
    """Load the tokenizer of the model's folder or hub name; None if there is none."""
    if settings.model.path is None:
        return None
    from rl_core.data.chat import ChatRenderer  # imported here: loads transformers
    from rl_core.models import causal_lm

    try:
        return ChatRenderer(
            causal_lm.load_tokenizer(settings.model.path, settings.model), settings.model
        )
    except (PosttrainError, OSError, ValueError) as error:
        log.debug("lengths are not measured: %s", error)
        return None


def _build_environment(settings: PipelineSettings) -> Environment | None:
    """Build the environment if it is a shipped one that only computes; None otherwise, or if its data is missing."""
    name, options = settings.environment.name, dict(settings.environment.options)
    names = [part.name for _, part in settings.list_environment_blocks()]
    if not set(names) <= SHIPPED_ENVIRONMENTS.keys():
        return None
    try:
        if list_environment_code(name, options):
            return None
        environment = make_environment(name, options)
    except (PosttrainError, OSError, ImportError) as error:
        log.debug("prompts are not measured: %s", error)
        return None
    return None if environment.blocking else environment


def _measure(iter_lengths: Callable[[], Iterator[Any]]) -> list[Any]:
    """Return up to `SAMPLE_SIZE` lengths; those before an error count."""
    measured: list[Any] = []
    try:
        for length in islice(iter_lengths(), SAMPLE_SIZE):
            measured.append(length)
    except (PosttrainError, OSError, LookupError, ValueError) as error:
        log.debug("lengths after the first %d are not measured: %s", len(measured), error)
    return measured


def _iter_seeds(environment: Environment) -> Iterator[tuple[str, int]]:
    """Yield (level, seed) of training episodes, all levels in turn."""
    seeds = {level: environment.seeds_of("train", level) for level in environment.levels}
    for index in range(SAMPLE_SIZE):
        for level, candidates in seeds.items():
            if index < len(candidates):
                # Spread over the rows of a file, which may be sorted.
                step = max(1, min(len(candidates), 10_000) // SAMPLE_SIZE)
                yield level, candidates[(index * step) % len(candidates)]


def _iter_prompt_lengths(environment: Environment | None, renderer: ChatRenderer) -> Iterator[int]:
    if environment is None:
        return
    for level, seed in _iter_seeds(environment):
        described = renderer
        if renderer.settings.native_tools:
            described = renderer.with_tools(environment.find_part(level).tools.schema())
        opening = environment.episode(seed, level).reset()
        yield len(described.prompt_ids(list(map(join_message_parts, opening))))


def _iter_demonstration_lengths(
    settings: PipelineSettings, environment: Environment | None, renderer: ChatRenderer
) -> Iterator[int]:
    """Yield the tokens of demonstrations: those of the data file, else those that the environment makes."""
    from rl_core.data.formats import validate_demonstration
    from rl_core.data.training_sequences import build_training_sequences

    def measure(messages: Any, tools: Any) -> Iterator[int]:
        for ids, _ in build_training_sequences(renderer, messages, tools):
            yield len(ids)

    path = find_data_file(settings, "demonstrations")
    if path is not None:
        for row in _iter_file_rows(path, validate_demonstration):
            yield from measure(row["messages"], row.get("tools"))
    elif environment is not None:
        for level, seed in _iter_seeds(environment):
            tools = environment.find_part(level).tools
            schema = tools.schema() if renderer.settings.native_tools else []
            demonstration = environment.demonstration(seed, level)
            if demonstration is not None:
                yield from measure(demonstration.messages, schema)


def _iter_side_lengths(
    settings: PipelineSettings, renderer: ChatRenderer
) -> Iterator[tuple[int, int]]:
    """Yield (tokens, tokens of the prompt) of the sides of the data file's preferences."""
    from rl_core.data.formats import validate_preference
    from rl_core.data.pairs import build_row_sides

    path = find_data_file(settings, "preferences")
    if path is None:
        return
    for row in _iter_file_rows(path, validate_preference):
        for side, _ in build_row_sides(row, renderer):
            prompt = len(side.prompt_ids)
            yield prompt + len(side.completion_ids), prompt


def _iter_file_rows(path: str, validate: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the valid rows among the first ones of each file."""
    files = list_data_files(Path(path))
    for file in files:
        for _, row in islice(read_rows(file, None), SAMPLE_SIZE):
            with suppress(BadRow):
                if not isinstance(row, BadRow):
                    yield validate(row)
