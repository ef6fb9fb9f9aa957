"""One run: the SFT model it starts from, its training, and the success of its result."""

from __future__ import annotations

import collections
import copy
import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

from learning_runs.jobs import ALGORITHMS, BATCH, COMMON, DISTILLATIONS, Job

CURVE_EPISODES, CURVE_POINTS = 200, 7
TEACHER_SEED = 100


def build_stages(schedule: list[dict[str, Any]], iterations: int) -> tuple[Any, ...]:
    """Convert a schedule to settings of the curriculum."""
    from rl_core.settings import CurriculumStage, ExitCondition

    stages = []
    for index, step in enumerate(schedule):
        options: dict[str, Any] = {}
        if step.get("exit_at"):
            options["exit_conditions"] = (ExitCondition(window=5, threshold=step["exit_at"]),)
        if step.get("share"):
            options["max_iterations"] = round(step["share"] * iterations)
        stages.append(CurriculumStage(name=f"step {index}", levels=step["levels"], **options))
    return tuple(stages)


def train_sft_model(config: str, output: Path, threads: int, changes: list[str]) -> Path:
    """Train the SFT model of the config's pipeline."""
    from flows.post_training import run_pipeline
    from tasks.config import load_settings

    overrides = [f"output={output / 'sft'}", f"threads={threads}", *changes]
    overrides += [
        f"stages.{name}=null"
        for name in ("reward_model", "policy", "evaluate", "analyze", "promote")
    ]
    return Path(run_pipeline(load_settings(config, overrides), quiet=True).results["sft"].model)


def train_teacher(config: str, model: str, output: Path, episodes: int) -> str:
    """Train the teacher of the distillation, GRPO from the same SFT model with another seed; return its folder."""
    folder = output / "teacher"
    if not folder.is_dir():
        os.environ["OMP_NUM_THREADS"] = "1"
        logging.disable(logging.WARNING)
        bench = Bench(config, model)
        train(bench, Job("grpo", TEACHER_SEED, "algorithms", ALGORITHMS["grpo"]), episodes)
        bench.policy.save(folder)
    return str(folder)


class Bench:
    """State shared by all runs: environment, renderer, evaluation episodes."""

    def __init__(self, config: str, model: str) -> None:
        import torch

        from rl_core.environments import make_environment
        from rl_core.rollouts.heldout_episodes import (
            draw_heldout_requests,
            draw_validation_requests,
        )
        from rl_core.settings import EvaluationSettings, SamplingSettings
        from tasks.config import load_settings
        from tasks.stages.loading import load_policy

        torch.set_num_threads(1)
        self.pipeline = load_settings(config, ["threads=1"])
        self.environment = make_environment(
            self.pipeline.environment.name, dict(self.pipeline.environment.options)
        )
        self.policy = load_policy(model, self.pipeline)
        self.sampling = SamplingSettings(max_completion_tokens=64, max_turns=6, slots=256)
        self.reported = draw_heldout_requests(self.environment, EvaluationSettings(episodes=500), 0)
        levels = self.environment.levels
        self.validation = draw_validation_requests(
            self.environment, CURVE_EPISODES, levels, 0, self.reported
        )

    def measure_success(self, requests: Any, seed: int, backend: Any = None) -> list[bool]:
        """Return the success of each episode, played once."""
        from rl_core.evaluation import evaluate

        backend = backend or self.policy.backend()
        backend.refresh_weights()
        result = evaluate(
            self.environment,
            backend,
            self.policy.renderer,
            requests,
            samples=1,
            sampling=self.sampling,
            seed=seed,
        )
        return [episode.successes > 0 for episode in result.episodes]


class LaggedBackend:
    """Samples from the weights of `lag` iterations ago, from a copy of the model."""

    def __init__(self, bench: Bench, lag: int) -> None:
        from rl_core.api.policy import Policy

        policy = bench.policy
        self._live = policy.model
        self._copy = copy.deepcopy(policy.model)
        self._backend = Policy(self._copy, policy.tokenizer, policy.renderer).backend()
        self._past: collections.deque[dict[str, Any]] = collections.deque(maxlen=lag + 1)
        self.max_length = self._backend.max_length

    def refresh_weights(self) -> None:
        """Load the weights of `lag` iterations ago; called once before the rollouts of each iteration."""
        self._past.append(
            {name: tensor.clone() for name, tensor in self._live.state_dict().items()}
        )
        self._copy.load_state_dict(self._past[0])
        self._backend.refresh_weights()

    def set_end_tokens(self, eos_ids: Any) -> None:
        self._backend.set_end_tokens(eos_ids)

    def run_sequences(self, sequences: Any, sampling: Any) -> None:
        self._backend.run_sequences(sequences, sampling)


def build_policy_trainer(bench: Bench, job: Job, iterations: int) -> Any:
    """Build the trainer of a policy-gradient run."""
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import (
        CriticSettings,
        LearningRateControlSettings,
        PolicySettings,
        ReplaySettings,
    )
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

    options = {**COMMON, **job.settings}
    if isinstance(options.get("critic"), dict):
        options["critic"] = CriticSettings(**options["critic"])
    if isinstance(options.get("replay"), dict):
        options["replay"] = ReplaySettings(**options["replay"])
    if isinstance(control := options.get("learning_rate_control"), dict):
        options["learning_rate_control"] = LearningRateControlSettings(**control)
    if "schedule" in options:
        options["curriculum"] = build_stages(options.pop("schedule"), iterations)
    settings = PolicySettings(**options, iterations=iterations, sampling=bench.sampling)
    backend = LaggedBackend(bench, job.lag) if job.lag else bench.policy.backend()
    return PolicyGradientTrainer(
        bench.policy.model,
        None,
        bench.policy.renderer,
        bench.environment,
        settings,
        job.seed,
        RewardOrchestrator({"task": 1.0}),
        backend,
    )


