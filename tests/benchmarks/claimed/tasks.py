"""Tasks of the claims: an environment, a small model that copies its demonstrator, and what policies are judged on."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import rl_core
from rl_core import environments
from rl_core.environments.environment import Environment
from rl_core.rollouts.heldout_episodes import draw_heldout_requests, draw_validation_requests
from rl_core.settings import EvaluationSettings, ModelSettings, SamplingSettings

REPORTED, VALIDATION = 500, 200  # held-out episodes: of the tables, and of the choice of settings


@dataclass(frozen=True)
class Task:
    """An environment with the start of every policy on it."""

    environment: str
    levels: tuple[str, ...]  # of the rollouts and of the held-out episodes, in equal shares
    demonstrated: tuple[str, ...]  # levels of the demonstrations, in turn
    demonstrations: int
    options: dict[str, Any] = field(default_factory=dict)
    preset: Literal["nano", "tiny"] = "tiny"
    context: int = 192
    vocab_size: int = 512
    epochs: float = 3.0
    batch_size: int = 24
    learning_rate: float = 2e-3
    max_tokens: int = 64
    max_turns: int = 6

    def build_prompt(self) -> Environment:
        """Build the environment."""
        return environments.make_environment(self.environment, dict(self.options))

    @property
    def sampling(self) -> SamplingSettings:
        """Of rollouts and evaluations, temperature 1."""
        return SamplingSettings(
            max_completion_tokens=self.max_tokens, max_turns=self.max_turns, slots=256
        )

    def held_out(self, environment: Environment) -> tuple[list[Any], list[Any]]:
        """Return the reported episodes and those of validation, which share no question."""
        reported = draw_heldout_requests(
            environment, EvaluationSettings(episodes=REPORTED, levels=self.levels), 0
        )
        return reported, draw_validation_requests(environment, VALIDATION, self.levels, 0, reported)


LUCK = {"unsupported_reward": 0.5}  # a right answer that was not seen earns half
GRID = {**LUCK, "skill": {"easy": 0.45, "medium": 0.45, "hard": 0.5}}
CHAINS = ("1", "2", "3", "4", "6", "8", "12")  # questions in an episode of `looks`
TASKS: dict[str, Task] = {
    # One look at one of 16 cells: the smallest task on which a policy goes from half right to nearly always right.
    "cells": Task("pixel_grid", ("easy",), ("easy",), 5000, GRID, max_tokens=24, max_turns=3),
    # All levels, known alike.
    "grid": Task(
        "pixel_grid", ("easy", "medium", "hard"), ("easy", "medium", "hard", "hard"), 9000, GRID
    ),
    # The same, from a start that saw a hard question once in 12.
    "grid, hard unknown": Task(
        "pixel_grid",
        ("easy", "medium", "hard"),
        (*("easy", "medium") * 5, "easy", "hard"),
        9000,
        GRID,
    ),
    # One to twelve questions in turn, of which only all together are rewarded; the start is seldom right.
    "looks": Task(
        "claimed.looks:Looks",
        CHAINS,
        CHAINS,
        6000,
        context=320,
        vocab_size=300,
        epochs=4,
        batch_size=32,
        max_tokens=240,
        max_turns=26,
    ),
    # Walks of many turns, in which a policy can go round in circles.
    "maze": Task(
        "maze",
        ("easy",),
        ("easy",),
        2500,
        {"max_moves": 10},
        context=256,
        vocab_size=300,
        epochs=5,
        batch_size=16,
        learning_rate=4e-3,
        max_tokens=160,
        max_turns=12,
    ),
    # The same from a start that is right in half of the episodes: with 4e-3 it was a tenth on AVX2 alone.
    "walks": Task(
        "maze",
        ("easy",),
        ("easy",),
        2500,
        {"max_moves": 10},
        context=256,
        vocab_size=300,
        epochs=5,
        batch_size=16,
        learning_rate=2e-3,
        max_tokens=160,
        max_turns=12,
    ),
    # Questions in turn, each with a thought before its answer.
    "reckoning": Task(
        "reckoning",
        ("easy", "medium"),
        ("easy", "medium", "hard"),
        8000,
        preset="nano",
        context=128,
        vocab_size=300,
        epochs=4,
        batch_size=32,
        learning_rate=1e-2,
        max_tokens=96,
    ),
}


def find_start(name: str, output: Path, seed: int = 0) -> Path:
    """Return the folder of the task's SFT model; make it if it is absent."""
    task, folder = (
        TASKS[name],
        output / "starts" / f"{name.replace(',', '').replace(' ', '_')}-{seed}",
    )
    if folder.is_dir():
        return folder
    environment = task.build_prompt()
    orders = {level: iter(environment.seeds_of("train", level)) for level in task.demonstrated}
    levels = itertools.islice(itertools.cycle(task.demonstrated), task.demonstrations)
    rows = [
        {"messages": environment.demonstration(next(orders[level]), level).messages}
        for level in levels
    ]
    texts = [message["content"] for row in rows for message in row["messages"]]
    shape = ModelSettings(
        preset=task.preset, vocab_size=task.vocab_size, context=task.context, device="cpu"
    )
    settings = rl_core.SFTSettings(
        epochs=task.epochs,
        batch_size=task.batch_size,
        learning_rate=task.learning_rate,
        warmup_steps=20,
        schedule="cosine",
        checkpoint_every=0,
    )
    policy = rl_core.create_policy(texts, shape, seed=seed)
    training = rl_core.sft(policy, rows, heldout=0, settings=settings, seed=seed)
    training.run()
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    training.save(temporary)
    os.rename(temporary, folder)
    return folder
