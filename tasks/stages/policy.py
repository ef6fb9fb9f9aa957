"""Stage: policy optimisation from rewards, with a curriculum."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.environments.environment import Environment
from rl_core.metric_history import MetricHistory
from rl_core.rewards.rollout_log import RecentRollouts, RewardRecord, build_combined_record
from rl_core.settings import GROUP_ALGORITHMS, CurriculumStage, PolicySettings
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_folder import REWARD_RECORD
from tasks.pipeline.stage_result import RECENT_ROLLOUTS, SCHEDULE_FILE, SERVER_LOG, StageResult
from tasks.stages.evaluate import list_validation_episodes
from tasks.stages.kl_reference import load_kl_reference
from tasks.stages.loading import (
    build_environment_factory,
    build_failure_recorder,
    build_pipeline_environment,
    load_policy,
    open_failed_episode_file,
    save_policy,
)

if TYPE_CHECKING:
    from rl_core.api.policy import Policy
    from rl_core.rewards.contribution import RewardContribution
    from rl_core.rewards.model_components import Scorer
    from rl_core.rewards.process_reward import StepScorer
    from rl_core.rollout_workers.server_backend import ServerBackend
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

NUM_RECENT_ITERATIONS = 10  # iterations whose mean represents the end of training


def optimise_policy(
    pipeline_run: PipelineRun,
    model: Path | str,
    data: StageResult | None,
    reward: StageResult | None,
) -> StageResult:
    """Run the stage.

    Args:
        model: where the policy starts, and what the KL term refers to.
        reward: result of the stage `reward_model`.
    """
    inputs: dict[str, Any] = {"model": model}
    if data is not None:
        inputs["data"] = data
    settings = pipeline_run.settings.stages.policy
    assert settings is not None
    if reward is not None and pipeline_run.settings.uses_reward_model:
        inputs["reward_model"] = reward
    return run_stage(pipeline_run, "policy", _run_policy_training, inputs=inputs)


def _run_policy_training(context: StageContext) -> dict[str, Any]:
    # Imported here: loads torch, which a cached run does not need.
    from rl_core.api.recipes.policy_gradient import build_policy_gradient_recipe
    from rl_core.training.opponent_pool import OPPONENTS_FOLDER

    settings: PolicySettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    environment = build_pipeline_environment(context.pipeline, data)
    policy = load_policy(context.inputs["model"], context.pipeline)
    failed = open_failed_episode_file(context)
    reference = evaluator = None
    if settings.kl_coef > 0:
        reference = load_kl_reference(context, policy, settings.reference_precision)
    scorer = step_scorer = None
    if "reward_model" in context.inputs:
        scorer, step_scorer = _build_reward_scorers(context)
    if settings.eval_every:
        evaluator = build_validation_evaluator(context, settings, policy, environment)
    recipe = build_policy_gradient_recipe(
        policy,
        reference,
        environment,
        settings,
        context.seed,
        scorer=scorer,
        step_scorer=step_scorer,
        evaluator=evaluator,
        record=build_combined_record(
            RewardRecord(context.folder / REWARD_RECORD),
            RecentRollouts(context.folder / RECENT_ROLLOUTS),
            failed,
        ),
        process_group=context.process_group,
        make_environment=build_environment_factory(context.pipeline, data),
        server_log=context.folder / SERVER_LOG,
        opponents_folder=context.checkpoints / OPPONENTS_FOLDER,
        stop_event=context.stop,
    )
    trainer = recipe.trainer
    if settings.rollouts.workers != "in_process":
        _watch_workers(context, trainer)
    trainer.set_failure_recorder(build_failure_recorder(context, failed))
    if context.process_group.is_rank_zero:
        trainer.curriculum.on_move = functools.partial(_show_curriculum, context)
    outcome = context.train(recipe)
    save_policy(context, policy, trainer.optimizer_step)
    history = trainer.curriculum.export_history()
    contributions = context.process_group.run_on_rank_zero(
        functools.partial(_compute_contributions, context, list(trainer.rewards.components))
    )
    rewards = _describe_rewards(contributions, by_prompt=settings.algorithm in GROUP_ALGORITHMS)
    reward_metrics = {
        f"reward/{name.replace(':', '.')}/{key}": value
        for name, contribution in contributions.items()
        for key, value in contribution.to_metrics().items()
    }
    if context.process_group.is_rank_zero:
        _show_curriculum(context, history)
        context.tracker.log_metrics(reward_metrics, outcome.steps + 1)
        if rewards:
            context.tracker.set_tag("rewards", rewards)
    notes = [outcome.ended, f"curriculum: {_describe_curriculum(history, settings.curriculum)}"]
    if rewards:
        notes.append(rewards)
    sampler = {}
    if trainer.server is not None:
        sampler = {"sampler": _describe_sampler(trainer.server)}
        notes.append(f"rollouts by {trainer.server.description.engine_label}")
    return {
        **sampler,
        "steps": outcome.steps,
        "iterations": outcome.iterations,
        "stop_reason": outcome.stop_reason,
        "curriculum": history,
        "rewards": rewards,
        "metrics": {
            **compute_recent_metrics(outcome.history),
            **outcome.metrics,
            **reward_metrics,
        },
        "note": "; ".join(notes),
    }


def _build_reward_scorers(context: StageContext) -> tuple[Scorer | None, StepScorer | None]:
    """Build functions that score token rows, or their steps, with the reward model among the inputs."""
    from rl_core.models import heads
    from rl_core.references.pool import get_frozen_models

    frozen = dataclasses.replace(context.pipeline.model, lora=None)
    folder = Path(context.inputs["reward_model"]) / "model"
    model = get_frozen_models().load_model(folder, frozen, kind="reward_model")
    if heads.scores_steps(model):
        return None, functools.partial(heads.score_steps, model)
    return functools.partial(heads.score_rows, model), None


def _watch_workers(context: StageContext, trainer: PolicyGradientTrainer) -> None:
    """Report lost workers to the tracker, keep the schedule of asynchronous rollouts, and tag the inference server."""
    from rl_core.rollout_workers.async_worker_group import AsyncWorkerGroup

    if trainer.server is not None:
        trainer.server.on_event = functools.partial(context.tracker.set_tag, "rollouts.lost")
        for name, value in _describe_sampler(trainer.server).items():
            context.tracker.set_tag(f"rollouts.{name}", value)
        return
    workers = (
        trainer.stream if isinstance(trainer.stream, AsyncWorkerGroup) else trainer.worker_group
    )
    if workers is not None:
        workers.on_event = functools.partial(context.tracker.set_tag, "rollouts.lost")
    if isinstance(workers, AsyncWorkerGroup):
        workers.schedule = context.folder / SCHEDULE_FILE


def _describe_sampler(server: ServerBackend) -> dict[str, str]:
    """Describe the inference server that produces the rollouts, for the record."""
    description = server.description
    versions = ", ".join(
        f"{name} {number}" for name, number in sorted(description.versions.items())
    )
    return {
        "server": f"{description.engine_label} at {server.server.address}",
        "server_versions": versions,
        "dtype": description.dtype,
    }


def build_validation_evaluator(
    context: StageContext, settings: PolicySettings, policy: Policy, environment: Environment
) -> Callable[[], dict[str, float]]:
    """Build a function that plays the validation episodes, none of which the evaluation stage reports on."""
    from rl_core.api.evaluation import build_validator

    requests = list_validation_episodes(environment, context.pipeline)
    return build_validator(
        policy,
        environment,
        requests,
        settings.sampling,
        context.seed,
        process_group=context.process_group,
    )


def compute_recent_metrics(history: MetricHistory) -> dict[str, float]:
    """Compute the means of the training metrics over the last iterations."""
    iterations = history.list_points("reward/mean", NUM_RECENT_ITERATIONS)
    first_step = iterations[0][0] if iterations else 0.0
    names = [
        name
        for name in history.names
        if name.split("/")[0] in ("train", "reward", "policy", "tool")
    ]
    values = {
        name: [
            value
            for step, value in history.list_points(name, NUM_RECENT_ITERATIONS)
            if step >= first_step
        ]
        for name in names
    }
    return {name: sum(recent) / len(recent) for name, recent in values.items() if recent}


def _compute_contributions(
    context: StageContext, names: Sequence[str]
) -> dict[str, RewardContribution]:
    """Compute the contribution of each reward component over all rollouts of the run."""
    from rl_core.rewards.contribution import compute_contributions, iter_compared_groups

    by_iteration = context.settings.algorithm not in GROUP_ALGORITHMS
    return compute_contributions(
        iter_compared_groups(context.folder / REWARD_RECORD, by_iteration=by_iteration), names
    )


def _describe_rewards(contributions: Mapping[str, RewardContribution], *, by_prompt: bool) -> str:
    """Describe each component's share and the reward model's contribution; "" for `task` alone."""
    clauses = []
    shares = [
        f"{name} {contribution.share:.0%}"
        for name, contribution in contributions.items()
        if contribution.share is not None
    ]
    if len(contributions) > 1 and shares:
        clauses.append(
            f"reward differences within {'a prompt' if by_prompt else 'an iteration'}: {', '.join(shares)}"
        )
    if "learned" in contributions:
        learned, facts = contributions["learned"], list[str]()
        if len(contributions) > 1:
            facts.append(
                f"the only difference in {learned.alone:.0%} of the {'prompts' if by_prompt else 'iterations'}"
            )
        if learned.ranked is not None and learned.correlation is not None:
            facts.append(f"ranks {learned.ranked:.0%} of success-failure pairs correctly")
            facts.append(f"correlation with success {learned.correlation:+.2f}")
        clauses.append(f"reward model: {', '.join(facts) or 'nothing to compare'}")
    return "; ".join(clauses)


def _show_curriculum(context: StageContext, history: list[dict[str, Any]]) -> None:
    """Log the moves so far as an artifact and tags, so that they are visible while the stage trains."""
    context.tracker.log_dict({"history": history}, "curriculum.json")
    rollbacks = sum(row["kind"] == "rollback" for row in history)
    stages = context.settings.curriculum
    current = history[-1]["to"] if history else (stages[0].name if stages else "all")
    context.tracker.set_tag("curriculum.stage", current)
    context.tracker.set_tag("curriculum.moves", _describe_curriculum(history, stages)[:4000])
    context.tracker.set_tag("curriculum.rollbacks", str(rollbacks))


def _describe_curriculum(history: list[dict[str, Any]], stages: Sequence[CurriculumStage]) -> str:
    if not history and len(stages) > 1:
        return f"still in '{stages[0].name}', the first of {len(stages)} stages"
    return ", ".join(_describe_move(row) for row in history) or "one stage"


def _describe_move(row: dict[str, Any]) -> str:
    text = f"{row['to']} from iteration {row['iteration']}"
    return text if row["kind"] == "advance" else f"{text} ({row['kind']})"
