"""Report of a pipeline plan, as text and as a record, with settings changes that make a stage fit its device."""

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

GIB = 2**30
MIN_MICRO_BATCH_TOKENS = 64
MAX_PROCESSES = 1024  # limit of `launch`
_MEMORY_FIGURES = {
    "cpu": "memory: peak resident memory of a process (VmHWM). glibc's heap keeps what is freed, so a monitor shows "
    "the peak for the rest of the stage",
    "cuda": "memory: peak that torch allocates on each GPU. The CUDA context and cached blocks come on top",
}

# Description, key, values from the mildest on, settings with a value.
_CandidateChange = tuple[str, str, list[Any], Callable[[Any], PipelineSettings]]


@dataclass(frozen=True, slots=True)
class FittingChange:
    """Change of one setting, and the plan with it."""

    description: str
    yaml: str  # KEY=VALUE, also for --set
    plan: StagePlan
    saved_bytes: int  # of the peak
    added_seconds: float | None  # None = unknown
    fits: bool


def fits_target(plan: StagePlan, target: PlanTarget) -> bool:
    """Return whether the peak fits into the device's memory.

    Processes that share a machine count together.
    """
    num_sharing = plan.processes if target.device == "cpu" else 1
    return plan.memory.peak.total * num_sharing <= target.memory_bytes


def find_fitting_changes(
    plan: StagePlan,
    settings: PipelineSettings,
    target: PlanTarget,
    lengths: PlanLengths,
    max_changes: int = 3,
) -> list[FittingChange]:
    """Return the cheapest single changes that make the stage fit, then those that save most.

    Args:
        max_changes: number of changes returned.
    """
    changes = []
    for description, key, values, apply_change in _iter_candidate_changes(
        plan.name, settings, target
    ):
        best: FittingChange | None = None
        for value in values:  # the mildest first
            try:
                changed_plan = plan_stage(plan.name, apply_change(value), target, lengths)
            except SettingsError:  # an invalid combination
                continue
            line = f"{key}={_format_yaml_value(value)}"
            change = _build_change(plan, changed_plan, description, line, target)
            if change.saved_bytes > (best.saved_bytes if best is not None else 0):
                best = change
            if change.fits:
                break
        if best is not None:
            changes.append(best)
    changes.sort(key=_rank_change)
    return changes[:max_changes]


def _rank_change(change: FittingChange) -> tuple[bool, float]:
    if change.fits:
        return False, change.added_seconds or 0.0
    return True, -change.saved_bytes


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


def _iter_candidate_changes(
    name: str, settings: PipelineSettings, target: PlanTarget
) -> Iterator[_CandidateChange]:
    """Yield every change that the stage allows."""
    block = getattr(settings.stages, name)
    if isinstance(block, NetworkSettings):  # small networks in one process
        return

    def with_block(**changes: Any) -> PipelineSettings:
        stages = settings.stages.replace_stages({name: dataclasses.replace(block, **changes)})
        return dataclasses.replace(settings, stages=stages)

    if isinstance(block, OptimizerSettings):
        is_pretrained = settings.model.path is not None and name != "reward_model"
        if settings.model.lora is None and is_pretrained:
            model = dataclasses.replace(settings.model, lora=LoraSettings())
            with_lora = dataclasses.replace(settings, model=model)
            yield "LoRA", "model.lora", [{}], lambda _: with_lora
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
    has_reference = isinstance(block, PolicySettings) and block.kl_coef > 0
    if has_reference and block.reference_precision == "full":
        yield (
            "int8 reference",
            f"stages.{name}.reference_precision",
            ["int8"],
            lambda value: with_block(reference_precision=value),
        )
    if isinstance(block, LoopSettings):
        processes = block.launch.processes * block.launch.nodes
        # Processes on one CPU share its memory, so more of them save nothing.
        limit = target.gpus if target.device == "cuda" else processes
        counts = [processes * 2**power for power in range(1, 11)]
        yield (
            "more processes with FSDP",
            f"stages.{name}.launch",
            [_build_launch_setting(count) for count in counts if count <= limit],
            lambda value: with_block(launch=LaunchSettings(**value)),
        )


def _build_launch_setting(processes: int) -> dict[str, Any]:
    return {"kind": "torchrun", "processes": min(processes, MAX_PROCESSES)}


def _list_halves(value: int, minimum: int) -> list[int]:
    """Return half of the value, a quarter, and so on down to the minimum."""
    halves = []
    while value // 2 >= minimum:
        value //= 2
        halves.append(value)
    return halves


def build_plan_record(
    plan: PipelinePlan, target: PlanTarget, changes: Mapping[str, Sequence[FittingChange]]
) -> dict[str, Any]:
    """Return the plan as a record: bytes, tokens, operations, seconds."""
    gpu = target.gpu
    sources = [] if gpu is None else [text for text in (gpu.source, gpu.mfu_source) if text]
    return {
        "target": {
            "name": target.name,
            "device": target.device,
            "memory_bytes": target.memory_bytes,
            "figure": _MEMORY_FIGURES[target.device],
            "sources": sources,
            "mfu": None if gpu is None else gpu.mfu,
        },
        "stages": [
            _build_stage_record(stage, target, changes.get(stage.name, ())) for stage in plan.stages
        ],
        "not_planned": list(plan.unplanned_stages),
    }


