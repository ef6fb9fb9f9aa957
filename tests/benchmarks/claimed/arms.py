"""Arms of each part: what is compared with what, on which task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from claimed.policy_runs import Arm, make_critic
from claimed.tasks import CHAINS
from rl_core.settings import (
    CurriculumStage,
    ExitCondition,
    KLBandSettings,
    LoraSettings,
    RewardSettings,
    RollbackSettings,
    ToolUseSettings,
    TurnCreditSettings,
)


@dataclass(frozen=True)
class Part:
    """Arms on one task; the first one is what the others are compared with."""

    title: str
    task: str
    arms: tuple[Arm, ...]
    threshold: float | None = None  # training success whose first iteration is reported


TOOL_USE = RewardSettings(tool_use=ToolUseSettings(misuse=1.0, max_calls=3, excess=0.2))
TWICE: dict[str, Any] = dict(epochs=2, minibatches=2, learning_rate=3e-4)
ROUGH: dict[str, Any] = dict(
    algorithm="ppo", epochs=4, minibatches=2, learning_rate=2e-3, critic=make_critic()
)
ROLLBACK = RollbackSettings(
    window=3,
    margin=0.1,
    patience=2,
    cooldown=3,
    max_rollbacks=4,
    learning_rate_factor=0.32,
    to="entry",
)
WIDER = KLBandSettings(increase=1.5, decrease=1.5)
ADAPTER = LoraSettings(rank=8, alpha=16, target_modules="all-linear")
MIXES = (
    {"easy": 6, "medium": 3, "hard": 1},
    {"easy": 2, "medium": 5, "hard": 3},
    {"easy": 2, "medium": 3, "hard": 5},
)


def weigh_extra_rewards(iterations: int, **weights: float) -> Arm:
    """Add extra rewards with these weights to the task's."""
    name = (
        ", ".join(f"{component} {weight:g}" for component, weight in weights.items())
        or "task alone"
    )
    return Arm(name, dict(rewards={"task": 1.0, **weights}, reward_options=TOOL_USE), iterations)


def list_single_rewards(iterations: int) -> list[Arm]:
    """List arms with each extra reward by itself, at two weights."""
    names = ("coherence", "curiosity", "tool_use")
    return [
        weigh_extra_rewards(iterations, **{name: weight})
        for name in names
        for weight in (0.05, 0.3)
    ]


def build_staged_weights(iterations: int) -> Arm:
    """Return the weights of configs/curriculum.yaml, which change after each third of the iterations."""
    third = iterations // 3
    weights: tuple[dict[str, float], ...] = (
        {"tool_use": 0.1},
        {"tool_use": 0.05, "coherence": 0.05, "curiosity": 0.02},
        {},
    )
    stages = tuple(
        CurriculumStage(
            name=f"step {number}",
            levels={"easy": 1, "medium": 1, "hard": 1},
            rewards=extra,
            max_iterations=third if number < 2 else None,
        )
        for number, extra in enumerate(weights)
    )
    rewards = {"task": 1.0, "tool_use": 0.0, "coherence": 0.0, "curiosity": 0.0}
    settings = dict(rewards=rewards, reward_options=TOOL_USE, curriculum=stages)
    return Arm("by stage, as in curriculum.yaml", settings, iterations)


def build_schedule(name: str, iterations: int, *, shares: bool) -> Arm:
    """Build levels that get harder by success, or at fixed shares of the iterations."""
    stages = []
    for number, mix in enumerate(MIXES):
        last = number == len(MIXES) - 1
        options: dict[str, Any] = {}
        if not last and shares:
            options["max_iterations"] = iterations // 3
        elif not last:
            options["exit_conditions"] = (ExitCondition(window=5, threshold=(0.75, 0.85)[number]),)
        stages.append(CurriculumStage(name=f"step {number}", levels=dict(mix), **options))
    return Arm(name, dict(curriculum=tuple(stages)), iterations)


def build_fixed_levels(levels: dict[str, float]) -> dict[str, Any]:
    """Build one stage of these levels, to the end."""
    return dict(curriculum=(CurriculumStage(name="all", levels=levels),))


def build_growing_levels(threshold: float) -> tuple[CurriculumStage, ...]:
    """Build a schedule of single levels of `looks`, each left at this success of two iterations."""
    left = (ExitCondition(window=2, threshold=threshold),)
    return tuple(
        CurriculumStage(
            name=f"{level} questions",
            levels={level: 1.0},
            exit_conditions=left if level != CHAINS[-1] else (),
        )
        for level in CHAINS
    )


def credit_turns(compare: Any, **options: float) -> dict[str, Any]:
    """Give each turn its advantage."""
    return dict(turn_credit=TurnCreditSettings(compare=compare, **options))


def penalize_kl(target: float, **options: Any) -> dict[str, Any]:
    """Add a KL term to the loss, starting from a weight that is too small."""
    return dict(kl_coef=0.01, kl_target=target, **options)


