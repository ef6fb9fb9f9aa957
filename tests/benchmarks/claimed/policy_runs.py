"""One run of policy optimisation of an arm: curve, success on validation and reported episodes, metrics."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rl_core
from claimed.results import Row
from claimed.tasks import TASKS, Task, find_start
from rl_core.evaluation import evaluate
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import CriticSettings, LoraSettings, ModelSettings, PolicySettings

Requests = list[EpisodeRequest]
HeldOut = tuple[Requests, Requests]  # reported, validation

PROMPTS, GROUP = 16, 8  # 128 episodes an iteration
COMMON = dict(
    prompts_per_iteration=PROMPTS,
    group_size=GROUP,
    learning_rate=5e-4,
    warmup_steps=5,
    eval_every=0,
    patience=None,
    checkpoint_every=0,
)
WINDOW = 5  # iterations of the moving mean of training success
RECORDED_METRICS = (
    "train/success_rate",
    "policy/ref_kl",
    "policy/kl_coef",
    "policy/entropy",
    "policy/update_kl",
    "policy/update_kl_exact",
    "policy/refused_steps",
    "policy/clip_fraction",
    "value/explained_variance",
    "tool/misuse_rate",
    "train/loop_rate",
    "train/coherent_rate",
    "train/exploration_efficiency",
    "train/turns",
    "reward/mean",
    "curriculum/stage",
    "curriculum/rollbacks",
    "train/learning_rate",
    "train/filtering_rate",
)


@dataclass(frozen=True)
class Arm:
    """One way to train: settings over the common ones."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    iterations: int = 30
    lora: LoraSettings | None = None
    judged_every: int = (
        0  # iterations between looks at the validation episodes; 0 = at the end alone
    )
    reward_model: Path | None = None


def train_arm(output: Path, task_name: str, arm: Arm, seed: int) -> Row:
    """Train from the task's start, and judge."""
    task = TASKS[task_name]
    source: Any = find_start(task_name, output)
    if arm.lora is not None:
        source = ModelSettings(path=str(source), lora=arm.lora, device="cpu")
    environment = task.build_prompt()
    settings = PolicySettings(
        **{**COMMON, "iterations": arm.iterations, "sampling": task.sampling, **arm.settings}
    )
    if not settings.curriculum:
        mix = rl_core.CurriculumStage(name="all", levels=dict.fromkeys(task.levels, 1.0))
        settings = dataclasses.replace(settings, curriculum=(mix,))
    training = rl_core.policy_gradient(
        source, environment=environment, settings=settings, seed=seed, reward_model=arm.reward_model
    )
    held_out = task.held_out(environment)
    trainer, curves, looks, weights = training.trainer, {}, [], None
    for iteration in range(1, arm.iterations + 1):
        metrics = trainer.step()
        for name in RECORDED_METRICS:
            curves.setdefault(name, []).append(metrics.get(name))
        if arm.judged_every and iteration % arm.judged_every == 0:
            success = evaluate_episodes(training.policy, task, environment, held_out[1], seed)[0]
            looks.append((iteration, statistics.fmean(success)))
            if looks[-1][1] >= max(look[1] for look in looks):
                weights = copy.deepcopy(training.model.state_dict())
    row = measure_outcome(training.policy, task, environment, held_out, seed)
    if weights is not None:  # the result of stopping at the best evaluation
        training.model.load_state_dict(weights)
        row["best"] = evaluate_episodes(
            training.policy, task, environment, held_out[0], 1000 + seed
        )[0]
    row["curves"] = {
        name: values
        for name, values in curves.items()
        if any(value is not None for value in values)
    }
    row["looks"], row["moves"] = looks, trainer.curriculum.export_history()
    row["trainable"] = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    return row


def measure_outcome(policy: Any, task: Task, environment: Any, held_out: HeldOut, seed: int) -> Row:
    """Return successes on the reported episodes by level, on validation, and how they were played."""
    reported, validation = held_out
    success, played = evaluate_episodes(policy, task, environment, reported, 1000 + seed)
    return {
        "success": success,
        "levels": [request.level for request in reported],
        "validation": evaluate_episodes(policy, task, environment, validation, seed)[0],
        "turns": played.turns_mean,
        "tool_calls": played.tool_calls_mean,
        "misuse": played.misuse_rate,
        "truncated": played.truncated_rate,
    }


def evaluate_episodes(
    policy: Any, task: Task, environment: Any, requests: Requests, seed: int
) -> tuple[list[int], Any]:
    """Return the success of each episode, played once at temperature 1, and the evaluation."""
    backend = policy.backend()
    backend.refresh_weights()
    evaluation = evaluate(
        environment,
        backend,
        policy.renderer,
        requests,
        samples=1,
        sampling=task.sampling,
        seed=seed,
    )
    return [episode.successes for episode in evaluation.episodes], evaluation


def count_iterations_to(row: Row, level: float) -> int | None:
    """Count iterations until the mean training success of `WINDOW` of them reaches a level; None if never."""
    curve = row["curves"]["train/success_rate"]
    for end in range(WINDOW, len(curve) + 1):
        if statistics.fmean(curve[end - WINDOW : end]) >= level:
            return end
    return None


def make_critic(**options: Any) -> CriticSettings:
    """Make a critic at the rate of the benchmarks."""
    defaults = {} if options.get("kind") == "shared" else {"learning_rate": 1e-3}
    return CriticSettings(**{**defaults, **options})
