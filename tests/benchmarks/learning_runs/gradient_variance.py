"""Variance of the policy gradient, by credit assignment, over independent batches of the same rollouts."""

from __future__ import annotations

from typing import Any

from learning_runs.jobs import COMMON
from learning_runs.training import Bench


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

    def build_settings(options: dict[str, Any]) -> Any:
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

    def build_trainer(options: dict[str, Any]) -> Any:
        return PolicyGradientTrainer(
            bench.policy.model,
            None,
            bench.policy.renderer,
            bench.environment,
            build_settings(options),
            0,
            RewardOrchestrator({"task": 1.0}),
            bench.policy.backend(),
        )

    player = build_trainer(dict(algorithm="ppo", prompts_per_iteration=16, epochs=2))
    for _ in range(warmup):
        explained = player.step()["value/explained_variance"]
    print(f"critic after {warmup} iterations: explained variance {explained:.2f}", flush=True)
    player.settings = build_settings(dict(algorithm="ppo"))
    gradients: dict[str, list[Any]] = {name: [] for name in kinds}
    for index in range(batches):
        rng = np.random.default_rng([1, index])
        player.iteration = 10_000 + index
        _, groups, _ = player._play_and_score(rng)
        for name, options in kinds.items():
            gradient = compute_gradient(
                player.actor_critic,
                build_settings(options),
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

        def use_rewards_alone(*arguments: Any) -> Any:
            metrics = estimate(*arguments)
            rewards_R = torch.tensor([sample.reward for sample in update.buffer.samples])
            update.buffer.advantages_RS = update.buffer.mask_RS * rewards_R[:, None]
            return metrics

        update.buffer.estimate_advantages = use_rewards_alone
    caught: list[Any] = []

    def catch_gradient(batches: Any, loss: Any) -> dict[str, float]:
        updated.policy.zero_grad()
        for batch in batches:
            loss(batch)[0].backward()
        caught.append(torch.cat([p.grad.flatten() for p in updated.policy.parameters()]).clone())
        updated.policy.zero_grad()
        return {}

    step = updated.optimizer_step
    original, step.run_step = step.run_step, catch_gradient
    try:
        update.run_optimizer_steps(np.random.default_rng(0))
    finally:
        step.run_step = original
    size = sum(p.numel() for p in updated.policy.parameters())
    return caught[0] if caught else torch.zeros(size)
