"""A reward function to start from.

It receives the trajectories of one iteration (`rl_core.types.Trajectory`: prompt, turns, answer, target, success, ...)
and returns one number for each, in order. The config names it by import path and gives it a weight.
"""


def brevity(trajectories: list) -> list[float]:
    """Return minus 0.1 for every token that the policy wrote beyond two."""
    return [-0.1 * max(0, trajectory.num_action_tokens - 2) for trajectory in trajectories]
