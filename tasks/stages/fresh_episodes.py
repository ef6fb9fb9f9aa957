"""Choice of the held-out episodes of a comparison at the promotion gate: the pipeline's own, or fresh ones."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import DataError, SettingsError
from rl_core.evaluation import Evaluation
from rl_core.settings import EvaluationSettings
from tasks.config import PromotionSettings, evaluation_settings
from tasks.lifecycle.attempts import episodes_sketch, read_attempts
from tasks.pipeline.result import StageResult
from tasks.pipeline.run import PipelineRun
from tasks.stages.evaluate import reported_episodes
from tasks.stages.loading import make_environment

__all__ = ["EpisodeDraw", "choose_draw"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeDraw:
    """Held-out episodes that challenger and champion play."""

    settings: EvaluationSettings
    number: int = 0  # after that of the pipeline's evaluation, which the challenger has played already

    @property
    def label(self) -> str:
        """Ending of the name of the evaluation's run."""
        return f" and challenger, draw {self.settings.episodes_draw}" if self.number else ""


def choose_draw(
    pipeline_run: PipelineRun,
    settings: PromotionSettings,
    comparison: str,
    evaluation: Evaluation,
    data: StageResult | None,
) -> EpisodeDraw:
    """The draw of a comparison; with `repeated_attempts: fresh` the first one that no attempt has seen.

    A comparison of the same two models keeps its draw. Where the environment has no fresh episodes left, the pipeline's
    own are used, and the attempt is tested at what is left of `alpha` for them.

    Args:
        comparison: as `attempts.comparison_id`. evaluation: the challenger's, on the pipeline's own episodes.
    """
    first = evaluation_settings(pipeline_run.settings)
    if settings.repeated_attempts != "fresh":
        return EpisodeDraw(first)
    attempts = read_attempts(pipeline_run.tracking, pipeline_run.registered_model)
    name = pipeline_run.settings.environment.name
    for known in attempts:
        if known.comparison == comparison:
            return _draw(first, known.draw)
    sketch = episodes_sketch(name, (episode.key for episode in evaluation.episodes))
    if not any(attempt.shares_episodes(sketch) for attempt in attempts):
        return EpisodeDraw(first)
    environment = make_environment(pipeline_run.settings, Path(data.path) if data is not None else None)
    for number in itertools.count(1):
        draw = _draw(first, number)
        try:
            requests = reported_episodes(environment, draw.settings, pipeline_run.settings)
        except (DataError, SettingsError) as error:
            logger.warning("promotion: no fresh episodes (%s); the same ones are used, at a lower level", error)
            return EpisodeDraw(first)
        sketch = episodes_sketch(name, ((request.level, request.seed) for request in requests))
        if not any(attempt.shares_episodes(sketch) for attempt in attempts):
            return draw
    raise AssertionError("unreachable")


def _draw(first: EvaluationSettings, number: int) -> EpisodeDraw:
    return EpisodeDraw(dataclasses.replace(first, episodes_draw=first.episodes_draw + number), number)
