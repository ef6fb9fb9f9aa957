"""Every algorithm from the same SFT model, for the same number of episodes, over several seeds; and what others claim.

    python tests/benchmarks/learning.py --output OUT [--config configs/demo.yaml] [--episodes 8960] [--seeds 3]
        [--workers 2] [--only 'grpo;ppo'] [--parts algorithms,variants,staleness,...]

The SFT model is that of the config's pipeline (run first, its stages cached in OUT). Each run is one process with one
thread and writes OUT/jobs/<name>-<seed>.json; existing files are not run again, so the benchmark can be interrupted.
At the end: OUT/learning.md (tables for docs/benchmarks/learning.md) and OUT/learning.png (success against episodes).

Success is sampled at temperature 1. Curves are measured on 200 validation episodes, the tables on 500 other held-out
episodes; intervals are 95% intervals over episodes, each played once by every seed's model.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

BATCH = 128  # episodes of one iteration
CURVE_EPISODES, CURVE_POINTS = 200, 7
COMMON = dict(
    prompts_per_iteration=16,
    group_size=8,
    learning_rate=5e-4,
    warmup_steps=5,
)
TWICE = dict(
    epochs=2, minibatches=2, learning_rate=3e-4
)  # several steps on the same rollouts: the clip has work to do

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": dict(algorithm="grpo"),
    "dr_grpo": dict(algorithm="dr_grpo", learning_rate=5e-4),
    "dapo": dict(algorithm="dapo", overlong_buffer=0),
    "gspo": dict(algorithm="gspo", **TWICE),
    "cispo": dict(algorithm="cispo", **TWICE),
    "sapo": dict(algorithm="sapo", **TWICE),
    "rloo": dict(algorithm="rloo"),
    "reinforce": dict(algorithm="reinforce"),
    "ppo": dict(algorithm="ppo", critic=dict(learning_rate=1e-3)),
    "dpo": dict(loss="dpo"),
    "ipo": dict(loss="ipo"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo, limits bootstrapped": dict(
        algorithm="ppo", critic=dict(learning_rate=1e-3, bootstrap_limits=True)
    ),
    "ppo, shared head": dict(algorithm="ppo", critic=dict(kind="shared")),
    "ppo, two epochs": dict(algorithm="ppo", critic=dict(learning_rate=1e-3), **TWICE),
    "grpo + replay": dict(
        algorithm="grpo", importance="token", replay=dict(iterations=4, share=0.5)
    ),
    "grpo, muon": dict(algorithm="grpo", optimizer="muon"),
}
LAGS = (1, 4, 16)
WEIGHTS = ("none", "token")
GROUPS = (2, 4, 16, 32)  # 8 is `grpo`
STEPS = (
    {"easy": 6, "medium": 3, "hard": 1},
    {"easy": 2, "medium": 5, "hard": 3},
    {"easy": 2, "medium": 3, "hard": 5},
)
SCHEDULES: dict[
    str, list[dict[str, Any]]
] = {  # how the levels are mixed; all of them equally often is `grpo`
    "curriculum by success": [
        dict(levels=levels, exit_at=threshold)
        for levels, threshold in zip(STEPS, (0.75, 0.85, None), strict=True)
    ],
    "fixed schedule": [
        dict(levels=levels, share=share)
        for levels, share in zip(STEPS, (1 / 3, 1 / 3, None), strict=True)
    ],
    "hard alone": [dict(levels={"hard": 1})],
}


@dataclass
class Job:
    """One training run."""

    name: str
    seed: int
    part: str
    settings: dict[str, Any] = field(default_factory=dict)
    lag: int = 0  # updates by which the sampling weights lag behind
    patience: int | None = None

    @property
    def file(self) -> str:
        return (
            f"{self.name}-{self.seed}.json".replace(" ", "_").replace(",", "").replace("+", "with")
        )


def list_jobs(seeds: int, parts: list[str]) -> list[Job]:
    jobs: list[Job] = []
    for seed in range(seeds):
        if "algorithms" in parts:
            jobs += [Job(name, seed, "algorithms", options) for name, options in ALGORITHMS.items()]
        if "variants" in parts:
            jobs += [Job(name, seed, "variants", options) for name, options in VARIANTS.items()]
        if "staleness" in parts:
            for lag in LAGS:
                for level in WEIGHTS:
                    options = dict(importance=level, sampler_kl_max=1e6)
                    jobs.append(Job(f"lag {lag} {level}", seed, "staleness", options, lag=lag))
        if "groups" in parts:
            for size in GROUPS:
                options = dict(group_size=size, prompts_per_iteration=BATCH // size)
                jobs.append(Job(f"group {size}", seed, "groups", options))
        if "curriculum" in parts:
            jobs += [
                Job(name, seed, "curriculum", dict(schedule=steps))
                for name, steps in SCHEDULES.items()
            ]
        if "stopping" in parts:
            jobs.append(Job("stopped early", seed, "stopping", patience=3))
    return jobs


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


def make_sft(config: str, output: Path, threads: int, changes: list[str]) -> Path:
    """Make the SFT model of the config's pipeline."""
    from flows.post_training import run_pipeline
    from tasks.config import load_settings

    overrides = [f"output={output / 'sft'}", f"threads={threads}", *changes]
    overrides += [
        f"stages.{name}=null"
        for name in ("reward_model", "policy", "evaluate", "analyze", "promote")
    ]
    return Path(run_pipeline(load_settings(config, overrides), quiet=True).results["sft"].model)


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

    def success(self, requests: Any, seed: int, backend: Any = None) -> list[bool]:
        """Return the success of each episode, played once."""
        from rl_core.evaluation import evaluate

        backend = backend or self.policy.backend()
        backend.refresh()
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

    def refresh(self) -> None:
        """Refresh the weights; called once before the rollouts of each iteration."""
        self._past.append(
            {name: tensor.clone() for name, tensor in self._live.state_dict().items()}
        )
        self._copy.load_state_dict(self._past[0])
        self._backend.refresh_weights()

    def run(self, sequences: Any, sampling: Any) -> None:
        self._backend.run_sequences(sequences, sampling)


