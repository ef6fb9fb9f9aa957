"""Rollouts and states by hand, for the tests of reward components."""

import torch

from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.types import Rollout, RolloutGroup, ToolCall, Trajectory, Turn


def call(name="look", error=False, observation="seen", action=None, **arguments):
    text = action if action is not None else " ".join([name, *map(str, arguments.values())])
    return Turn(text, tool_call=ToolCall(name, arguments), observation=observation, is_error=error)


def say(text, error=False, observation=None):
    return Turn(text, observation=observation, is_error=error)


def rollout(
    turns=(), *, task=0.0, success=False, seed=0, mask=(True, True), stop="terminated", answer=None
):
    trajectory = Trajectory(
        environment="fake",
        level="easy",
        kind="k",
        seed=seed,
        prompt="p",
        target="t",
        turns=list(turns),
        answer=answer,
        success=success,
        reward=task,
        rewards={"task": task},
        stop_reason=stop,
    )
    ids = list(range(1, len(mask) + 1))
    return Rollout([0], ids, list(mask), [-1.0] * len(mask), trajectory)


def group(*rollouts):
    return RolloutGroup(list(rollouts))


def walk(*states, actions=None, observed=None):
    """Return the states of the prompt and each turn; actions default to zeros; only the last turn is not observed."""
    states_NH = torch.tensor(states, dtype=torch.float32)
    turns = len(states) - 1
    actions_NH = (
        torch.zeros(turns, states_NH.shape[1]) if actions is None else torch.tensor(actions).float()
    )
    return TurnEmbeddings(
        states_NH,
        actions_NH,
        [True] * (turns - 1) + [False] if observed is None else list(observed),
    )