PARTS: dict[str, Part] = {
    "weights": Part(
        "coherence, curiosity and use of tools as extra rewards",
        "grid",
        (
            weigh_extra_rewards(30),
            *list_single_rewards(30),
            weigh_extra_rewards(30, coherence=0.05, curiosity=0.05, tool_use=0.05),
            build_staged_weights(30),
        ),
    ),
    "maze": Part(
        "the same where a policy can go round in circles",
        "maze",
        (
            weigh_extra_rewards(20),
            *list_single_rewards(20),
            weigh_extra_rewards(20, coherence=0.05, curiosity=0.05, tool_use=0.05),
        ),
    ),
    "start": Part(
        "a start that knows little of the hard level",
        "grid, hard unknown",
        (
            Arm("all levels at once"),
            build_schedule("curriculum by success", 30, shares=False),
            build_schedule("fixed schedule", 30, shares=True),
            Arm("hard alone", build_fixed_levels({"hard": 1})),
        ),
    ),
    "chain": Part(
        "a start that is never rewarded on the hard level",
        "looks",
        (
            Arm("12 questions alone", build_fixed_levels({"12": 1}), 60),
            Arm(
                "nine in ten of 12 questions",
                build_fixed_levels(dict.fromkeys(CHAINS[:-1], 1) | {"12": 54}),
                60,
            ),
            Arm("all levels at once", {}, 60),
            Arm("curriculum by success", dict(curriculum=build_growing_levels(0.5)), 60),
            Arm(
                "half of it: nine in ten",
                build_fixed_levels(dict.fromkeys(CHAINS[:-1], 1) | {"12": 54}),
                30,
            ),
            Arm("half of it: all levels at once", {}, 30),
            Arm("half of it: curriculum", dict(curriculum=build_growing_levels(0.5)), 30),
        ),
    ),
    "rollback": Part(
        "a learning rate ten times too high",
        "cells",
        (
            Arm("5e-3", dict(learning_rate=5e-3), 40),
            Arm("5e-3, rollback", dict(learning_rate=5e-3, rollback=ROLLBACK), 40),
            Arm("5e-4", {}, 40),
        ),
    ),
    "schedules": Part(
        "learning-rate schedules",
        "cells",
        tuple(
            Arm(f"{schedule} {rate:g}", dict(schedule=schedule, learning_rate=rate))
            for schedule in ("constant", "linear", "cosine")
            for rate in (5e-4, 1e-3)
        ),
        threshold=0.85,
    ),
    "optimisers": Part(
        "Muon, Grokfast, entropy bonus",
        "cells",
        (
            Arm("adamw"),
            *(
                Arm(f"muon {rate:g}", dict(optimizer="muon", learning_rate=rate))
                for rate in (5e-4, 2e-3)
            ),
            *(Arm(f"grokfast {weight:g}", dict(grokfast_lambda=weight)) for weight in (0.5, 2.0)),
            *(
                Arm(f"entropy bonus {weight:g}", dict(entropy_coef=weight))
                for weight in (0.003, 0.01, 0.03)
            ),
        ),
        threshold=0.85,
    ),
    "kl": Part(
        "KL controllers, target 0.03 nats per token",
        "cells",
        (
            Arm("fixed 0.01", penalize_kl(0.03), 50),
            Arm("fixed 0.1", dict(kl_coef=0.1), 50),
            Arm("adaptive", penalize_kl(0.03, kl_controller="adaptive", kl_horizon=128), 50),
            Arm("banded 1.2", penalize_kl(0.03, kl_controller="banded"), 50),
            Arm("banded 1.5", penalize_kl(0.03, kl_controller="banded", kl_band=WIDER), 50),
        ),
    ),
    "values": Part(
        "value functions",
        "cells",
        (
            Arm("reinforce", dict(algorithm="reinforce")),
            Arm(
                "reinforce, learned baseline",
                dict(algorithm="reinforce", critic=make_critic(), gae_lambda=1.0),
            ),
            Arm("ppo", dict(algorithm="ppo", critic=make_critic())),
            Arm(
                "ppo, values clipped", dict(algorithm="ppo", critic=make_critic(value_clip_eps=0.2))
            ),
            Arm("ppo, shared head", dict(algorithm="ppo", critic=make_critic(kind="shared"))),
            Arm(
                "ppo, shared head 0.1",
                dict(algorithm="ppo", critic=make_critic(kind="shared", value_coef=0.1)),
            ),
            Arm("ppo, two epochs", dict(algorithm="ppo", critic=make_critic(), **TWICE)),
        ),
        threshold=0.85,
    ),
    "credit": Part(
        "advantages by turn on walks of many turns",
        "walks",
        (
            Arm("grpo", {}, 20),
            Arm("ppo", dict(algorithm="ppo", critic=make_critic()), 20),
            Arm("states", credit_turns("states"), 20),
            Arm("turns", credit_turns("turns", episode_weight=0.0), 20),
            Arm("group", credit_turns("group", episode_weight=0.0), 20),
        ),
    ),
    "conservative": Part(
        "holds on PPO with eight large steps an iteration (4 epochs x 2, rate 2e-3)",
        "cells",
        (
            Arm("clip 0.2", ROUGH, 20),
            Arm("clip 0.05", {**ROUGH, "clip_eps": 0.05}, 20),
            Arm("trust region 1, k3", {**ROUGH, "trust_region_coef": 1.0}, 20),
            Arm(
                "trust region 1, exact",
                {**ROUGH, "trust_region_coef": 1.0, "trust_region_kl": "exact"},
                20,
            ),
            Arm("kl_max 0.02", {**ROUGH, "kl_max": 0.02}, 20),
        ),
    ),
    "lora": Part(
        "LoRA, rank 8 on every linear layer, against all weights",
        "cells",
        (
            Arm("all weights 5e-4"),
            *(
                Arm(f"LoRA {rate:g}", dict(learning_rate=rate), lora=ADAPTER)
                for rate in (5e-4, 2e-3, 5e-3)
            ),
        ),
        threshold=0.85,
    ),
}
