"""Registry of the pipeline's stages: name, task, inputs and outputs of each, in the order in which they run.

Everything that needs to know the stages asks here: the settings, the command line, the DAG of the flow, the parent of a
model version, profiles, figures. The module imports only the standard library (`posttrain --help` reads it), so tasks
are named by import path and imported when they are called.

A user-defined stage is a `CustomStage` that the config names under `stages.custom`; loading the config registers it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Product = Literal[
    "data", "policy", "reward_model", "network", "evaluation", "suites", "proof", "decision"
]

# base (the starting model; None = a preset), model (the newest policy), data, reward_model (results of those stages),
# models (the policies by stage name), evaluation, suites (results of other evaluators), challenger (the newest trained
# policy's result), proof (of their export), decision (the promotion's result).
STAGE_INPUTS = (
    "base",
    "model",
    "data",
    "reward_model",
    "models",
    "evaluation",
    "suites",
    "challenger",
    "proof",
    "decision",
)


START_MODEL = (
    "base"  # name of the model at `model.path` in evaluations, beside the stages that train
)


@dataclass(frozen=True)
class CustomStage:
    """A user-defined stage: an object in the user's code that `stages.custom` of a config names.

    `body(context)` writes into `context.folder`, the model into `context.folder / "model"`, and returns the summary
    (`note` is a sentence; `metrics` go to the model's version). Its inputs are `context.inputs[name]` for each
    available one of `takes`: folders or hub names (for `models` one per model, `model.NAME`).
    Raises: ValueError for an unknown input.
    """

    body: Callable[[Any], dict[str, Any]]  # receives a tasks.pipeline.stage.StageContext
    settings: (
        type  # subclass of rl_core.settings.Settings, or of LoopSettings if it trains with the loop
    )
    takes: tuple[str, ...] = ("model",)  # from STAGE_INPUTS
    needs: tuple[str, ...] = ()
    gives: Product | None = None
    # stage that it runs before; None = evaluate if it gives a policy, else at the end
    before: str | None = None
    learns_from: str = ""
    uses_gpu: bool = True

    def __post_init__(self) -> None:
        for name in self.takes:
            if name not in STAGE_INPUTS:
                raise ValueError(f"takes: there is no '{name}'; known: {', '.join(STAGE_INPUTS)}")
        if self.gives not in (None, "policy", "reward_model"):
            raise ValueError(
                f"gives: {self.gives!r}; a stage of yours gives a policy, a reward_model, or None"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStage:
    """One stage. Its settings are the field `name` of `StagesSettings`.

    `takes` names what the flow passes to the task after the run itself, in order; see STAGE_INPUTS.
    """

    name: str
    task: str  # "package.module:function", called as function(pipeline_run, *takes)
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()  # the required ones of `takes`; the others may be None
    # policy: the next stages start from it; network: no stage uses it; None = a result for people
    gives: Product | None = None
    learns_from: str = ""  # field of DataSettings with the file that it imitates, if it does
    uses_gpu: bool = True
    custom: CustomStage | None = None  # set for a user-defined stage

    @property
    def trained_kind(self) -> Literal["policy", "reward_model", "network"] | None:
        """Kind of model that the stage trains (and registers, if it is a language model); None = none."""
        return self.gives if self.gives in ("policy", "reward_model", "network") else None


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
        task="tasks.stages.sft:train_sft",
        takes=("model", "data"),
        needs=("data",),
        gives="policy",
        learns_from="demonstrations",
    ),
    PipelineStage(
        name="distill",
        task="tasks.stages.distill:distill_from_teacher",
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
        task="tasks.stages.reward_model:train_reward_model",
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
        name="network",
        task="tasks.stages.network:train_network",
        takes=(),
        gives="network",
        uses_gpu=False,
    ),
    PipelineStage(
        name="evaluate",
        task="tasks.stages.evaluate:evaluate_models",
        takes=("models", "data"),
        gives="evaluation",
    ),
    PipelineStage(
        name="suites",
        task="tasks.stages.suites:run_model_suites",
        takes=("models",),
        gives="suites",
    ),
    PipelineStage(
        name="analyze",
        task="tasks.stages.analyze:analyze_trajectories",
        takes=("evaluation", "models", "data", "reward_model", "suites"),
        needs=("evaluation",),
    ),
    PipelineStage(
        name="export",
        task="tasks.stages.export:prove_models",
        takes=("evaluation", "models", "reward_model"),
        needs=("evaluation",),
        gives="proof",
    ),
    PipelineStage(
        name="promote",
        task="tasks.stages.promote:promote_challenger",
        takes=("evaluation", "challenger", "data", "proof", "suites"),
        needs=("evaluation", "challenger", "proof"),
        gives="decision",
        uses_gpu=False,
    ),
    PipelineStage(
        name="gguf",
        task="tasks.stages.gguf:write_gguf",
        takes=("challenger", "decision"),
        needs=("challenger",),
        uses_gpu=False,
    ),
)


def list_stages() -> tuple[PipelineStage, ...]:
    """List all stages in the order in which they run."""
    return _STAGES


def list_stage_names() -> tuple[str, ...]:
    """List the names of all stages in the order in which they run."""
    return tuple(stage.name for stage in _STAGES)


def find_stage(name: str) -> PipelineStage:
    """Find the stage of that name. Raises: ValueError."""
    match = next((stage for stage in _STAGES if stage.name == name), None)
    if match is None:
        raise ValueError(f"no stage '{name}' is registered; known: {', '.join(list_stage_names())}")
    return match


def describe_unknown_stage(name: str, active: Sequence[str]) -> str:
    """Describe a stage that a pipeline lacks: suggest the one that was probably meant, else list all that it has."""
    import difflib  # imported here: needed only for errors

    known = name in list_stage_names()
    if not known and (near := difflib.get_close_matches(name, {*active, *list_stage_names()}, n=1)):
        return f"has no stage '{name}'; did you mean '{near[0]}'?"
    remedy = (
        f"add it with --set stages.{name}={{}}" if known else "name your own under stages.custom"
    )
    return f"has no stage '{name}', only {', '.join(active)}; {remedy}"


def list_policy_stages() -> tuple[str, ...]:
    """List the names of the stages that train a policy, each starting from the previous one."""
    return tuple(stage.name for stage in _STAGES if stage.trained_kind == "policy")


def list_training_stages() -> tuple[str, ...]:
    """List the names of the stages that train a policy, a reward model or a network."""
    return tuple(stage.name for stage in _STAGES if stage.trained_kind is not None)


def list_result_stages() -> tuple[str, ...]:
    """List the names of the stages whose results are for people: nothing is trained from them."""
    results = (None, "evaluation", "suites", "proof", "decision")
    return tuple(stage.name for stage in _STAGES if stage.gives in results)


def register_stage(stage: PipelineStage, *, before: str | None = None) -> None:
    """Register a stage before another one; None = at the end.

    Raises: ValueError for a name that is taken, an unknown `before`, or a need that is not among `takes`.
    """
    global _STAGES
    if stage.name in list_stage_names():
        raise ValueError(f"a stage '{stage.name}' is registered already; give yours another name")
    if missing := [need for need in stage.needs if need not in stage.takes]:
        raise ValueError(
            f"stage '{stage.name}' needs {', '.join(missing)}, which it does not take; add it to takes"
        )
    index = len(_STAGES) if before is None else _STAGES.index(find_stage(before))
    _STAGES = (*_STAGES[:index], stage, *_STAGES[index:])


def register_custom_stage(name: str, custom: CustomStage, path: str) -> None:
    """Register a user-defined stage, or replace the one that an earlier config gave this name.

    Raises: as `register_stage`.
    """
    global _STAGES
    without_old = tuple(stage for stage in _STAGES if stage.name != name or stage.custom is None)
    stage = PipelineStage(
        name=name,
        task=path,
        takes=custom.takes,
        needs=custom.needs,
        gives=custom.gives,
        learns_from=custom.learns_from,
        uses_gpu=custom.uses_gpu,
        custom=custom,
    )
    previous, _STAGES = _STAGES, without_old
    try:
        register_stage(
            stage, before=custom.before or ("evaluate" if custom.gives == "policy" else None)
        )
    except ValueError:
        _STAGES = previous
        raise


def import_stage_task(stage: PipelineStage) -> Callable[..., Any]:
    """Import the stage's function and return it."""
    path = stage.task if stage.custom is None else "tasks.stages.custom_stage:build_stage_task"
    module, _, function = path.partition(":")
    task: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return task if stage.custom is None else task(stage)


def __getattr__(name: str) -> Any:
    """Return `CustomStage` for its former name `OwnStage`, with a warning; removed in 0.3."""
    if name == "OwnStage":
        warnings.warn("OwnStage is now called CustomStage", FutureWarning, stacklevel=2)
        return CustomStage
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
