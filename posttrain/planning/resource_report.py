"""Changes of the settings that make a stage fit its device, the cheapest in time first.

Plan of a pipeline as text for the terminal, and as plain values.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.planning.pipeline_plan import PipelinePlan, plan_stage
from posttrain.planning.stage_planner import StagePlan
from posttrain.planning.target import PlanLengths, PlanTarget
from rl_core.errors import SettingsError
from rl_core.resources.stage_time import StageTime
from rl_core.settings import (
    LoopSettings,
    LoraSettings,
    NetworkSettings,
    OptimizerSettings,
    PolicySettings,
)
from rl_core.settings.training import LaunchSettings
from tasks.config import PipelineSettings

MIN_MICRO_BATCH_TOKENS = 64  # of a micro-batch
MAX_PROCESSES = 1024  # as in `launch`


@dataclass(frozen=True, slots=True)
class FittingChange:
    """One change of the settings, and the plan with it."""

    description: str
    yaml: str  # the line to set, for --set too
    plan: StagePlan
    saved_bytes: int  # of the peak
    added_seconds: float | None  # None = the time is not known
    fits: bool


def fits_target(plan: StagePlan, target: PlanTarget) -> bool:
    """True = the peak is within the memory of the device; of all processes together, where they share a machine."""
    shared = plan.processes if target.device == "cpu" else 1
    return plan.memory.peak.total * shared <= target.memory_bytes


def find_fitting_changes(
    plan: StagePlan,
    settings: PipelineSettings,
    target: PlanTarget,
    lengths: PlanLengths,
    max_changes: int = 3,
) -> list[FittingChange]:
    """The cheapest single changes that make the stage fit; where there are fewer, those that save most after them."""
    found = []
    for words, key, values, changed in _iter_candidate_changes(plan.name, settings, target):
        best: FittingChange | None = None
        for value in values:  # the mildest first
            try:
                with_it = plan_stage(plan.name, changed(value), target, lengths)
            except SettingsError:  # a combination that the settings refuse
                continue
            change = _build_change(
                plan, with_it, words, f"{key}={_format_yaml_value(value)}", target
            )
            if change.saved_bytes > (best.saved_bytes if best is not None else 0):
                best = change
            if change.fits:
                break
        if best is not None:
            found.append(best)
    found.sort(
        key=lambda one: (not one.fits, (one.added_seconds or 0.0) if one.fits else -one.saved_bytes)
    )
    return found[:max_changes]


def _build_change(
    before: StagePlan, after: StagePlan, description: str, line: str, target: PlanTarget
) -> FittingChange:
    added = None
    if before.time is not None and after.time is not None:
        added = after.time.expected_seconds - before.time.expected_seconds
    saved = before.memory.peak.total - after.memory.peak.total
    return FittingChange(description, line, after, saved, added, fits_target(after, target))


def _format_yaml_value(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


_CandidateChange = tuple[str, str, list[Any], Callable[[Any], PipelineSettings]]


def _iter_candidate_changes(
    name: str, settings: PipelineSettings, target: PlanTarget
) -> Iterator[_CandidateChange]:
    """(words, key, values from the mildest on, settings with a value) of every change that the stage allows."""
    block = getattr(settings.stages, name)
    if isinstance(block, NetworkSettings):  # small networks of another kind, in one process
        return

    def with_block(**changes: Any) -> PipelineSettings:
        stages = settings.stages.replace_stages({name: dataclasses.replace(block, **changes)})
        return dataclasses.replace(settings, stages=stages)

    if isinstance(block, OptimizerSettings):
        if (
            settings.model.lora is None
            and settings.model.path is not None
            and name != "reward_model"
        ):
            yield (
                "LoRA",
                "model.lora",
                [{}],
                lambda _: dataclasses.replace(
                    settings, model=dataclasses.replace(settings.model, lora=LoraSettings())
                ),
            )
        if not block.activation_checkpointing:
            yield (
                "activation checkpointing",
                f"stages.{name}.activation_checkpointing",
                [True],
                lambda value: with_block(activation_checkpointing=value),
            )
        yield (
            "smaller micro-batches",
            f"stages.{name}.micro_batch_tokens",
            _list_halves(block.micro_batch_tokens, MIN_MICRO_BATCH_TOKENS),
            lambda value: with_block(micro_batch_tokens=value),
        )
    sampling = getattr(block, "sampling", None)
    if sampling is not None:
        yield (
            "fewer slots",
            f"stages.{name}.sampling.slots",
            _list_halves(sampling.slots, 1),
            lambda value: with_block(sampling=dataclasses.replace(sampling, slots=value)),
        )
    if (
        isinstance(block, PolicySettings)
        and block.kl_coef > 0
        and block.reference_precision == "full"
    ):
        yield (
            "int8 reference",
            f"stages.{name}.reference_precision",
            ["int8"],
            lambda value: with_block(reference_precision=value),
        )
    if isinstance(block, LoopSettings):
        present = block.launch.processes * block.launch.nodes
        limit = (
            target.gpus if target.device == "cuda" else present
        )  # processes on one CPU share its memory
        values = [
            count for count in (present * 2**power for power in range(1, 11)) if count <= limit
        ]
        yield (
            "more processes with FSDP",
            f"stages.{name}.launch",
            [_build_launch_setting(count) for count in values],
            lambda value: with_block(launch=LaunchSettings(**value)),
        )


def _build_launch_setting(processes: int) -> dict[str, Any]:
    return {"kind": "torchrun", "processes": min(processes, MAX_PROCESSES)}


def _list_halves(value: int, minimum: int) -> list[int]:
    """Half of it, a quarter, and so on down to `least`."""
    found = []
    while value // 2 >= minimum:
        value //= 2
        found.append(value)
    return found


GIB = 2**30
_MEMORY_FIGURES = {
    "cpu": "memory: peak resident memory of a process (VmHWM). glibc's heap keeps what is freed, so a monitor shows "
    "the peak for the rest of the stage",
    "cuda": "memory: peak that torch allocates on each GPU. The CUDA context and cached blocks come on top",
}


def build_plan_record(
    plan: PipelinePlan, target: PlanTarget, changes: Mapping[str, Sequence[FittingChange]]
) -> dict[str, Any]:
    """Plain values: bytes, tokens, operations, seconds."""
    gpu = target.gpu
    return {
        "target": {
            "name": target.name,
            "device": target.device,
            "memory_bytes": target.memory_bytes,
            "figure": _MEMORY_FIGURES[target.device],
            "sources": []
            if gpu is None
            else [text for text in (gpu.source, gpu.mfu_source) if text],
            "mfu": None if gpu is None else gpu.mfu,
        },
        "stages": [
            {
                "stage": one.name,
                "parameters": one.parameters,
                "trainable_parameters": one.trainable_parameters,
                "processes": one.processes,
                "fits": fits_target(one, target),
                "peak_bytes": one.memory.peak.total,
                "peak_phase": one.memory.peak.name,
                "binding_part": one.memory.largest_part,
                "phases": [
                    {"phase": phase.name, "bytes": dict(phase.parts)} for phase in one.memory.phases
                ],
                "work": None if one.work is None else asdict(one.work) | {"flops": one.work.flops},
                "seconds": None if one.time is None else asdict(one.time),
                "notes": list(one.notes),
                "changes": [
                    {
                        "change": change.description,
                        "set": change.yaml,
                        "saved_bytes": change.saved_bytes,
                        "added_seconds": change.added_seconds,
                        "fits": change.fits,
                    }
                    for change in changes.get(one.name, ())
                ],
            }
            for one in plan.stages
        ],
        "not_planned": list(plan.unplanned_stages),
    }


def format_plan(
    plan: PipelinePlan, target: PlanTarget, changes: Mapping[str, Sequence[FittingChange]]
) -> str:
    """A block a stage: parameters, memory by part at its peak, work, hours; what to change where it does not fit."""
    lines = [
        f"on {target.name}: {_format_size(target.memory_bytes)} of memory",
        _MEMORY_FIGURES[target.device],
    ]
    lines += _format_sources(target)
    for one in plan.stages:
        lines += ["", *_format_stage(one, target)]
        for change in changes.get(one.name, ()):
            lines.append(_format_change(change))
    unknown = [one.name for one in plan.stages if one.time is None]
    if total := _format_total_time([one.time for one in plan.stages if one.time is not None]):
        but = f" but {', '.join(unknown)}" if unknown else ""
        lines += ["", f"all of them{but}: {total}"]
    if plan.unplanned_stages:
        lines += ["", f"not planned: {', '.join(plan.unplanned_stages)}"]
    return "\n".join(lines)


def _format_sources(target: PlanTarget) -> list[str]:
    gpu = target.gpu
    if gpu is None:
        speeds = (
            ""
            if target.machine is not None
            else "; no speeds: posttrain doctor --calibrate measures them"
        )
        return (
            [f"hours: medians, [fastest, slowest] of the calibration{speeds}"]
            if not speeds
            else [f"hours{speeds}"]
        )
    peak = f"peak {gpu.flops_per_second / 1e12:,.0f} TFLOP/s, {gpu.bytes_per_second / 1e12:.3g} TB/s ({gpu.source})"
    if gpu.mfu is None:
        return [
            f"hours: at the full {peak}, a lower bound: no MFU is published that could be cited"
        ]
    low, high = gpu.mfu
    return [
        f"hours: {low:.0%} to {high:.0%} of the {peak}; MFU of pre-training: {gpu.mfu_source}. Small models reach less"
    ]


def _format_stage(one: StagePlan, target: PlanTarget) -> list[str]:
    peak = one.memory.peak
    verdict = "fits" if fits_target(one, target) else "DOES NOT FIT"
    processes = f", {one.processes} processes, each" if one.processes > 1 else ""
    lines = [
        f"{one.name}: {_format_count(one.parameters)} parameters, {_format_count(one.trainable_parameters)} trained{processes}",
        f"  memory {_format_size(peak.total)} in the phase '{peak.name}', most of it {one.memory.largest_part}: {verdict}",
    ]
    width = max(len(name) for name in peak.parts)
    ordered = sorted(peak.parts.items(), key=lambda item: -item[1])
    lines += [f"    {name.ljust(width)}  {_format_size(size):>10}" for name, size in ordered]
    if one.work is not None:
        work = one.work
        counted = {
            "trained": work.trained_tokens,
            "scored or read": work.scored_tokens,
            "sampled": work.decoded_tokens,
        }
        tokens = ", ".join(
            f"{_format_count(count)} {words}" for words, count in counted.items() if count
        )
        lines.append(
            f"  tokens {tokens}; {work.flops:.3g} FLOP; {_format_count(work.updates)} optimizer steps"
        )
    if one.time is not None:
        lines.append(f"  time {_format_interval(one.time)}")
    return lines + [f"  {note}" for note in one.notes]


def _format_change(change: FittingChange) -> str:
    cost = (
        "time not known"
        if change.added_seconds is None
        else f"{_format_duration(change.added_seconds, signed=True)}"
    )
    enough = "" if change.fits else ", not enough alone"
    return f"  -> {change.yaml}    # {change.description}: saves {_format_size(change.saved_bytes)}, {cost}{enough}"


def _format_total_time(known: Sequence[StageTime]) -> str:
    if not known:
        return ""
    highs, likely = [time.high for time in known], [time.likely for time in known]
    return _format_interval(
        StageTime(
            sum(time.low for time in known),
            None if None in highs else sum(high or 0.0 for high in highs),
            None if None in likely else sum(value or 0.0 for value in likely),
        )
    )


def _format_interval(time: StageTime) -> str:
    if time.high is None:
        return f"at least {_format_duration(time.low)}"
    ends = f"[{_format_duration(time.low)}, {_format_duration(time.high)}]"
    return ends if time.likely is None else f"{_format_duration(time.likely)} {ends}"


def _format_duration(seconds: float, *, signed: bool = False) -> str:
    sign = ("+" if seconds >= 0 else "-") if signed else ""
    size = abs(seconds)
    for limit, unit in ((3600, "h"), (60, "min")):
        if size >= limit:
            return f"{sign}{_format_three_digits(size / limit)} {unit}"
    return f"{sign}{_format_three_digits(size)} s"


def _format_size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _format_count(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * limit:  # 999,950 is 1M, as it is shown with three digits
            return f"{_format_three_digits(number / limit)}{unit}"
    return _format_three_digits(number)


def _format_three_digits(number: float) -> str:
    """Three significant digits, without an exponent for large numbers."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
