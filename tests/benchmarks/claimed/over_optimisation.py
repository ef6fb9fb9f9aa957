"""PPO against a reward model: the policy's true success, with and without a penalty for leaving its start.

A reward model for each seed, from few pairs of the start's rollouts, so that it can be exploited. Every run is
evaluated
at every five iterations on the validation episodes: the success at the best evaluation is reported together with
that at the end.
"""

from __future__ import annotations

import dataclasses
import json
import os

from claimed.arms import make_critic
from claimed.policy_runs import Arm, train_arm
from claimed.tasks import TASKS, find_start
from rl_core.settings import RewardSettings

TASK, ITERATIONS, QUESTIONS, PAIRS = "cells", 80, 300, 500
PPO = dict(
    algorithm="ppo",
    critic=make_critic(warmup_iterations=3),
    rewards={"learned": 1.0},
    learning_rate=5e-4,
    gae_lambda=0.95,
)
ARMS = (
    Arm("no hold", {**PPO}, ITERATIONS, judged_every=5),
    Arm(
        "KL in the reward, 0.1",
        {**PPO, "kl_coef": 0.1, "kl_in": "reward"},
        ITERATIONS,
        judged_every=5,
    ),
    Arm(
        "KL in the reward, 0.3",
        {**PPO, "kl_coef": 0.3, "kl_in": "reward"},
        ITERATIONS,
        judged_every=5,
    ),
    Arm(
        "KL in the loss, banded at 0.05",
        {**PPO, "kl_coef": 0.1, "kl_controller": "banded", "kl_target": 0.05},
        ITERATIONS,
        judged_every=5,
    ),
    Arm(
        "score clipped at 1",
        {**PPO, "reward_options": RewardSettings(clip=1.0)},
        ITERATIONS,
        judged_every=5,
    ),
)


def list_runs(output):
    """Return arms and their measurement."""

    def measured(arm, seed):
        folder = find_reward_model(output, seed)
        row = train_arm(output, TASK, dataclasses.replace(arm, reward_model=folder), seed)
        return row | {"reward_model": json.loads((folder / "accuracy.json").read_text())}

    return {arm.name: lambda seed, arm=arm: measured(arm, seed) for arm in ARMS}


def find_reward_model(output, seed):
    """Return the folder of the seed's reward model; make it if it is absent."""
    import shutil

    import numpy as np

    import rl_core
    from rl_core.api.recipes.reward_model import build_reward_model_recipe as recipe_of
    from rl_core.data.pairs import build_pairs_from_groups
    from rl_core.models import causal_lm, heads
    from rl_core.rollouts.collect import collect_rollouts
    from rl_core.rollouts.episode_sequence import EpisodeRequest
    from rl_core.settings import ModelSettings, RewardModelSettings

    folder = output / "starts" / f"reward-{seed}"
    if folder.is_dir():
        return folder
    task = TASKS[TASK]
    environment, policy = task.build_prompt(), rl_core.load_policy(find_start(TASK, output))
    seeds, rng = environment.seeds_of("train", task.levels[0]), np.random.default_rng(seed)
    requests = [
        EpisodeRequest(task.levels[0], int(seeds[int(rng.integers(len(seeds)))]))
        for _ in range(QUESTIONS)
    ]
    groups = collect_rollouts(
        environment,
        policy.backend(),
        policy.renderer,
        requests,
        group_size=8,
        sampling=task.sampling,
        seed=seed,
    )
    pairs = build_pairs_from_groups(groups, 3, seed)
    train, heldout = pairs[:PAIRS], pairs[PAIRS:]
    settings = RewardModelSettings(
        epochs=2,
        batch_size=32,
        learning_rate=1e-3,
        warmup_steps=10,
        schedule="cosine",
        checkpoint_every=0,
    )
    model, tokenizer = heads.create_reward_model(
        find_start(TASK, output), ModelSettings(device="cpu"), seed=seed
    )
    recipe = recipe_of(model, policy.renderer.pad_id, train, heldout, settings, seed)
    for _ in range(recipe.trainer.total_steps):
        recipe.trainer.step()
    accuracy = recipe.trainer.evaluate()["eval/accuracy"]
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    causal_lm.publish_model(model, tokenizer, temporary)
    about = {"accuracy": accuracy, "train": len(train), "heldout": len(heldout)}
    (temporary / "accuracy.json").write_text(json.dumps(about))
    os.rename(temporary, folder)
    return folder
