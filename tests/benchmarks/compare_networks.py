"""PPO of networks against stable-baselines3's PPO with the same hyperparameters: learning curves, steps per second.

    python -m posttrain.install --extras gymnasium && pip install stable-baselines3
    python tests/benchmarks/compare_networks.py --output DIR [--seeds 5] [--steps 100000] [--environment CartPole-v1]

For speed alone: `--steps 16384 --episodes 1`.

stable-baselines3 is no dependency of the project, so it is installed by hand. Both train in this process, on
`--threads` threads, seed by seed in turns: the order alternates, so that a machine that slows down slows both. Seconds
are those from the first step to the last update; making the environments and the evaluation are left out. On a machine
with other work processor time tells more than the clock. Both are then evaluated greedily on the same seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

# Of stable-baselines3's zoo for CartPole-v1, but with a constant clip. Theirs -> ours: vf_coef 0.5 of the full squared
# error is value_coef 1.0 of its half.
SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "num_environments": 8,
        "rollout_steps": 32,
        "epochs": 20,
        "minibatches": 1,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "learning_rate": 1e-3,
        "schedule": "linear",
    },
    "Pendulum-v1": {
        "num_environments": 4,
        "rollout_steps": 1024,
        "epochs": 10,
        "minibatches": 64,
        "gamma": 0.9,
        "gae_lambda": 0.95,
        "learning_rate": 1e-3,
        "schedule": "constant",
    },
    "LunarLander-v3": {
        "num_environments": 16,
        "rollout_steps": 1024,
        "epochs": 4,
        "minibatches": 256,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "learning_rate": 3e-4,
        "schedule": "constant",
        "entropy_coef": 0.01,
    },
}
TEST_SEED = 2**30 + 2**29  # held-out seeds from here on


def train_ours(environment: str, steps: int, seed: int, episodes: int) -> dict[str, Any]:
    import rl_core

    hyperparameters = SETTINGS[environment]
    settings = rl_core.NetworkSettings(
        environment_steps=steps, eval_episodes=1, checkpoint_every=0, **hyperparameters
    )
    curve: list[tuple[float, float]] = []
    ended = [0.0, 0.0]

    def note(event: Any) -> None:
        if event.kind == "iteration":
            ended[:] = time.perf_counter(), time.process_time()
            if "train/episode_return" in event.metrics:
                curve.append(
                    (
                        event.metrics["train/environment_steps"],
                        event.metrics["train/episode_return"],
                    )
                )

    training = rl_core.network_ppo(environment, settings=settings, seed=seed, callbacks=[note])
    started = time.perf_counter(), time.process_time()
    training.run()
    return {
        "curve": curve,
        "seconds": ended[0] - started[0],
        "processor_seconds": ended[1] - started[1],
        "steps": training.trainer.environment_steps,
        "returns": test(environment, training.model.act, episodes),
    }


def train_peer(environment: str, steps: int, seed: int, episodes: int) -> dict[str, Any]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    hyperparameters = SETTINGS[environment]
    curve: list[tuple[float, float]] = []

    class Note(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            if self.model.ep_info_buffer:
                mean = statistics.fmean(episode["r"] for episode in self.model.ep_info_buffer)
                curve.append((float(self.num_timesteps), mean))

    rate = hyperparameters["learning_rate"]
    size = hyperparameters["num_environments"] * hyperparameters["rollout_steps"]
    model = PPO(
        "MlpPolicy",
        make_vec_env(environment, n_envs=hyperparameters["num_environments"], seed=seed),
        seed=seed,
        device="cpu",
        n_steps=hyperparameters["rollout_steps"],
        batch_size=size // hyperparameters["minibatches"],
        n_epochs=hyperparameters["epochs"],
        gamma=hyperparameters["gamma"],
        gae_lambda=hyperparameters["gae_lambda"],
        clip_range=0.2,
        ent_coef=hyperparameters.get("entropy_coef", 0.0),
        vf_coef=0.5,
        max_grad_norm=0.5,
        learning_rate=(lambda left: rate * left)
        if hyperparameters["schedule"] == "linear"
        else rate,
    )
    started = time.perf_counter(), time.process_time()
    model.learn(steps, callback=Note())
    seconds, processor = time.perf_counter() - started[0], time.process_time() - started[1]

    def act(observations: Any) -> Any:
        import torch

        return torch.as_tensor(model.predict(observations.numpy(), deterministic=True)[0])

    return {
        "curve": curve,
        "seconds": seconds,
        "processor_seconds": processor,
        "steps": model.num_timesteps,
        "returns": test(environment, act, episodes),
    }


def test(environment: str, act: Any, episodes: int) -> list[float]:
    """Returns of episodes from the same seeds for both, one after the other."""
    import gymnasium
    import numpy as np
    import torch

    world, returns = gymnasium.make(environment), []
    for number in range(episodes):
        seen, _ = world.reset(seed=TEST_SEED + number)
        total, is_over = 0.0, False
        while not is_over:
            action = act(torch.from_numpy(np.asarray(seen, np.float32)[None]))[0].numpy()
            if hasattr(world.action_space, "low"):
                action = np.clip(action, world.action_space.low, world.action_space.high)
            seen, reward, terminated, truncated, _ = world.step(action)
            total, is_over = total + float(reward), terminated or truncated
        returns.append(total)
    world.close()
    return returns


def read_curve(curve: list[tuple[float, float]], steps: float) -> float:
    """Return the newest value of a curve after so many steps."""
    return next((value for step, value in reversed(curve) if step <= steps), float("nan"))


def format_table(all_runs: list[dict[str, Any]], steps: int) -> str:
    """Format the results as Markdown."""
    lines = ["| | posttrain | stable-baselines3 |", "|---|---|---|"]
    sides = {
        name: [run for run in all_runs if run["name"] == name]
        for name in ("posttrain", "stable-baselines3")
    }
    for share in (0.25, 0.5, 0.75, 1.0):
        means = []
        for runs in sides.values():
            values = [read_curve(run["curve"], share * steps) for run in runs]
            means.append(f"{statistics.fmean(values):.0f} ({min(values):.0f} to {max(values):.0f})")
        lines.append(
            f"| return of the newest 100 episodes after {share * steps:,.0f} steps | {' | '.join(means)} |"
        )
    tested = [
        " ".join(f"{statistics.fmean(run['returns']):.1f}" for run in runs)
        for runs in sides.values()
    ]
    count = len(all_runs[0]["returns"])
    lines.append(
        f"| mean of {count} greedy held-out episodes, seed by seed | {' | '.join(tested)} |"
    )
    for key, label in (("seconds", "second"), ("processor_seconds", "second of processor time")):
        speeds = {name: [run["steps"] / run[key] for run in runs] for name, runs in sides.items()}
        cells = [
            f"{statistics.median(all_):,.0f} ({min(all_):,.0f} to {max(all_):,.0f})"
            for all_ in speeds.values()
        ]
        lines.append(f"| steps per {label}, median (range) | {' | '.join(cells)} |")
        pairs = [mine / other for mine, other in zip(*speeds.values(), strict=True)]
        ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
        lines.append(f"| the same over stable-baselines3's, seed by seed | {ratio} | 1 |")
    return "\n".join(lines)


def draw_curves(runs: list[dict[str, Any]], path: Path, environment: str) -> None:
    """Draw learning curves of both."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        colour = "#1f6f8b" if run["name"] == "posttrain" else "#d1495b"
        label = run["name"] if run["seed"] == 0 else None
        axes.plot(
            *zip(*run["curve"], strict=True), color=colour, alpha=0.7, linewidth=1.2, label=label
        )
    axes.set(
        xlabel="environment steps",
        ylabel="mean return of the newest 100 episodes",
        title=environment,
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--environment", choices=sorted(SETTINGS), default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--episodes",
        type=int,
        default=100,
        help="held-out episodes; 1 where speed alone is asked for",
    )
    parser.add_argument("--only", choices=["posttrain", "stable-baselines3"], help="one side alone")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    settings = SETTINGS[arguments.environment]
    size = settings["num_environments"] * settings["rollout_steps"]
    steps = arguments.steps // size * size  # whole iterations, not one step more
    arguments.output.mkdir(parents=True, exist_ok=True)
    sides = {"posttrain": train_ours, "stable-baselines3": train_peer}
    runs = []
    for seed in range(arguments.seeds):
        for name in list(sides)[:: 1 if seed % 2 == 0 else -1]:
            if arguments.only in (None, name):
                load = os.getloadavg()[0]
                run = {
                    "name": name,
                    "seed": seed,
                    "load": load,
                    **sides[name](arguments.environment, steps, seed, arguments.episodes),
                }
                runs.append(run)
                mean = statistics.fmean(run["returns"])
                speed, busy = (run["steps"] / run[key] for key in ("seconds", "processor_seconds"))
                speeds = f"{speed:,.0f} steps/s, {busy:,.0f} per processor second (load before {load:.1f})"
                print(f"{name} seed {seed}: return {mean:.1f}, {speeds}", flush=True)
    runs.sort(key=lambda run: (run["name"], run["seed"]))
    name = arguments.environment.lower()
    (arguments.output / f"{name}.json").write_text(json.dumps({"given": settings, "runs": runs}))
    if arguments.only is None:
        text = format_table(runs, steps)
        (arguments.output / f"{name}.md").write_text(text + "\n")
        draw_curves(runs, arguments.output / f"{name}.png", arguments.environment)
        print(text)


if __name__ == "__main__":
    main()