def train(bench: Bench, job: Job, episodes: int) -> dict[str, Any]:
    """Train one run; return its curve, its final successes, its seconds."""
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import CriticSettings, PolicySettings, ReplaySettings
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

    options = {**COMMON, **job.settings}
    if isinstance(options.get("critic"), dict):
        options["critic"] = CriticSettings(**options["critic"])
    if isinstance(options.get("replay"), dict):
        options["replay"] = ReplaySettings(**options["replay"])
    iterations = episodes // BATCH
    if "schedule" in options:
        options["curriculum"] = build_stages(options.pop("schedule"), iterations)
    settings = PolicySettings(**options, iterations=iterations, sampling=bench.sampling)
    backend = LaggedBackend(bench, job.lag) if job.lag else bench.policy.backend()
    trainer = PolicyGradientTrainer(
        bench.policy.model,
        None,
        bench.policy.renderer,
        bench.environment,
        settings,
        job.seed,
        RewardOrchestrator({"task": 1.0}),
        backend,
    )
    curve = [(0, statistics.fmean(bench.success(bench.validation, job.seed)))]
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
                    statistics.fmean(bench.success(bench.validation, job.seed)),
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
    """Train DPO and IPO on the same number of episodes of the SFT model, made into pairs."""
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
    curve = [(0, statistics.fmean(bench.success(bench.validation, job.seed)))]
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
            success = statistics.fmean(bench.success(bench.validation, job.seed))
            curve.append((round(share * episodes), success))
            print(f"{job.name} seed {job.seed}: {curve[-1]}", flush=True)
    return {
        "curve": curve,
        "seconds": time.perf_counter() - started,
        "episodes": episodes,
        "pairs": len(pairs),
    }