def _build_stage_record(
    stage: StagePlan, target: PlanTarget, changes: Sequence[FittingChange]
) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "parameters": stage.parameters,
        "trainable_parameters": stage.trainable_parameters,
        "processes": stage.processes,
        "fits": fits_target(stage, target),
        "peak_bytes": stage.memory.peak.total,
        "peak_phase": stage.memory.peak.name,
        "binding_part": stage.memory.largest_part,
        "phases": [
            {"phase": phase.name, "bytes": dict(phase.parts)} for phase in stage.memory.phases
        ],
        "work": None if stage.work is None else asdict(stage.work) | {"flops": stage.work.flops},
        "seconds": None if stage.time is None else asdict(stage.time),
        "notes": list(stage.notes),
        "changes": [
            {
                "change": change.description,
                "set": change.yaml,
                "saved_bytes": change.saved_bytes,
                "added_seconds": change.added_seconds,
                "fits": change.fits,
            }
            for change in changes
        ],
    }


def format_plan(
    plan: PipelinePlan, target: PlanTarget, changes: Mapping[str, Sequence[FittingChange]]
) -> str:
    """Format a block per stage: parameters, memory by part at its peak, work, hours, and changes if it does not fit."""
    lines = [
        f"on {target.name}: {_format_size(target.memory_bytes)} of memory",
        _MEMORY_FIGURES[target.device],
    ]
    lines += _format_sources(target)
    for stage in plan.stages:
        lines += ["", *_format_stage(stage, target)]
        lines += [_format_change(change) for change in changes.get(stage.name, ())]
    times = [stage.time for stage in plan.stages if stage.time is not None]
    if times:
        unknown = [stage.name for stage in plan.stages if stage.time is None]
        exception = f" but {', '.join(unknown)}" if unknown else ""
        lines += ["", f"all of them{exception}: {_format_total_time(times)}"]
    if plan.unplanned_stages:
        lines += ["", f"not planned: {', '.join(plan.unplanned_stages)}"]
    return "\n".join(lines)


def _format_sources(target: PlanTarget) -> list[str]:
    gpu = target.gpu
    if gpu is None:
        if target.machine is None:
            return ["hours; no speeds: posttrain check machine --calibrate measures them"]
        return ["hours: medians, [fastest, slowest] of the calibration"]
    flops = f"{gpu.flops_per_second / 1e12:,.0f} TFLOP/s"
    peak = f"peak {flops}, {gpu.bytes_per_second / 1e12:.3g} TB/s ({gpu.source})"
    if gpu.mfu is None:
        return [
            f"hours: at the full {peak}, a lower bound: no MFU is published that could be cited"
        ]
    low, high = gpu.mfu
    return [
        f"hours: {low:.0%} to {high:.0%} of the {peak}; MFU of pre-training: {gpu.mfu_source}. Small models reach less"
    ]


def _format_stage(stage: StagePlan, target: PlanTarget) -> list[str]:
    peak = stage.memory.peak
    verdict = "fits" if fits_target(stage, target) else "DOES NOT FIT"
    processes = f", {stage.processes} processes, each" if stage.processes > 1 else ""
    parameters = _format_count(stage.parameters)
    trainable = _format_count(stage.trainable_parameters)
    lines = [
        f"{stage.name}: {parameters} parameters, {trainable} trained{processes}",
        f"  memory {_format_size(peak.total)} in the phase '{peak.name}', most of it "
        f"{stage.memory.largest_part}: {verdict}",
    ]
    width = max(len(name) for name in peak.parts)
    ordered = sorted(peak.parts.items(), key=lambda item: -item[1])
    lines += [f"    {name.ljust(width)}  {_format_size(size):>10}" for name, size in ordered]
    if stage.work is not None:
        work = stage.work
        counts = {
            "trained": work.trained_tokens,
            "scored or read": work.scored_tokens,
            "sampled": work.decoded_tokens,
        }
        tokens = ", ".join(
            f"{_format_count(count)} {kind}" for kind, count in counts.items() if count
        )
        updates = _format_count(work.updates)
        lines.append(f"  tokens {tokens}; {work.flops:.3g} FLOP; {updates} optimizer steps")
    if stage.time is not None:
        lines.append(f"  time {_format_interval(stage.time)}")
    return lines + [f"  {note}" for note in stage.notes]


def _format_change(change: FittingChange) -> str:
    cost = "time not known"
    if change.added_seconds is not None:
        cost = _format_duration(change.added_seconds, signed=True)
    saving = f"saves {_format_size(change.saved_bytes)}, {cost}"
    suffix = "" if change.fits else ", not enough alone"
    return f"  -> {change.yaml}    # {change.description}: {saving}{suffix}"


def _format_total_time(times: Sequence[StageTime]) -> str:
    highs = [time.high for time in times if time.high is not None]
    likely = [time.likely for time in times if time.likely is not None]
    total = StageTime(
        sum(time.low for time in times),
        sum(highs) if len(highs) == len(times) else None,
        sum(likely) if len(likely) == len(times) else None,
    )
    return _format_interval(total)


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
        if number >= 0.9995 * limit:  # 999,950 is 1M with three digits
            return f"{_format_three_digits(number / limit)}{unit}"
    return _format_three_digits(number)


def _format_three_digits(number: float) -> str:
    """Format three significant digits, without an exponent for large numbers."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
