"""Notes of a plan: what its figures leave out, or count otherwise than a reader would expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.planning.plan_target import Lengths, Target
from rl_core.resources.model_shape import experts_of
from rl_core.settings import PolicySettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["notes_on_rollouts", "notes_on_target"]


def notes_on_target(target: Target, processes: int, model: PreTrainedModel) -> list[str]:
    """Of a stage in so many processes with this model."""
    found = []
    if target.gpus > processes:
        found.append(f"launch uses {processes} of {target.gpus} GPUs: set launch.processes")
    elif target.device == "cuda" and target.gpus < processes:
        found.append(f"launch needs {processes} GPUs, one a process, and there are {target.gpus}; the time is theirs")
    if (experts := experts_of(model)) is not None:
        count, met = experts
        found.append(f"a token meets {met} of {count} experts, but all count in operations and time, as in perf/mfu")
    return found


def notes_on_rollouts(block: PolicySettings, lengths: Lengths) -> list[str]:
    """Of a stage that plays rollouts."""
    found = []
    if not lengths.completion:
        found.append("rollouts count at max_completion_tokens: --completion-tokens gives their mean")
    if (workers := block.rollouts.workers) != "in_process":
        found.append(
            f"rollouts count in this process, one after the other with updates, but are played beside it (workers: "
            f"{workers}); --simulate tells who waits for whom"
        )
    found.append("environment steps and reward functions are not in the time")
    return found
