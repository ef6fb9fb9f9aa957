"""Training runs of the benchmark: algorithms, variants, staleness, group sizes, curricula, early stopping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BATCH = 128  # episodes of one iteration
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
    "dppo": dict(algorithm="dppo", **TWICE),
    "maxrl": dict(algorithm="maxrl"),
    "gdpo": dict(algorithm="gdpo"),
    "rloo": dict(algorithm="rloo"),
    "reinforce": dict(algorithm="reinforce"),
    "ppo": dict(algorithm="ppo", critic=dict(learning_rate=1e-3)),
    "dpo": dict(loss="dpo"),
    "ipo": dict(loss="ipo"),
}
DISTILLATIONS: dict[str, dict[str, Any]] = {  # settings of `DistillationSettings`
    "distillation": dict(),
    "self-distillation": dict(self_teacher=dict(weights="ema")),  # with the answer in its prompt
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo, limits bootstrapped": dict(
        algorithm="ppo", critic=dict(learning_rate=1e-3, bootstrap_limits=True)
    ),
    "ppo, shared head": dict(algorithm="ppo", critic=dict(kind="shared")),
    "ppo, two epochs": dict(algorithm="ppo", critic=dict(learning_rate=1e-3), **TWICE),
    "ppo, two epochs, rate 3e-3": dict(
        algorithm="ppo", critic=dict(learning_rate=1e-3), **TWICE | dict(learning_rate=3e-3)
    ),
    "ppo, two epochs, rate 3e-3, by KL": dict(
        algorithm="ppo",
        critic=dict(learning_rate=1e-3),
        learning_rate_control=dict(lowest=0.01),
        **TWICE | dict(learning_rate=3e-3),
    ),
    "grpo + replay": dict(
        algorithm="grpo", importance="token", replay=dict(iterations=4, share=0.5)
    ),
    "grpo, muon": dict(algorithm="grpo", optimizer="muon"),
}
LAGS = (1, 4, 16)
WEIGHTS = ("none", "token")
CRITIC_LAGS, CRITIC_WEIGHTS = (4, 16), ("none", "vtrace")  # of PPO
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
            jobs += [
                Job(name, seed, "algorithms", options)
                for name, options in (ALGORITHMS | DISTILLATIONS).items()
            ]
        if "variants" in parts:
            jobs += [Job(name, seed, "variants", options) for name, options in VARIANTS.items()]
        if "staleness" in parts:
            for lag in LAGS:
                for level in WEIGHTS:
                    options = dict(importance=level, sampler_kl_max=1e6)
                    jobs.append(Job(f"lag {lag} {level}", seed, "staleness", options, lag=lag))
            for lag in CRITIC_LAGS:
                for level in CRITIC_WEIGHTS:
                    options = ALGORITHMS["ppo"] | dict(importance=level, sampler_kl_max=1e6)
                    jobs.append(Job(f"ppo lag {lag} {level}", seed, "staleness", options, lag=lag))
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
