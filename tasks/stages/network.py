"""Stage: policy and value networks for plain observations, by PPO on a Gymnasium environment."""

from __future__ import annotations

import logging
from typing import Any

from rl_core.settings import NetworkSettings
from rl_core.storage.atomic_files import write_json_atomic
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult

logger = logging.getLogger(__name__)

NETWORK_FOLDER, EPISODES_FILE = "network", "episodes.json"


def train_network(pipeline_run: PipelineRun) -> StageResult:
    """Run the stage; it takes nothing from the stages before it."""
    return run_stage(
        pipeline_run,
        "network",
        _run_network_training,
        settings=pipeline_run.settings.stages.network,
        inputs={},
    )


def _run_network_training(context: StageContext) -> dict[str, Any]:
    # here: they load torch, not needed if cached
    from rl_core.api.recipes.network import build_network_recipe
    from rl_core.networks.network_files import save_network
    from rl_core.networks.vector_environment import build_environment_factory, read_environment_name

    settings: NetworkSettings = context.settings
    name = read_environment_name(settings)
    recipe = build_network_recipe(
        build_environment_factory(settings), settings, context.seed, name=name
    )
    try:
        outcome = context.train(recipe)
        played = recipe.trainer.evaluate_on_test_seeds()
    finally:
        recipe.trainer.environment.close()
    save_network(recipe.trainer.model, context.folder / NETWORK_FOLDER, name)
    context.tracker.log_artifact(context.folder / NETWORK_FOLDER)
    write_json_atomic(context.folder / EPISODES_FILE, played.to_json())
    context.tracker.log_artifact(context.folder / EPISODES_FILE)
    tested = {
        name.replace("eval/", "eval/test/"): value
        for name, value in played.compute_metrics().items()
    }
    context.tracker.log_metrics(tested, outcome.steps + 1)
    metrics = {**outcome.metrics, **tested}
    mean, low, high = (tested[f"eval/test/episode_return{end}"] for end in ("", "_low", "_high"))
    how = "greedily" if settings.eval_greedy else "by sampled actions"
    logger.info("%s: return %.1f [%.1f, %.1f]", name, mean, low, high)
    return {
        "steps": outcome.steps,
        "environment_steps": recipe.trainer.environment_steps,
        "stop_reason": outcome.stop_reason,
        "episode_return": mean,
        "metrics": metrics,
        "note": f"return {mean:.1f} [{low:.1f}, {high:.1f}] over {len(played.returns)} held-out episodes of {name}, "
        f"played {how}, after {recipe.trainer.environment_steps:,} steps",
    }
