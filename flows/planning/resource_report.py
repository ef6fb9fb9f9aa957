"""Plan of a pipeline as text for the terminal, and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flows.planning.fitting_changes import FittingChange, fits
from flows.planning.plan_target import Target
from flows.planning.stage_plans import PipelinePlan, StagePlan
from rl_core.resources.stage_time import StageTime

__all__ = ["plan_record", "plan_text"]

GIB = 2**30
_FIGURE = {
    "cpu": "memory: peak resident memory of a process (VmHWM). glibc's heap keeps what is freed, so a monitor shows "
    "the peak for the rest of the stage",
    "cuda": "memory: peak that torch allocates on each GPU. The CUDA context and cached blocks come on top",
}


def plan_record(plan: PipelinePlan, target: Target, changes: Mapping[str, Sequence[FittingChange]]) -> dict[str, Any]:
    """Plain values: bytes, tokens, operations, seconds."""
    gpu = target.gpu
    return {
        "target": {
            "name": target.name, "device": target.device, "memory_bytes": target.memory_bytes,
            "figure": _FIGURE[target.device],
            "sources": [] if gpu is None else [text for text in (gpu.source, gpu.mfu_source) if text],
            "mfu": None if gpu is None else gpu.mfu,
        },
        "stages": [
            {
                "stage": one.name, "parameters": one.parameters, "trainable_parameters": one.trainable,
                "processes": one.processes, "fits": fits(one, target), "peak_bytes": one.memory.peak.total,
                "peak_phase": one.memory.peak.name, "binding_part": one.memory.binding,
                "phases": [{"phase": phase.name, "bytes": dict(phase.parts)} for phase in one.memory.phases],
                "work": None if one.work is None else asdict(one.work) | {"flops": one.work.flops},
                "seconds": None if one.time is None else asdict(one.time),
                "notes": list(one.notes),
                "changes": [
                    {"change": change.words, "set": change.yaml, "saved_bytes": change.saved_bytes,
                     "added_seconds": change.added_seconds, "fits": change.fits}
                    for change in changes.get(one.name, ())
                ],
            }
            for one in plan.stages
        ],
        "not_planned": list(plan.left_out),
    }  # fmt: skip


def plan_text(plan: PipelinePlan, target: Target, changes: Mapping[str, Sequence[FittingChange]]) -> str:
    """A block a stage: parameters, memory by part at its peak, work, hours; what to change where it does not fit."""
    lines = [f"on {target.name}: {_size(target.memory_bytes)} of memory", _FIGURE[target.device]]
    lines += _sources(target)
    for one in plan.stages:
        lines += ["", *_stage_lines(one, target)]
        for change in changes.get(one.name, ()):
            lines.append(_change_line(change))
    unknown = [one.name for one in plan.stages if one.time is None]
    if total := _total([one.time for one in plan.stages if one.time is not None]):
        but = f" but {', '.join(unknown)}" if unknown else ""
        lines += ["", f"all of them{but}: {total}"]
    if plan.left_out:
        lines += ["", f"not planned: {', '.join(plan.left_out)}"]
    return "\n".join(lines)


def _sources(target: Target) -> list[str]:
    gpu = target.gpu
    if gpu is None:
        speeds = "" if target.machine is not None else "; no speeds: posttrain doctor --calibrate measures them"
        return [f"hours: medians, [fastest, slowest] of the calibration{speeds}"] if not speeds else [f"hours{speeds}"]
    peak = f"peak {gpu.flops_per_second / 1e12:,.0f} TFLOP/s, {gpu.bytes_per_second / 1e12:.3g} TB/s ({gpu.source})"
    if gpu.mfu is None:
        return [f"hours: at the full {peak}, a lower bound: no MFU is published that could be cited"]
    low, high = gpu.mfu
    return [
        f"hours: {low:.0%} to {high:.0%} of the {peak}; MFU of pre-training: {gpu.mfu_source}. Small models reach less"
    ]


def _stage_lines(one: StagePlan, target: Target) -> list[str]:
    peak = one.memory.peak
    verdict = "fits" if fits(one, target) else "DOES NOT FIT"
    processes = f", {one.processes} processes, each" if one.processes > 1 else ""
    lines = [
        f"{one.name}: {_count(one.parameters)} parameters, {_count(one.trainable)} trained{processes}",
        f"  memory {_size(peak.total)} in the phase '{peak.name}', most of it {one.memory.binding}: {verdict}",
    ]
    width = max(len(name) for name in peak.parts)
    ordered = sorted(peak.parts.items(), key=lambda item: -item[1])
    lines += [f"    {name.ljust(width)}  {_size(size):>10}" for name, size in ordered]
    if one.work is not None:
        work = one.work
        counted = {"trained": work.trained_tokens, "scored or read": work.scored_tokens, "sampled": work.decoded_tokens}
        tokens = ", ".join(f"{_count(count)} {words}" for words, count in counted.items() if count)
        lines.append(f"  tokens {tokens}; {work.flops:.3g} FLOP; {_count(work.updates)} optimizer steps")
    if one.time is not None:
        lines.append(f"  time {_interval(one.time)}")
    return lines + [f"  {note}" for note in one.notes]


def _change_line(change: FittingChange) -> str:
    cost = "time not known" if change.added_seconds is None else f"{_duration(change.added_seconds, signed=True)}"
    enough = "" if change.fits else ", not enough alone"
    return f"  -> {change.yaml}    # {change.words}: saves {_size(change.saved_bytes)}, {cost}{enough}"


def _total(known: Sequence[StageTime]) -> str:
    if not known:
        return ""
    highs, likely = [time.high for time in known], [time.likely for time in known]
    return _interval(
        StageTime(
            sum(time.low for time in known),
            None if None in highs else sum(high or 0.0 for high in highs),
            None if None in likely else sum(value or 0.0 for value in likely),
        )
    )


def _interval(time: StageTime) -> str:
    if time.high is None:
        return f"at least {_duration(time.low)}"
    ends = f"[{_duration(time.low)}, {_duration(time.high)}]"
    return ends if time.likely is None else f"{_duration(time.likely)} {ends}"


def _duration(seconds: float, *, signed: bool = False) -> str:
    sign = ("+" if seconds >= 0 else "-") if signed else ""
    size = abs(seconds)
    for limit, unit in ((3600, "h"), (60, "min")):
        if size >= limit:
            return f"{sign}{_three_digits(size / limit)} {unit}"
    return f"{sign}{_three_digits(size)} s"


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _count(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * limit:  # 999,950 is 1M, as it is shown with three digits
            return f"{_three_digits(number / limit)}{unit}"
    return _three_digits(number)


def _three_digits(number: float) -> str:
    """Three significant digits, without an exponent for large numbers."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
