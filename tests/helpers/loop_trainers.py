"""Trainers of the loop tests, and a run of the loop with them."""

import os
import random
import signal

import numpy as np
import torch
from torch import nn

from helpers.tiny import weights_digest
from rl_core.data.batches import DataOrder
from rl_core.settings import LoopSettings, OptimizerSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch


class NoisyTrainer:
    """Regression whose every step draws from python's, numpy's and torch's generators and from a private one."""

    def __init__(self, iterations=12, seed=0):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.optimizer_step = OptimizerStep(
            self.model,
            OptimizerSettings(learning_rate=0.01, schedule="cosine", dropout=True),
            iterations,
        )
        self.order = DataOrder(20, 6, seed)
        self.noise = np.random.default_rng(seed)
        self.data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        self.hook = lambda trainer: None
        self.finished = None

    def step(self):
        self.hook(self)
        rows = self.order.next_batch()
        shift = random.random() + np.random.random() + float(self.noise.random())
        batch = TrainBatch(
            self.data[rows], torch.ones(len(rows), 4), torch.ones(len(rows), 4), rows=rows
        )

        def loss_fn(part):
            target = part.input_ids_BS.sum(1) + shift
            return (self.model(part.input_ids_BS).squeeze(-1) - target).square().sum() / len(
                rows
            ), {"train/shift": shift}

        return self.optimizer_step.run_step([batch], loss_fn)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            error = (self.model(self.data).squeeze(-1) - self.data.sum(1)).square().mean()
        return {"eval/loss": float(error), "eval/draw": random.random()}

    def state_dict(self):
        return {"order": self.order.state_dict(), "noise": self.noise.bit_generator.state}

    def load_state_dict(self, state):
        self.order.load_state_dict(state["order"])
        self.noise.bit_generator.state = state["noise"]


class ScriptedTrainer:
    """Trainer with scripted evaluations; its weight equals the number of iterations done."""

    def __init__(self, values, steps=None):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer_step = OptimizerStep(self.model, OptimizerSettings(), 10)
        self.values = values
        self.steps = steps or {}
        self.done = 0
        self.evaluations = 0
        self.finished = None

    def step(self):
        self.done += 1
        with torch.no_grad():
            self.model.weight.fill_(self.done)
        self.optimizer_step.num_steps += 1
        return self.steps.get(self.done, {"train/loss": 1.0 / self.done})

    def evaluate(self):
        self.evaluations += 1
        return {"eval/score": self.values[self.done]}

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


SETTINGS = LoopSettings(eval_every=3, checkpoint_every=2)
ITERATIONS = 12


def run(folder, *, trainer=None, tracker=None, settings=SETTINGS, iterations=ITERATIONS, **options):
    trainer = trainer or NoisyTrainer(iterations)
    tracker = tracker or MemoryTracker()
    keep = settings.keep_checkpoints
    store = CheckpointStore(folder, keep=keep) if folder is not None else None
    options = {"best_metric": "eval/loss", "larger_is_better": False, **options}
    outcome = run_loop(
        trainer, settings, iterations=iterations, tracker=tracker, checkpoints=store, **options
    )
    return outcome, weights_digest(trainer.model), tracker


def send_at(iteration, signum=signal.SIGTERM):
    count = 0

    def hook(trainer):
        nonlocal count
        count += 1
        if count == iteration:
            os.kill(os.getpid(), signum)

    return hook
