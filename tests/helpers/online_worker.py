"""An update worker of a tiny model, and traffic for it."""

import numpy as np
import torch

from helpers.online import recorded
from helpers.tiny import PAD, nano
from rl_core.models.hidden_states import compute_turn_embeddings
from rl_core.online.experience import Experience
from rl_core.online.experience_log import ExperienceLog
from rl_core.online.labelled_rewards import ExperienceScorer
from rl_core.online.labels import Label
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_step import GuardedLearner
from rl_core.online.update_worker import UpdateWorker, collect_worker_state
from rl_core.online.voting import Ballot, tally_votes
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import (
    OnlineBufferSettings,
    OnlineDriftSettings,
    OnlineLabelSettings,
    OnlineSettings,
    OnlineUpdateSettings,
)
from rl_core.types import Rollout, Trajectory, Turn

VOCABULARY = 11


def settings(update=None, **options):
    update = {
        "learning_rate": 1e-2,
        "max_learning_rate": 1.0,
        "min_learning_rate": 1e-4,
        "batch_size": 3,
        "first_update": 4,
        "update_every": 2,
        "snapshot_every": 2,
        "checkpoint_every": 3,
        "kl_max": 5.0,
        "keep_snapshots": 2,
        **(update or {}),
    }
    options = {
        "rewards": {"task": 1.0, "coherence": 0.1, "curiosity": 0.1},
        "buffer": OnlineBufferSettings(capacity=8, segment_bytes=4096, max_caller_share=0.5),
        "labels": OnlineLabelSettings(min_confidence=0.6),
        "drift": OnlineDriftSettings(watched=()),
        **options,
    }
    return OnlineSettings(update=OnlineUpdateSettings(**update), **options)


def build_answered_request(number, *, version=0, seed=0, callers=3, singles=False):
    """Make a request whose three samples depend on `seed` and its number alone."""
    rng = np.random.default_rng([seed, number])
    rollouts = []
    for sample in range(1 if singles and number % 4 == 1 else 3):
        tokens = rng.integers(3, VOCABULARY, size=int(rng.integers(1, 5))).tolist()
        answer = "a" if tokens[0] < 8 else "b"
        trajectory = Trajectory(
            environment="fake",
            level="easy",
            kind="k",
            seed=number,
            prompt="p",
            target="",
            turns=[Turn(f"answer {answer}", num_tokens=len(tokens))],
            answer=answer,
            rewards={"task": 0.0},
            policy_version=version,
            sample=sample,
            num_action_tokens=len(tokens),
        )
        logprobs = [float(x) for x in -rng.random(len(tokens)) - 1.0]
        rollouts.append(Rollout([1, 2], tokens, [True] * len(tokens), logprobs, trajectory))
    ballots = [
        Ballot(r.trajectory.answer, sum(r.sampler_logprobs), 1, sample=i)
        for i, r in enumerate(rollouts)
    ]
    tops = tuple(recorded(rollout, seed=i) for i, rollout in enumerate(rollouts))
    caller = f"caller{number % callers}"
    return Experience(
        f"r{number}", caller, 1000.0 + number, tuple(rollouts), tally_votes(ballots), tops
    )


def write_traffic(folder, numbers, *, version=0, feedback=4, segment_bytes=4096, **options):
    """Write requests with these numbers; every `feedback`-th is answered by feedback two requests later."""
    with ExperienceLog(folder, segment_bytes=segment_bytes) as log:
        for number in numbers:
            log.append_experience(build_answered_request(number, version=version, **options))
            if number % feedback == feedback - 1:
                log.append_label(
                    f"r{number - 2}", Label("answer", "feedback", text="ab"[number // feedback % 2])
                )


def make_worker(
    folder, log, chosen=None, *, model=None, rollouts=None, audit=None, fingerprint=None
):
    chosen = chosen or settings()
    model = model or nano()
    rewards = RewardOrchestrator(chosen.rewards, options=chosen.reward_options, seed=chosen.seed)
    scorer = ExperienceScorer(
        rewards, None, embed=lambda rollouts: compute_turn_embeddings(model, rollouts, pad_id=PAD)
    )
    learner = GuardedLearner(
        model, chosen.update, WeightSnapshots(folder / "snapshots"), pad_id=PAD
    )
    return UpdateWorker(
        folder / "checkpoints",
        log,
        learner,
        scorer,
        chosen,
        vocab_size=VOCABULARY,
        rollouts=rollouts,
        audit=audit,
        fingerprint=fingerprint or {"settings": "1"},
    )


def run_to_end(worker):
    """Run the worker over everything in the log, then save."""
    while worker.step():
        pass
    worker.save_checkpoint()


def collect_compared_state(worker):
    """Return everything that two workers of the same records must have in common, to the last bit."""
    tensors = []

    def collect(value):
        if isinstance(value, torch.Tensor):
            tensors.append(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                collect(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(worker.learner.model.state_dict())
    collect(worker.learner.copy_served_weights())
    collect(worker.learner.state_dict())
    collect(worker.scorer.rewards.state_dict())
    state = collect_worker_state(worker)
    return tensors, state, worker.learner.kl_coef, worker.collect_metrics()


__all__ = [
    "UpdateAudit",
    "build_answered_request",
    "make_worker",
    "collect_compared_state",
    "settings",
    "write_traffic",
]
