"""Our side's workload: a one-question environment, a character renderer, scripted multi-turn sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rl_core.data.batches import DataOrder
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.inference.sampling import compute_sequence_seed
from speed import inputs

LEVEL = "sums"
TURNS, ENDS_EVERY, MAX_TOKENS = 6, 16, 256  # of the ragged episodes: one token of 16 ends an action


class Sum(Episode):
    """One prompt, one action. What it is worth is for `reward` to say, as it is for the peer's reward function."""

    def __init__(self, seed, row):
        super().__init__(seed, LEVEL)
        self.prompt, self.target = row["prompt"], row["answer"]

    def reset(self):
        return [{"role": "user", "content": self.prompt}]

    def act(self, text):
        return Step(terminated=True, answer=text)


class Sums(Environment):
    """The prompts of a folder, handed out in the order of its file."""

    name = "sums"
    levels = (LEVEL,)

    def __init__(self, folder, seed):
        super().__init__()
        rows = inputs.read(folder, "prompts")
        self._rows = order_as_drawn(rows, compute_sequence_seed(seed, "order", LEVEL) % 2**63)

    @property
    def tools(self):
        return Toolset()

    def episode(self, seed, level):
        return Sum(seed, self._rows[seed])

    def seeds(self, split):
        return range(len(self._rows))


def order_as_drawn(rows, seed):
    """Order rows so that `DataOrder` of this seed draws them in the original order."""
    placed = list(rows)
    for row, index in zip(rows, DataOrder(len(rows), len(rows), seed).next_batch(), strict=True):
        placed[index] = row
    return placed


def reward(trajectories):
    """Reward as the peer's function gives it for the same text, also for text cut at the limit."""
    return [
        inputs.score(trajectory.turns[-1].action, trajectory.target) for trajectory in trajectories
    ]


class Characters:
    """A renderer without a chat template, as the peer gets the prompts."""

    pad_id = inputs.PAD

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def prompt_ids(self, messages):
        return self._tokenizer(messages[-1]["content"])["input_ids"]

    def observation_ids(self, messages):
        raise AssertionError("episodes of one action have no observations")

    def action_text(self, ids):
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Scripted:
    """Sequence with scripted observations; ends after the last of them, or at its limit."""

    def __init__(self, prompt_ids, seed, observations=(), limit=MAX_TOKENS):
        self.prompt_ids = list(prompt_ids)
        self.seed = seed
        self.completion_ids, self.loss_mask, self.logprobs = [], [], []
        self.limit = limit
        self._observations = list(observations)

    @property
    def sampled(self):
        """Tokens of the policy."""
        return sum(self.loss_mask)

    def take_action(self, action_ids, logprobs, hit_limit):
        """Take an action; see `rl_core.inference.sampling.RolloutSequence`."""
        self._add(action_ids, logprobs, True)
        if hit_limit or not self._observations:
            return None
        observation = self._observations.pop(0)
        if len(self.completion_ids) + len(observation) >= self.limit:
            return None
        self._add(observation, [0.0] * len(observation), False)
        return observation

    def _add(self, ids, logprobs, is_sampled):
        self.completion_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [is_sampled] * len(ids)


def make_ragged_sequences(folder: Path, tokenizer, step, count=64):
    """Make episodes of 1 to TURNS turns with observations of 4 to 48 tokens; those of a step are always the same."""
    rng = np.random.default_rng([inputs.SEED, step])
    rows = inputs.read(folder, "prompts")[step * count :][:count]
    vocabulary = len(tokenizer)
    sequences = []
    for index, row in enumerate(rows):
        turns = int(rng.integers(1, TURNS + 1))
        observations = [
            rng.integers(4, vocabulary, rng.integers(4, 49)).tolist() for _ in range(turns - 1)
        ]
        sequences.append(
            Scripted(tokenizer(row["prompt"])["input_ids"], step * count + index, observations)
        )
    return sequences


def list_end_ids(vocabulary):
    """List the tokens that end an action there; the actions of a random model are then of 1 to about 80 tokens."""
    return list(range(10, vocabulary, ENDS_EVERY))
