"""Stage: policy and value networks for plain observations, trained by PPO on a Gymnasium environment."""

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
    """Run the stage; it has no inputs from earlier stages."""
    return run_stage(pipeline_run, "network", _run_network_training, inputs={})


def _run_network_training(context: StageContext) -> dict[str, Any]:
    # Imported here: these load torch, which a cached run does not need.
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
        evaluation = recipe.trainer.evaluate_on_test_seeds()
    finally:
        recipe.trainer.environment.close()
    save_network(recipe.trainer.model, context.folder / NETWORK_FOLDER, name)
    context.tracker.log_artifact(context.folder / NETWORK_FOLDER)
    write_json_atomic(context.folder / EPISODES_FILE, evaluation.to_json())
    context.tracker.log_artifact(context.folder / EPISODES_FILE)
    test_metrics = {
        name.replace("eval/", "eval/test/"): value
        for name, value in evaluation.compute_metrics().items()
    }
    context.tracker.log_metrics(test_metrics, outcome.steps + 1)
    metrics = {**outcome.metrics, **test_metrics}
    mean, low, high = (
        test_metrics[f"eval/test/episode_return{suffix}"] for suffix in ("", "_low", "_high")
    )
    action_choice = "greedily" if settings.eval_greedy else "by sampled actions"
    logger.info("%s: return %.1f [%.1f, %.1f]", name, mean, low, high)
    return {
        "steps": outcome.steps,
        "environment_steps": recipe.trainer.environment_steps,
        "stop_reason": outcome.stop_reason,
        "episode_return": mean,
        "metrics": metrics,
        "note": f"return {mean:.1f} [{low:.1f}, {high:.1f}] over {len(evaluation.returns)} held-out episodes "
        f"of {name}, played {action_choice}, after {recipe.trainer.environment_steps:,} steps",
    }
