"""Registry of the pipeline's stages: name, task, inputs and outputs of each, in the order in which they run.

Everything that has to know the stages asks here: the settings, the command line, the DAG of the flow, the parent of a
model version, profiles, pictures. Imports nothing but the standard library (`posttrain --help` reads it), so tasks are
named by import path and imported when they are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "PipelineStage",
    "Product",
    "entry",
    "names",
    "policy_stages",
    "register",
    "result_stages",
    "stages",
    "task_of",
    "training_stages",
]

Product = Literal["data", "policy", "reward_model", "evaluation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStage:
    """One stage. Its settings are the field `name` of `StagesSettings`.

    `takes` names what the flow hands to the task after the run itself, in order:
    base (the starting model; None = a preset), model (the newest policy), data, reward_model (results of those stages),
    models (the policies by stage name), evaluation, challenger (the newest trained policy's result).
    """

    name: str
    task: str  # "package.module:function", called as function(pipeline_run, *takes)
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()  # of `takes`, what it cannot run without; the others may be None
    gives: Product | None = None  # policy: the next stages start from it; None = a result for people
    learns_from: str = ""  # field of DataSettings with the file that it imitates, where it does
    uses_gpu: bool = True

    @property
    def trains(self) -> Literal["policy", "reward_model"] | None:
        """Kind of model that the stage trains and registers; None = none."""
        return self.gives if self.gives in ("policy", "reward_model") else None


_STAGES: tuple[PipelineStage, ...] = (
    PipelineStage(
        name="prepare_data",
        task="tasks.stages.prepare_data:prepare_data",
        takes=("base",),
        gives="data",
        uses_gpu=False,
    ),
    PipelineStage(
        name="sft",
        task="tasks.stages.sft:sft",
        takes=("model", "data"),
        needs=("data",),
        gives="policy",
        learns_from="demonstrations",
    ),
    PipelineStage(
        name="distill",
        task="tasks.stages.distill:distill",
        takes=("model", "data"),
        gives="policy",
    ),
    PipelineStage(
        name="preference",
        task="tasks.stages.preference:optimise_preferences",
        takes=("model", "data"),
        gives="policy",
        learns_from="preferences",
    ),
    PipelineStage(
        name="reward_model",
        task="tasks.stages.reward_model:reward_model",
        takes=("model", "data"),
        gives="reward_model",
    ),
    PipelineStage(
        name="policy",
        task="tasks.stages.policy:optimise_policy",
        takes=("model", "data", "reward_model"),
        gives="policy",
    ),
    PipelineStage(
        name="thoughts",
        task="tasks.stages.thoughts:learn_thoughts",
        takes=("model", "data"),
        gives="policy",
    ),
    PipelineStage(
        name="evaluate",
        task="tasks.stages.evaluate:evaluate_models",
        takes=("models", "data"),
        gives="evaluation",
    ),
    PipelineStage(
        name="analyze",
        task="tasks.stages.analyze:analyze_trajectories",
        takes=("evaluation", "models", "data", "reward_model"),
        needs=("evaluation",),
    ),
    PipelineStage(
        name="promote",
        task="tasks.stages.promote:promote",
        takes=("evaluation", "challenger", "data"),
        needs=("evaluation", "challenger"),
        uses_gpu=False,
    ),
)


def stages() -> tuple[PipelineStage, ...]:
    """All stages, in the order in which they run."""
    return _STAGES


def names() -> tuple[str, ...]:
    """Names of all stages, in the order in which they run."""
    return tuple(stage.name for stage in _STAGES)


def entry(name: str) -> PipelineStage:
    """The stage of that name. Raises: ValueError."""
    found = next((stage for stage in _STAGES if stage.name == name), None)
    if found is None:
        raise ValueError(f"no stage '{name}' is registered; known: {', '.join(names())}")
    return found


def policy_stages() -> tuple[str, ...]:
    """Names of the stages that train a policy, each starting from the one before it."""
    return tuple(stage.name for stage in _STAGES if stage.trains == "policy")


def training_stages() -> tuple[str, ...]:
    """Names of the stages that train a policy or a reward model."""
    return tuple(stage.name for stage in _STAGES if stage.trains is not None)


def result_stages() -> tuple[str, ...]:
    """Names of the stages whose results are for people: nothing is trained from them."""
    return tuple(stage.name for stage in _STAGES if stage.gives in (None, "evaluation"))


def register(stage: PipelineStage, *, before: str | None = None) -> None:
    """Add a stage before another one; None = at the end.

    Raises: ValueError for a name that is taken, an unknown `before`, or a need that is not among `takes`.
    """
    global _STAGES
    if stage.name in names():
        raise ValueError(f"a stage '{stage.name}' is registered already; give yours another name")
    if missing := [need for need in stage.needs if need not in stage.takes]:
        raise ValueError(f"stage '{stage.name}' needs {', '.join(missing)}, which it does not take; add it to takes")
    index = len(_STAGES) if before is None else _STAGES.index(entry(before))
    _STAGES = (*_STAGES[:index], stage, *_STAGES[index:])


def task_of(stage: PipelineStage) -> Callable[..., Any]:
    """The stage's function, imported now."""
    module, _, function = stage.task.partition(":")
    task: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return task
