"""Stage: policy and value networks for plain observations, by PPO on a Gymnasium environment."""

from __future__ import annotations

import logging
from typing import Any

from rl_core.settings import NetworkSettings
from rl_core.storage.single_files import write_json_atomic
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import StageContext, StageResult, run_stage

__all__ = ["train_network"]

logger = logging.getLogger(__name__)

NETWORK, EPISODES = "network", "episodes.json"


def train_network(pipeline_run: PipelineRun) -> StageResult:
    """Run the stage; it takes nothing from the stages before it."""
    return run_stage(pipeline_run, "network", _body, settings=pipeline_run.settings.stages.network, inputs={})


def _body(context: StageContext) -> dict[str, Any]:
    # here: they load torch, not needed if cached
    from rl_core.api.recipes.network import network
    from rl_core.networks.making import environment_name, single_maker
    from rl_core.networks.network_files import save_network

    settings: NetworkSettings = context.settings
    name = environment_name(settings)
    recipe = network(single_maker(settings), settings, context.seed, name=name)
    try:
        outcome = context.train(recipe)
        played = recipe.trainer.test()
    finally:
        recipe.trainer.environment.close()
    save_network(recipe.trainer.model, context.folder / NETWORK, name)
    context.tracker.log_artifact(context.folder / NETWORK)
    write_json_atomic(context.folder / EPISODES, played.to_json())
    context.tracker.log_artifact(context.folder / EPISODES)
    tested = {name.replace("eval/", "eval/test/"): value for name, value in played.metrics().items()}
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
