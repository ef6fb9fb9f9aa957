"""Variance of the thoughts' policy gradient by baseline and GAE, on the same rollouts of a policy that stays as it is.

The term of the thoughts alone. Baselines have learned from `WARMUP` batches of other rollouts before. Variance: trace
of the gradient's covariance for a batch of `EPISODES` episodes, over `BATCHES` batches; signal: unbiased square of the
mean gradient's length.
"""

from __future__ import annotations

import torch

from claimed.tasks import TASKS, find_start

WARMUP, BATCHES, EPISODES = 30, 40, 32
KINDS = {
    "no baseline": dict(advantages="returns"),
    "returns, linear baseline": dict(advantages="returns"),
    "returns, MLP baseline": dict(advantages="returns", baseline_layers=2),
    "GAE 0.95, linear baseline": dict(),
    "GAE 0.95, MLP baseline": dict(baseline_layers=2),
    "GAE 0.8, linear baseline": dict(gae_lambda=0.8),
}


def list_runs(output):
    """List one run per seed, of all kinds on the same rollouts."""
    return {"variance": lambda seed: measure(output, seed)}


def measure(output, seed):
    """Return variance, signal and the baseline's explained variance, by kind."""
    import rl_core
    from rl_core.settings import ThoughtsSettings
    from rl_core.thoughts.episodes import build_answer_rows
    from rl_core.thoughts.trainer import ThoughtsTrainer

    task = TASKS["reckoning"]
    policy = rl_core.load_policy(find_start("reckoning", output))
    common = dict(
        iterations=WARMUP + BATCHES,
        episodes_per_iteration=EPISODES,
        max_thought_tokens=32,
        answer_coef=0.0,
        entropy_coef=0.0,
        entropy_floor=0.0,
        levels=task.levels,
        sampling=task.sampling,
        patience=None,
        eval_every=0,
    )
    trainers = {
        name: ThoughtsTrainer(
            policy.model,
            policy.renderer,
            task.build_prompt(),
            ThoughtsSettings(**common, **options),
            seed,
            policy.backend(),
        )
        for name, options in KINDS.items()
    }
    player = trainers["no baseline"]
    player.baseline.predict_values = lambda states_NH: torch.zeros(len(states_NH))
    gradients, explained = {name: [] for name in KINDS}, {name: [] for name in KINDS}
    for batch in range(WARMUP + BATCHES):
        player.iteration = batch
        rng = player._build_generator()
        requests = [player._draw_episode(rng) for _ in range(EPISODES)]
        episodes = player._read_thought_episodes(
            player._play_single_rollouts(requests, "rollouts", batch)
        )
        plan = build_answer_rows(episodes)
        rewards, _ = player._compute_rewards(episodes, plan)
        for name, trainer in trainers.items():
            advantages, metrics = trainer._compute_advantages(episodes, rewards)
            if batch >= WARMUP:
                gradients[name].append(compute_gradient(trainer, episodes, plan, advantages))
                explained[name].append(metrics["train/explained_variance"])
    kinds = {}
    for name, rows in gradients.items():
        stacked = torch.stack(rows).double()
        mean = stacked.mean(0)
        variance = float((stacked - mean).square().sum() / (len(rows) - 1))
        kinds[name] = {
            "variance": variance,
            "signal": float(mean.square().sum()) - variance / len(rows),
            "explained": sum(explained[name]) / len(explained[name]),
        }
    return {"kinds": kinds}


def compute_gradient(trainer, episodes, plan, advantages):
    """Return the gradient of the thoughts' term, flat; nothing is updated."""
    gradients = []

    def apply(batches, loss):
        trainer.model.zero_grad()
        for batch in batches:
            loss(batch)[0].backward()
        gradients.append(
            torch.cat(
                [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
            ).clone()
        )
        trainer.model.zero_grad()
        return {}

    original, trainer.optimizer_step.apply = trainer.optimizer_step.apply, apply
    try:
        trainer._update(episodes, plan, advantages)
    finally:
        trainer.optimizer_step.apply = original
    return gradients[0]
