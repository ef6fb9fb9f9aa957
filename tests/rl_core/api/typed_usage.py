"""Public API used by a typed program. Never run: `make lint` checks it with `mypy --strict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import rl_core


class Count(rl_core.Environment):
    """Custom environment."""

    name = "count"
    levels = ("all",)

    @property
    def tools(self) -> rl_core.Toolset:
        return rl_core.Toolset([])

    def episode(self, seed: int, level: str) -> rl_core.Episode:
        return CountEpisode(seed, level)


class CountEpisode(rl_core.Episode):
    """Episode of the custom environment."""

    def reset(self) -> list[rl_core.Message]:
        return [{"role": "user", "content": "count"}]

    def act(self, text: str) -> rl_core.Step:
        return rl_core.Step(terminated=True, reward=float(len(text)), success=bool(text))


def reward(trajectories: list[rl_core.Trajectory]) -> Sequence[float]:
    return [
        float(len(trajectory.completion)) * float(trajectory.row["weight"])
        for trajectory in trajectories
    ]


class Watch:
    """Custom callback."""

    def on_iteration(self, event: rl_core.TrainingEvent) -> None:
        if event.metrics["reward/mean"] > 1.0:
            event.stop("enough")


def main(model: str | Path) -> pd.DataFrame:
    settings = rl_core.PolicySettings(
        iterations=3, sampling=rl_core.SamplingSettings(max_completion_tokens=8)
    )
    training = rl_core.grpo(
        model,
        prompts=[{"prompt": "a", "weight": 2.0}],
        reward={reward: 1.0, "length": 0.1},
        settings=settings,
        tracker=["terminal", rl_core.CsvTracker("metrics.csv")],
        callbacks=[Watch(), lambda event: None],
    )
    outcome: rl_core.LoopOutcome = training.run()
    iterations: int = outcome.iterations
    saved: Path = training.save("out")
    playing = rl_core.ppo(
        rl_core.ModelSettings(path=str(saved)), environment=Count(), reward=reward
    )
    kl: float = playing.trainer.kl_coef
    rl_core.sft(
        saved, "rows.jsonl", heldout=0.2, settings=rl_core.SFTSettings(epochs=iterations + kl)
    ).run()
    result: rl_core.Evaluation = rl_core.evaluate(training.policy, Count())
    texts: list[list[str]] = rl_core.generate(saved, [f"{result.success_rate}"])
    print(
        texts,
        rl_core.read_rewards("out"),
        rl_core.read_trajectories("out"),
        rl_core.compare(result, result),
    )
    return rl_core.read_metrics("out")
