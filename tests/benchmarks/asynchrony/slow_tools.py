"""A task whose tools take a heavy-tailed time, and trainers on it: of compiled models of any size."""

import math
import time
import zlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.inference.engine import create_rollout_backend
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollout_workers.async_worker_group import AsyncWorkerGroup
from rl_core.rollout_workers.ray_cluster import RayCluster
from rl_core.rollout_workers.worker_group import WorkerConfig, WorkerGroup
from rl_core.settings import CurriculumStage, PolicySettings, RolloutSettings, SamplingSettings
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

SIGMA = 1.0  # of the logarithm of a tool's seconds: the slowest of 100 calls takes about 6 times the mean
VOCABULARY = 300
ENDS = 10  # of these tokens end an action
SHAPES = {  # by their parameters
    "0.1M": dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
    ),
    "0.9M": dict(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
    ),
    "3M": dict(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
    ),
    "27M": dict(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1376,
        vocab_size=4096,
    ),
}


def draw_tool_seconds(seed, turn, text, mean):
    """Draw the seconds of a tool call: log-normal, seeded by the request, so equal wherever the episode is played."""
    normal = np.random.default_rng([seed, turn, zlib.crc32(text.encode())]).standard_normal()
    return mean * math.exp(SIGMA * normal - SIGMA**2 / 2)


class SlowToolEpisode(Episode):
    """So many turns, each answered after a while; right where the first letter is of the first half."""

    def __init__(self, seed, level, task):
        super().__init__(seed, level)
        self.turns, self.mean, self.noise, self.acted, self.right = (
            task.turns,
            task.mean,
            task.noise,
            0,
            0,
        )

    def reset(self):
        return [{"role": "user", "content": f"task {self.seed % 7}"}]

    def act(self, text):
        self.acted += 1
        self.right += text[:1].lower() in "abcdefghijklm" if text else False
        if self.acted < self.turns:
            if self.mean:
                time.sleep(draw_tool_seconds(self.seed, self.acted, text, self.mean))
            return Step(messages=[{"role": "user", "content": "more"}])
        reward = self.right / self.turns + self.noise * zlib.crc32(text.encode()) / 2**32
        return Step(reward=reward, terminated=True, success=self.right == self.turns)


class SlowTools(Environment):
    """Questions with tools whose latency has this mean.

    noise: largest reward for the text itself, so that no group is alike and every update has all rows to compute.
    """

    name = "slow_tools"
    levels = ("all",)

    def __init__(self, mean=0.0, turns=3, noise=0.01):
        super().__init__()
        self.mean, self.turns, self.noise = mean, turns, noise

    @property
    def tools(self):
        return Toolset([])

    def episode(self, seed, level):
        self.check_level(level)
        return SlowToolEpisode(seed, level, self)


class SameEnvironment:
    """Factory that returns one environment; travels as a pickle."""

    def __init__(self, environment):
        self.environment = environment

    def __call__(self):
        return self.environment


def make_trainer(
    rollouts,
    *,
    shape="0.9M",
    mean=0.0,
    turns=3,
    schedule=None,
    ends=ENDS,
    context=256,
    seed=7,
    environment=None,
    sampling=None,
    **options,
):
    """Make a trainer with its rollouts in this process, or on Ray as `rollouts` says.

    ends: of VOCABULARY tokens so many end an action, so an action has about VOCABULARY / ends tokens.
    Returns: trainer, and the function that ends its workers.
    """
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["abc xyz task more 0123456789"], VOCABULARY)
    values = dict(
        vocab_size=VOCABULARY, max_position_embeddings=context, pad_token_id=tokenizer.pad_token_id
    )
    model = LlamaForCausalLM(LlamaConfig(**{**values, **SHAPES[shape]}))
    renderer = ChatRenderer(tokenizer)
    eos = list(range(0, ends)) if ends else [tokenizer.eos_token_id]
    backend = create_rollout_backend(model, eos_ids=eos, pad_id=renderer.pad_id, max_length=context)
    sampling = {
        "max_completion_tokens": context - 40,
        "max_turns": turns,
        "max_concurrent_steps": 256,
        "step_timeout_s": 120.0,
        **(sampling or {}),
    }
    settings = {
        "iterations": 1000,
        "prompts_per_iteration": 8,
        "group_size": 4,
        "learning_rate": 1e-7,
        "warmup_steps": 0,
        "curriculum": (CurriculumStage(name="all", levels={"all": 1.0}),),
        "rewards": {"task": 1.0},
        **options,
    }
    if rollouts.max_staleness:
        settings.setdefault("importance", "token")
    trainer = PolicyGradientTrainer(
        model,
        None,
        renderer,
        environment or SlowTools(mean, turns),
        PolicySettings(sampling=SamplingSettings(**sampling), rollouts=rollouts, **settings),
        seed,
        RewardOrchestrator({"task": 1.0}),
        backend,
    )
    if rollouts.independent:
        trainer.backend.disable_cross_row_batching()
    if rollouts.workers == "in_process":
        return trainer, lambda: None
    parts = WorkerConfig(
        model, trainer.backend, renderer, SameEnvironment(trainer.environment), eos, renderer.pad_id
    )
    if rollouts.max_staleness:
        trainer.stream = AsyncWorkerGroup(rollouts, SharedRay(rollouts), parts, schedule=schedule)
        return trainer, trainer.stream.close
    trainer.worker_group = WorkerGroup(rollouts, SharedRay(rollouts), parts)
    return trainer, trainer.worker_group.close


def make_ray_settings(count, staleness=0, **more):
    """Make settings of `count` workers."""
    return RolloutSettings(workers="ray", count=count, max_staleness=staleness, **more)


class SharedRay(RayCluster):
    """A cluster on a Ray that is started once in a process, until `end`; its actors end with it."""

    shared = None

    def open_cluster(self, num_bytes):
        if SharedRay.shared is None:
            SharedRay.shared = RayCluster(make_ray_settings(max(4, self._settings.count)))
            SharedRay.shared.open_cluster(max(num_bytes, 300_000_000))
        self._ray = SharedRay.shared._ray

    def close(self):
        for handle in list(self._handles):
            self.stop_worker(handle)

    @classmethod
    def end(cls):
        """Stop Ray, as a run does at its end."""
        if cls.shared is not None:
            cls.shared.close()
            cls.shared = None


IN_PROCESS = RolloutSettings(independent=True)
