"""Policies and games for tests of self-play: a scripted backend, and a small model that plays Kuhn poker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_core.api.policy import Policy, create_policy
from rl_core.environments.kuhn_poker import KuhnPoker
from rl_core.models import lora
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import LoraSettings, PolicySettings, SamplingSettings, SelfPlaySettings
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

SAMPLING = SamplingSettings(max_completion_tokens=24, max_turns=4)


@functools.cache
def _list_texts() -> tuple[str, ...]:
    environment = KuhnPoker()
    games = [environment.demonstration(seed, "standard") for seed in range(200)]
    return tuple(message["content"] for game in games for message in game.messages)


def build_policy(*, adapters: bool = False, seed: int = 0) -> Policy:
    """Build an untrained policy whose tokenizer knows the game's words."""
    policy = create_policy(
        _list_texts(), {"preset": "nano", "vocab_size": 300, "context": 64}, seed=seed
    )
    if adapters:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            policy.model = lora.add_adapter(policy.model, LoraSettings(rank=4))
    return policy


class ScriptedBackend:
    """A backend that writes what a function of (weights in use, prompt text) says."""

    def __init__(
        self, policy: Policy, choose: Callable[[str, str], str], max_length: int = 64
    ) -> None:
        self.policy, self.choose, self.max_length = policy, choose, max_length
        self.weights = "current"
        self.runs: list[tuple[str, int]] = []  # weights and number of sequences

    def refresh_weights(self) -> None:
        """Do nothing."""

    def set_end_tokens(self, eos_ids: Any) -> None:
        """Do nothing."""

    def run_sequences(self, sequences: Sequence[Any], sampling: SamplingSettings) -> None:
        """Play one action of each sequence."""
        self.runs.append((self.weights, len(sequences)))
        renderer = self.policy.renderer
        for sequence in sequences:
            text = renderer.decode_ids(sequence.prompt_ids, is_start=True)
            move = self.choose(self.weights, text)
            ids = renderer.action_ids(move)
            room = min(sampling.max_completion_tokens, self.max_length - len(sequence.prompt_ids))
            hit_limit = len(ids) > room
            ids = ids[:room]
            assert sequence.take_action(ids, [-0.5] * len(ids), hit_limit) is None


def build_trainer(
    *,
    adapters: bool = False,
    folder: Any = None,
    evaluator: Any = None,
    self_play: dict[str, Any] | None = None,
    environment: Any = None,
    **settings: Any,
) -> PolicyGradientTrainer:
    """Build a trainer by self-play on a small policy."""
    policy = build_policy(adapters=adapters)
    options = {
        "snapshot_every": 2,
        "pool_size": 2,
        "eval_games": 12,
        **(self_play if self_play is not None else {}),
    }
    values = {
        "algorithm": "reinforce",
        "iterations": 8,
        "prompts_per_iteration": 4,
        "group_size": 4,
        "learning_rate": 3e-3,
        "role_baseline": {},
        "sampling": SAMPLING,
        "self_play": SelfPlaySettings(**options),
        **settings,
    }
    values = {name: value for name, value in values.items() if value is not None}
    return PolicyGradientTrainer(
        policy.model,
        None,
        policy.renderer,
        environment or KuhnPoker(),
        build_policy_settings(values),
        5,
        RewardOrchestrator({"task": 1.0}),
        policy.backend(),
        evaluator=evaluator,
        opponents_folder=folder,
    )


def build_policy_settings(values: dict[str, Any]) -> PolicySettings:
    """Build settings from fields and dicts."""
    from rl_core.settings import build_settings

    return build_settings(values, PolicySettings)
