"""Measurements of the analysis that need models: each policy on its own episodes, the reward model on all episodes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from rl_core.analysis.results import (
    ModelProbeResult,
    ProbeResults,
    RewardModelCalibration,
    calibrate_reward_model,
)
from rl_core.api.policy import resolve_model_folder
from rl_core.capabilities import reads_images
from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import Row
from rl_core.environments.environment import Environment
from rl_core.models import heads
from rl_core.probe import MAX_TOKENS, ProbedModel, has_same_vocabulary, probe_model
from rl_core.rollouts.rollout_files import build_tokens_path, read_rollouts
from rl_core.settings import AnalysisSettings
from rl_core.storage.faults import inject_fault
from rl_core.types import Rollout
from tasks.config import PipelineSettings
from tasks.stages.loading import load_frozen_policy

logger = logging.getLogger(__name__)


def measure_models(
    pipeline: PipelineSettings,
    settings: AnalysisSettings,
    models: Mapping[str, Path | str],
    trajectories: Mapping[str, Path],
    *,
    environment: Environment | None = None,
    data: Path | None = None,
    reward_model: Path | None = None,
) -> ProbeResults:
    """Measure every model that has trajectories; hold at most two in memory.

    Args:
        models: name -> finished stage, model folder or hub name, the first model first.
        trajectories: name -> trajectories_NAME.jsonl, with tokens_NAME.jsonl in the same folder.
        environment, data: held-out demonstrations come from the data stage, or else from the environment's demonstrator
            at held-out seeds.
        reward_model: the reward model stage's folder.
    """
    limit = max(settings.probe_episodes, settings.probe_scores if reward_model else 0)
    played = {
        name: read_rollouts(path, limit)
        for name, path in trajectories.items()
        if name in models and build_tokens_path(path).is_file()
    }
    demonstrations = _load_heldout_demonstrations(
        data, environment, settings.probe_demonstrations, pipeline.model.native_tools
    )
    first: ProbedModel | None = None
    probes: dict[str, ModelProbeResult] = {}
    notes: list[str] = []
    for name in [name for name in models if name in played]:
        policy = load_frozen_policy(resolve_model_folder(models[name]), pipeline)
        subject = ProbedModel(policy.model, policy.renderer)
        if reads_images(policy.model):
            notes.append(f"'{name}' reads images: KL, entropy and coherence are not measured.")
            probes[name] = probe_model(subject, None, [], demonstrations)
            continue
        if first is not None and not has_same_vocabulary(first.renderer, subject.renderer):
            notes.append(
                f"'{name}' has a different tokenizer than the first model: KL and coherence are not comparable."
            )
            probes[name] = probe_model(subject, None, [], demonstrations)
            continue
        probes[name] = probe_model(
            subject, first, played[name][: settings.probe_episodes], demonstrations
        )
        first = first or subject
    to_score = [
        rollout for rollouts in played.values() for rollout in rollouts[: settings.probe_scores]
    ]
    calibration = None
    if reward_model is not None and to_score and first is not None:
        calibration = _calibrate_reward_model(
            pipeline, reward_model, first.renderer, to_score, notes
        )
    inject_fault("analysis.probed")
    return ProbeResults(probes, calibration, notes)


def _calibrate_reward_model(
    pipeline: PipelineSettings,
    folder: Path,
    renderer: ChatRenderer,
    rollouts: list[Rollout],
    notes: list[str],
) -> RewardModelCalibration | None:
    model, tokenizer = heads.load_reward_model(folder / "model", pipeline.model)
    if tokenizer.get_vocab() != renderer.tokenizer.get_vocab():
        notes.append(
            "the reward model has a different tokenizer than the policies: it was not scored."
        )
        return None
    scores = heads.score_rows(
        model, [r.last_context for r in rollouts], pad_id=renderer.pad_id, max_tokens=MAX_TOKENS
    )
    episodes = [(r.trajectory.environment, r.trajectory.level, r.trajectory.seed) for r in rollouts]
    known = [index for index, rollout in enumerate(rollouts) if rollout.success is not None]
    if not known:
        notes.append("success is unknown: the reward model was not compared with it.")
        return None
    return calibrate_reward_model(
        [scores[index] for index in known],
        [bool(rollouts[index].success) for index in known],
        [episodes[index] for index in known],
    )


def _load_heldout_demonstrations(
    data: Path | None, environment: Environment | None, limit: int, native_tools: bool
) -> list[Row]:
    """Load up to `limit` rows of held-out demonstrations, always the same ones; [] if there are none."""
    path = data / "demonstrations_heldout.jsonl" if data is not None else None
    if path is not None and path.is_file():
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in islice(file, limit)]
    rows: list[Row] = []
    if environment is None:
        return rows
    for level in environment.levels:
        schema = environment.find_part(level).tools.schema() if native_tools else []
        seeds = environment.seeds_of("heldout", level)[: -(-limit // len(environment.levels))]
        for seed in seeds:
            demonstration = environment.demonstration(seed, level)
            if (
                demonstration is None
            ):  # without a demonstrator; other environments of a mixture may have one
                break
            rows.append({"messages": demonstration.messages, "tools": schema})
    return rows[:limit]