def build_distillation_trainer(bench: Bench, job: Job, iterations: int, teacher: str) -> Any:
    """Build the trainer of a distillation, with as many rollouts an iteration as the others."""
    from rl_core.api.recipes.policy_gradient import build_distillation_recipe, load_teacher
    from rl_core.settings import DistillationSettings, SelfTeacherSettings

    options = {**COMMON, **job.settings}
    if isinstance(options.get("self_teacher"), dict):
        options["self_teacher"] = SelfTeacherSettings(**options["self_teacher"])
    settings = DistillationSettings(**options, iterations=iterations, sampling=bench.sampling)
    loaded = None
    if settings.self_teacher is None:
        loaded = load_teacher(settings.teacher, bench.policy, teacher)
    recipe = build_distillation_recipe(bench.policy, loaded, bench.environment, settings, job.seed)
    return recipe.trainer


def train(bench: Bench, job: Job, episodes: int, teacher: str = "") -> dict[str, Any]:
    """Train one run; return its curve, its final successes, its seconds."""
    iterations = episodes // BATCH
    if job.name in DISTILLATIONS:
        trainer = build_distillation_trainer(bench, job, iterations, teacher)
    else:
        trainer = build_policy_trainer(bench, job, iterations)
    curve = [(0, statistics.fmean(bench.measure_success(bench.validation, job.seed)))]
    seconds, weights, best, worse = 0.0, None, curve[0][1], 0
    every = max(1, iterations // CURVE_POINTS)
    while trainer.rollouts_played < episodes:
        started = time.perf_counter()
        metrics = trainer.step()
        seconds += time.perf_counter() - started
        if trainer.iteration % every == 0 or trainer.rollouts_played >= episodes:
            curve.append(
                (
                    trainer.rollouts_played,
                    statistics.fmean(bench.measure_success(bench.validation, job.seed)),
                )
            )
            print(f"{job.name} seed {job.seed}: {curve[-1]}", flush=True)
            if job.patience is not None:
                if curve[-1][1] > best:
                    best, worse, weights = (
                        curve[-1][1],
                        0,
                        copy.deepcopy(bench.policy.model.state_dict()),
                    )
                else:
                    worse += 1
                if worse >= job.patience:
                    break
    if weights is not None:
        bench.policy.model.load_state_dict(weights)
    keep = (
        "policy/effective_sample_share",
        "policy/sampler_kl",
        "policy/entropy",
        "value/explained_variance",
    )
    return {
        "curve": curve,
        "seconds": seconds,
        "episodes": trainer.rollouts_played,
        "last": {name: metrics[name] for name in keep if name in metrics},
        "moves": trainer.curriculum.export_history(),
    }


def train_pairs(bench: Bench, job: Job, episodes: int) -> dict[str, Any]:
    """Train DPO and IPO on the same number of episodes of the SFT model, as pairs."""
    import numpy as np

    from rl_core.data.pairs import build_pairs_from_groups
    from rl_core.rollouts.collect import collect_rollouts
    from rl_core.rollouts.episode_sequence import EpisodeRequest
    from rl_core.settings import PreferenceSettings
    from rl_core.trainers.preference import PreferenceTrainer

    rng = np.random.default_rng(job.seed)
    started = time.perf_counter()
    levels = bench.environment.levels
    requests = [
        EpisodeRequest(levels[i % len(levels)], int(rng.integers(2**30)))
        for i in range(episodes // 8)
    ]
    groups = []
    for start in range(0, len(requests), 64):
        groups += collect_rollouts(
            bench.environment,
            bench.policy.backend(),
            bench.policy.renderer,
            requests[start : start + 64],
            group_size=8,
            sampling=bench.sampling,
            seed=job.seed * 1000 + start,
        )
    pairs = build_pairs_from_groups(groups, 4, job.seed)
    curve = [(0, statistics.fmean(bench.measure_success(bench.validation, job.seed)))]
    beta = 0.1 if job.settings["loss"] == "dpo" else 0.5
    settings = PreferenceSettings(
        loss=job.settings["loss"],
        beta=beta,
        sft_coef=1.0,
        epochs=2,
        batch_size=64,
        learning_rate=1e-3,
        warmup_steps=10,
        schedule="linear",
    )
    trainer = PreferenceTrainer(
        bench.policy.model, bench.policy.renderer.pad_id, pairs, [], settings, job.seed
    )
    for index in range(trainer.total_steps):
        trainer.step()
        if (index + 1) % max(1, trainer.total_steps // 3) == 0:
            share = (index + 1) / trainer.total_steps
            success = statistics.fmean(bench.measure_success(bench.validation, job.seed))
            curve.append((round(share * episodes), success))
            print(f"{job.name} seed {job.seed}: {curve[-1]}", flush=True)
    return {
        "curve": curve,
        "seconds": time.perf_counter() - started,
        "episodes": episodes,
        "pairs": len(pairs),
    }


def run_job(config: str, model: str, teacher: str, job: Job, episodes: int, path: str) -> str:
    """Run a job in a separate process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.disable(logging.WARNING)
    bench = Bench(config, model)
    if job.name == "sft":
        result: dict[str, Any] = {
            "curve": [(0, statistics.fmean(bench.measure_success(bench.validation, job.seed)))]
        }
    elif "loss" in job.settings:
        result = train_pairs(bench, job, episodes)
    else:
        budget = 2 * episodes if job.part == "stopping" else episodes
        result = train(bench, job, budget, teacher)
    result["success"] = bench.measure_success(bench.reported, 1000 + job.seed)
    result["levels"] = [request.level for request in bench.reported]
    Path(path).write_text(json.dumps(result))
    return job.name
