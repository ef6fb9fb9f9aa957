"""Changes of the settings that make a stage fit its device, the cheapest in time first."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flows.planning.plan_target import Lengths, Target
from flows.planning.stage_plans import StagePlan, plan_stage
from rl_core.errors import SettingsError
from rl_core.settings import LoopSettings, LoraSettings, NetworkSettings, OptimizerSettings, PolicySettings
from rl_core.settings.launch import LaunchSettings
from tasks.config import PipelineSettings

__all__ = ["FittingChange", "changes_for", "fits"]

LEAST_TOKENS = 64  # of a micro-batch
MOST_PROCESSES = 1024  # as in `launch`


@dataclass(frozen=True, slots=True)
class FittingChange:
    """One change of the settings, and the plan with it."""

    words: str
    yaml: str  # the line to set, for --set too
    plan: StagePlan
    saved_bytes: int  # of the peak
    added_seconds: float | None  # None = the time is not known
    fits: bool


def fits(plan: StagePlan, target: Target) -> bool:
    """True = the peak is within the memory of the device; of all processes together, where they share a machine."""
    shared = plan.processes if target.device == "cpu" else 1
    return plan.memory.peak.total * shared <= target.memory_bytes


def changes_for(
    plan: StagePlan, settings: PipelineSettings, target: Target, lengths: Lengths, most: int = 3
) -> list[FittingChange]:
    """The cheapest single changes that make the stage fit; where there are fewer, those that save most after them."""
    found = []
    for words, key, values, changed in _candidates(plan.name, settings, target):
        best: FittingChange | None = None
        for value in values:  # the mildest first
            try:
                with_it = plan_stage(plan.name, changed(value), target, lengths)
            except SettingsError:  # a combination that the settings refuse
                continue
            change = _change(plan, with_it, words, f"{key}={_yaml(value)}", target)
            if change.saved_bytes > (best.saved_bytes if best is not None else 0):
                best = change
            if change.fits:
                break
        if best is not None:
            found.append(best)
    found.sort(key=lambda one: (not one.fits, (one.added_seconds or 0.0) if one.fits else -one.saved_bytes))
    return found[:most]


def _change(before: StagePlan, after: StagePlan, words: str, line: str, target: Target) -> FittingChange:
    added = None
    if before.time is not None and after.time is not None:
        added = after.time.shown - before.time.shown
    saved = before.memory.peak.total - after.memory.peak.total
    return FittingChange(words, line, after, saved, added, fits(after, target))


def _yaml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


_Candidate = tuple[str, str, list[Any], Callable[[Any], PipelineSettings]]


def _candidates(name: str, settings: PipelineSettings, target: Target) -> Iterator[_Candidate]:
    """(words, key, values from the mildest on, settings with a value) of every change that the stage allows."""
    block = getattr(settings.stages, name)
    if isinstance(block, NetworkSettings):  # small networks of another kind, in one process
        return

    def with_block(**changes: Any) -> PipelineSettings:
        stages = settings.stages.with_stages({name: dataclasses.replace(block, **changes)})
        return dataclasses.replace(settings, stages=stages)

    if isinstance(block, OptimizerSettings):
        if settings.model.lora is None and settings.model.path is not None and name != "reward_model":
            yield (
                "LoRA", "model.lora", [{}],
                lambda _: dataclasses.replace(settings, model=dataclasses.replace(settings.model, lora=LoraSettings())),
            )  # fmt: skip
        if not block.activation_checkpointing:
            yield (
                "activation checkpointing", f"stages.{name}.activation_checkpointing", [True],
                lambda value: with_block(activation_checkpointing=value),
            )  # fmt: skip
        yield (
            "smaller micro-batches", f"stages.{name}.micro_batch_tokens",
            _halves(block.micro_batch_tokens, LEAST_TOKENS), lambda value: with_block(micro_batch_tokens=value),
        )  # fmt: skip
    sampling = getattr(block, "sampling", None)
    if sampling is not None:
        yield (
            "fewer slots", f"stages.{name}.sampling.slots", _halves(sampling.slots, 1),
            lambda value: with_block(sampling=dataclasses.replace(sampling, slots=value)),
        )  # fmt: skip
    if isinstance(block, PolicySettings) and block.kl_coef > 0 and block.reference_precision == "full":
        yield (
            "int8 reference", f"stages.{name}.reference_precision", ["int8"],
            lambda value: with_block(reference_precision=value),
        )  # fmt: skip
    if isinstance(block, LoopSettings):
        present = block.launch.processes * block.launch.nodes
        limit = target.gpus if target.device == "cuda" else present  # processes on one CPU share its memory
        values = [count for count in (present * 2**power for power in range(1, 11)) if count <= limit]
        yield (
            "more processes with FSDP", f"stages.{name}.launch", [_launch(count) for count in values],
            lambda value: with_block(launch=LaunchSettings(**value)),
        )  # fmt: skip


def _launch(processes: int) -> dict[str, Any]:
    return {"kind": "torchrun", "processes": min(processes, MOST_PROCESSES)}


def _halves(value: int, least: int) -> list[int]:
    """Half of it, a quarter, and so on down to `least`."""
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found
