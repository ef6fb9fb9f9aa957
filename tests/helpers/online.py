"""Experiences by hand, for the tests of online learning."""

import numpy as np

from rl_core.online.experience import Experience, RecordedTopK
from rl_core.online.voting import Ballot, tally_votes
from rl_core.types import Rollout, Trajectory, Turn

VOCABULARY = 11


def rollout(
    answer="a",
    *,
    version=0,
    tokens=(3, 4),
    logprobs=None,
    temperature=1.0,
    level="easy",
    seed=1,
    task=0.0,
):
    """Make a rollout of one turn: a prompt of two tokens and these."""
    text = "" if answer is None else f"answer {answer}"
    trajectory = Trajectory(
        environment="arithmetic",
        level=level,
        kind="sum",
        seed=seed,
        prompt="1 + 1 = ?",
        target="",
        turns=[Turn(text, num_tokens=len(tokens))],
        answer=answer,
        reward=task,
        rewards={"task": task},
        policy_version=version,
        temperature=temperature,
        num_action_tokens=len(tokens),
    )
    all_logprobs = (
        list(logprobs) if logprobs is not None else [-1.0 - 0.1 * i for i in range(len(tokens))]
    )
    return Rollout([1, 2], list(tokens), [True] * len(tokens), all_logprobs, trajectory)


def recorded(rollout_, seed=0, num_kept=3):
    """Return the top tokens of random distributions."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(VOCABULARY), size=len(rollout_.completion_ids))
    order = np.argsort(-probabilities, axis=1)[:, :num_kept]
    top = np.take_along_axis(probabilities, order, axis=1)
    return RecordedTopK(
        order.astype(np.int32), np.log(top).astype(np.float32), (1 - top.sum(1)).astype(np.float32)
    )


def experience(
    request="r1", answers=("a", "a", "b"), *, caller="anna", time=1000.0, top=False, **options
):
    """Make one request whose samples gave these answers."""
    rollouts = tuple(
        rollout(answer, tokens=(3 + i % 3, 4), **options) for i, answer in enumerate(answers)
    )
    ballots = [
        Ballot(answer, sum(r.sampler_logprobs), 2, sample=i)
        for i, (answer, r) in enumerate(zip(answers, rollouts, strict=True))
    ]
    tops = tuple(recorded(r, seed=i) if top else None for i, r in enumerate(rollouts))
    return Experience(request, caller, time, rollouts, tally_votes(ballots), tops)