def run_job(config: str, model: str, job: Job, episodes: int, path: str) -> str:
    """Run a job in a separate process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.disable(logging.WARNING)
    bench = Bench(config, model)
    if job.name == "sft":
        result: dict[str, Any] = {
            "curve": [(0, statistics.fmean(bench.success(bench.validation, job.seed)))]
        }
    elif "loss" in job.settings:
        result = train_pairs(bench, job, episodes)
    else:
        result = train(bench, job, 2 * episodes if job.part == "stopping" else episodes)
    result["success"] = bench.success(bench.reported, 1000 + job.seed)
    result["levels"] = [request.level for request in bench.reported]
    Path(path).write_text(json.dumps(result))
    return job.name


def measure_gradient_variance(
    config: str, model: str, batches: int, warmup: int
) -> dict[str, dict[str, float]]:
    """Measure the variance of the policy gradient over independent batches of rollouts, by credit assignment.

    The same rollouts for every kind; the critic has learnt from `warmup` iterations of other rollouts, the policy
    stays as it is. Variance: trace of the gradient's covariance, for one batch of 32 rollouts.
    """
    import numpy as np
    import torch

    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import CriticSettings, PolicySettings
    from rl_core.trainers.policy_gradient.samples import build_sample_groups
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
    from rl_core.trainers.policy_gradient.update import PolicyUpdate

    bench = Bench(config, model)
    kinds: dict[str, dict[str, Any]] = {
        "no baseline": dict(algorithm="rloo"),
        "group mean (RLOO)": dict(algorithm="rloo"),
        "critic, lambda 1": dict(algorithm="ppo", gae_lambda=1.0),
        "critic, GAE lambda 0.95": dict(algorithm="ppo", gae_lambda=0.95),
        "critic, GAE lambda 0.8": dict(algorithm="ppo", gae_lambda=0.8),
    }

    def settings_of(options: dict[str, Any]) -> Any:
        critic = (
            CriticSettings(learning_rate=1e-3, warmup_iterations=warmup)
            if options["algorithm"] == "ppo"
            else None
        )
        return PolicySettings(
            **{**COMMON, "prompts_per_iteration": 4, **options},
            iterations=warmup + batches,
            sampling=bench.sampling,
            critic=critic,
            whiten_advantages=False,
        )

    def trainer_of(options: dict[str, Any]) -> Any:
        return PolicyGradientTrainer(
            bench.policy.model,
            None,
            bench.policy.renderer,
            bench.environment,
            settings_of(options),
            0,
            RewardOrchestrator({"task": 1.0}),
            bench.policy.backend(),
        )

    player = trainer_of(dict(algorithm="ppo", prompts_per_iteration=16, epochs=2))
    for _ in range(warmup):
        explained = player.step()["value/explained_variance"]
    print(f"critic after {warmup} iterations: explained variance {explained:.2f}", flush=True)
    player.settings = settings_of(dict(algorithm="ppo"))
    gradients: dict[str, list[Any]] = {name: [] for name in kinds}
    for index in range(batches):
        rng = np.random.default_rng([1, index])
        player.iteration = 10_000 + index
        _, groups, _ = player._play_and_score(rng)
        for name, options in kinds.items():
            gradient = compute_gradient(
                player.actor_critic,
                settings_of(options),
                build_sample_groups(groups),
                name,
                PolicyUpdate,
            )
            gradients[name].append(gradient)
    report = {}
    for name, rows in gradients.items():
        stacked = torch.stack(rows).double()
        mean = stacked.mean(0)
        variance = float((stacked - mean).square().sum() / (batches - 1))
        signal = (
            float(mean.square().sum()) - variance / batches
        )  # unbiased square of the mean gradient's length
        report[name] = {
            "variance": variance,
            "signal": signal,
            "noise_to_signal": variance / max(signal, 1e-12),
        }
    base = gradients["no baseline"]
    for name, rows in gradients.items():
        a, b = torch.stack(base).mean(0), torch.stack(rows).mean(0)
        report[name]["cosine"] = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
    report["critic, GAE lambda 0.95"]["explained_variance"] = explained
    return report


def compute_gradient(
    actor_critic: Any, settings: Any, groups: Any, name: str, update_class: Any
) -> Any:
    import dataclasses

    import numpy as np
    import torch

    updated = dataclasses.replace(actor_critic, critic_optimizer_step=None)
    if settings.algorithm != "ppo":
        updated = dataclasses.replace(updated, critic=None)
    update = update_class(updated, settings, groups)
    if name == "no baseline":
        estimate = update.buffer.estimate_advantages

        def raw(*arguments: Any) -> Any:
            metrics = estimate(*arguments)
            rewards_R = torch.tensor([sample.reward for sample in update.buffer.samples])
            update.buffer.advantages_RS = update.buffer.mask_RS * rewards_R[:, None]
            return metrics

        update.buffer.estimate_advantages = raw
    caught: list[Any] = []

    def apply(batches: Any, loss: Any) -> dict[str, float]:
        updated.policy.zero_grad()
        for batch in batches:
            loss(batch)[0].backward()
        caught.append(torch.cat([p.grad.flatten() for p in updated.policy.parameters()]).clone())
        updated.policy.zero_grad()
        return {}

    original, updated.optimizer_step.apply = updated.optimizer_step.apply, apply
    try:
        update.run(np.random.default_rng(0))
    finally:
        updated.optimizer_step.apply = original
    size = sum(p.numel() for p in updated.policy.parameters())
    return caught[0] if caught else torch.zeros(size)


# ------------------------------------------------------------------------------------------------------------ report


def estimate_rate(results: list[dict[str, Any]]) -> Any:
    """Estimate the success over all seeds, episodes as clusters."""
    import numpy as np

    from rl_core.analysis.statistics import compute_clustered_rate

    success_SE = np.array([result["success"] for result in results], dtype=np.int64)
    return compute_clustered_rate(success_SE.sum(0), np.full(success_SE.shape[1], len(results)))


def load_results(output: Path, seeds: int) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    jobs = [Job("sft", seed, "algorithms") for seed in range(seeds)]
    jobs += list_jobs(
        seeds, ["algorithms", "variants", "staleness", "groups", "curriculum", "stopping"]
    )
    for job in jobs:
        path = output / "jobs" / job.file
        if path.is_file():
            results.setdefault(job.name, []).append(json.loads(path.read_text()))
    return results


def report(output: Path, seeds: int, episodes: int) -> None:
    results = load_results(output, seeds)
    sft = estimate_rate(results["sft"])
    lines = [
        f"{episodes} episodes for every algorithm, {seeds} seeds; 500 held-out episodes, played once by each model.",
        "",
        "| algorithm | success [95%] | each seed | above SFT | seconds of a run | steps on each rollout |",
        "|---|---|---|---|---|---|",
        f"| SFT (the start) | {show(sft)} | {format_percentages(results['sft'])} | | | |",
    ]
    recipes = ALGORITHMS | VARIANTS
    names = sorted(
        (n for n in recipes if n in results), key=lambda n: -estimate_rate(results[n]).rate
    )
    for name in names:
        rate = estimate_rate(results[name])
        clear = "yes" if rate.low > sft.high else "no"
        seconds = statistics.fmean(result["seconds"] for result in results[name])
        epochs = recipes[name].get("epochs", 2 if "loss" in recipes[name] else 1)
        lines.append(
            f"| {name} | {show(rate)} | {format_percentages(results[name])} | {clear} | {seconds:.0f} | {epochs} |"
        )
    stale = [f"lag {lag} {kind}" for lag in LAGS for kind in WEIGHTS]
    lines += [
        "",
        *format_table(results, stale, "rollouts stale by so many updates, importance weights"),
    ]
    groups = [f"group {size}" if size != 8 else "grpo" for size in sorted((*GROUPS, 8))]
    lines += ["", *format_table(results, groups, "group size at equal episodes")]
    if any(name in results for name in SCHEDULES):
        lines += ["", *format_schedules(results)]
    if "stopped early" in results:
        stopped = results["stopped early"]
        used = statistics.fmean(result["episodes"] for result in stopped)
        lines += [
            "",
            f"Early stopping (patience 3 evaluations) within a budget of {2 * episodes} episodes: stopped after "
            f"{used:.0f} on average, {1 - used / (2 * episodes):.0%} saved; success {show(estimate_rate(stopped))} "
            f"({format_percentages(stopped)}).",
        ]
    variance = output / "variance.json"
    if variance.is_file():
        rows = json.loads(variance.read_text())
        base = rows["no baseline"]["variance"]
        lines += [
            "",
            "| credit | variance of the gradient | against no baseline | cosine of mean gradients |",
        ]
        lines.append("|---|---|---|---|")
        for name, row in rows.items():
            lines.append(
                f"| {name} | {row['variance']:.4g} | {row['variance'] / base:.2f} | {row['cosine']:.2f} |"
            )
    text = "\n".join(lines) + "\n"
    (output / "learning.md").write_text(text)
    print(text)
    draw_curves(results, names, output / "learning.png")


def show(rate: Any) -> str:
    return f"{rate.rate:.1%} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def format_percentages(results: list[dict[str, Any]]) -> str:
    return ", ".join(f"{100 * statistics.fmean(result['success']):.1f}" for result in results)


def format_schedules(results: dict[str, Any]) -> list[str]:
    """Tabulate success by level, and when the last step of each schedule began."""
    levels = sorted(
        {level for rows in results.values() for row in rows for level in row.get("levels", ())}
    )
    lines = [
        f"| levels in training | success [95%] | each seed | {' | '.join(levels)} | last step from episode |",
        "|" + "---|" * (4 + len(levels)),
    ]
    for name in ("sft", "grpo", *SCHEDULES):
        rows = [row for row in results.get(name, ()) if "levels" in row]
        if not rows:
            continue
        shares = []
        for level in levels:
            shares_of_seeds = [
                ok
                for row in rows
                for ok, at in zip(row["success"], row["levels"], strict=True)
                if at == level
            ]
            shares.append(f"{statistics.fmean(shares_of_seeds):.1%}")
        last = ", ".join(
            str(BATCH * row["moves"][-1]["iteration"]) if row.get("moves") else "-" for row in rows
        )
        title = {"sft": "SFT (the start)", "grpo": "all equally often"}.get(name, name)
        lines.append(
            f"| {title} | {show(estimate_rate(rows))} | {format_percentages(rows)} | {' | '.join(shares)} | {last} |"
        )
    return lines


def format_table(results: dict[str, Any], names: list[str], title: str) -> list[str]:
    lines = [
        f"| {title} | success [95%] | each seed | sampler KL | effective samples |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        if name in results:
            last = [result["last"] for result in results[name]]
            kl = statistics.fmean(row.get("policy/sampler_kl", 0.0) for row in last)
            share = [
                row["policy/effective_sample_share"]
                for row in last
                if "policy/effective_sample_share" in row
            ]
            ess = f"{statistics.fmean(share):.0%}" if share else ""
            lines.append(
                f"| {name} | {show(estimate_rate(results[name]))} | {format_percentages(results[name])} "
                f"| {kl:.2g} | {ess} |"
            )
    return lines


def draw_curves(results: dict[str, Any], names: list[str], path: Path) -> None:
    """Draw success against episodes: mean over the seeds, and their spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    columns = 4
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(12, 2.6 * rows), sharex=True, sharey=True, squeeze=False
    )
    base = estimate_rate(results["sft"])
    for axis, name in zip(axes.flat, names, strict=False):
        curves = [result["curve"] for result in results[name]]
        length = min(map(len, curves))
        x = np.mean([[point[0] for point in curve[:length]] for curve in curves], axis=0)
        y = np.array([[point[1] for point in curve[:length]] for curve in curves])
        axis.axhspan(base.low, base.high, color="#D9DEE4", zorder=0)
        axis.fill_between(x, y.min(0), y.max(0), color="#0072B2", alpha=0.2, linewidth=0)
        axis.plot(x, y.mean(0), color="#0072B2", marker="o", markersize=3)
        axis.set_title(f"{name}: {estimate_rate(results[name]).rate:.0%}", fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1)
    for axis in axes[-1]:
        axis.set_xlabel("episodes")
    for row in axes:
        row[0].set_ylabel("success")
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    figure.suptitle(
        "Success on 200 validation episodes: mean and range over seeds; grey: the SFT model's interval"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", default=str(ROOT / "configs/demo.yaml"))
    parser.add_argument(
        "--model", help="SFT model folder; left out: the config's pipeline makes it"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="changes the SFT's pipeline"
    )
    parser.add_argument("--episodes", type=int, default=8960)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help="names, separated by semicolons")
    parser.add_argument(
        "--parts", default="algorithms,variants,staleness,groups,curriculum,stopping,variance"
    )
    options = parser.parse_args()
    output: Path = options.output.resolve()
    (output / "jobs").mkdir(parents=True, exist_ok=True)
    model = options.model or str(make_sft(options.config, output, options.workers, options.set))
    parts = options.parts.split(",")
    jobs = [Job("sft", seed, "algorithms") for seed in range(options.seeds)] + list_jobs(
        options.seeds, parts
    )
    if options.only:
        jobs = [job for job in jobs if job.name in options.only.split(";")]
    jobs = [job for job in jobs if not (output / "jobs" / job.file).is_file()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        futures = {
            pool.submit(
                run_job,
                options.config,
                model,
                job,
                options.episodes,
                str(output / "jobs" / job.file),
            ): job
            for job in jobs
        }
        for number, future in enumerate(as_completed(futures), 1):
            try:
                print(
                    f"[{number}/{len(jobs)}] {future.result()} seed {futures[future].seed}",
                    flush=True,
                )
            except Exception as error:
                failed = f"{futures[future].name} FAILED: {type(error).__name__}: {error}"
                print(f"[{number}/{len(jobs)}] {failed}", flush=True)
    if "variance" in parts and not (output / "variance.json").is_file():
        variance = measure_gradient_variance(options.config, model, batches=64, warmup=20)
        (output / "variance.json").write_text(json.dumps(variance))
    report(output, options.seeds, options.episodes)


if __name__ == "__main__":
    main()
