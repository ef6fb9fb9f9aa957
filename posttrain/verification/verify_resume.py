"""Verification of `posttrain check resume`: a user's pipeline gives the same bytes however often it is interrupted."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.runtime.terminal import StatusLine
from posttrain.verification.interrupted_runs import (
    PipelineCommand,
    VerificationRun,
    run_in_slices,
    run_uninterrupted,
    run_with_kills,
)
from posttrain.verification.nondeterminism import (
    ENVIRONMENT_CODE,
    ResumeFinding,
    explain_differences,
    find_suspect_lines,
)
from posttrain.verification.run_differences import RunComparison, compare_run_folders
from rl_core.environments import list_environment_code
from rl_core.errors import CheckFailed
from rl_core.storage.atomic_files import make_folder
from tasks.config import PipelineSettings
from tasks.stage_registry import list_stage_names

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_NOT_VERIFIED = 2
# Suggested values of settings that make a stage short.
_SHORT_VALUES = {
    "num_demonstrations": 500,
    "episodes": 20,
    "iterations": 8,
    "max_steps": 30,
    "num_pairs": 60,
}
UNSEEDED_MESSAGE = "began with different messages"  # in the error for two episodes of one seed


@dataclass(frozen=True)
class VerificationPlan:
    """Options of a verification."""

    kills: int = 5
    slice_s: float | None = None  # length of time slices; None = kill it
    seed: int = 0  # of the times and fault points of kills
    minutes: float = 60.0  # limit of the whole verification
    keep_runs: bool = False  # even if they are equal


def verify_resume(
    config: str, overrides: Sequence[str], settings: PipelineSettings, plan: VerificationPlan
) -> int:
    """Run the pipeline uninterrupted and interrupted, compare the published files, and print the verdict.

    Returns: exit code: 0 equal, 1 different, 2 not verified.
    """
    output = Path(settings.output).resolve()
    candidates = (output / f"verify-{number}" for number in itertools.count(1))
    folder = make_folder(next(path for path in candidates if not path.exists()))
    report = StatusLine()
    command = PipelineCommand(
        config, [*overrides, *_build_isolation_overrides(settings)], settings.name
    )
    start = time.monotonic()
    limit_s = plan.minutes * 60
    print(
        f"{settings.name}: uninterrupted, then {_describe_interruptions(plan)}; at most {plan.minutes:g} min\n"
        f"files    {folder}",
        flush=True,
    )
    try:
        try:
            baseline = run_uninterrupted(command, folder, limit_s / 2, report)
        except CheckFailed as error:
            report.clear_line()
            return _report_failed_baseline(str(error), settings, folder)
        report.print_line(f"uninterrupted run: {baseline.seconds:.1f} s")
        remaining_s = limit_s - (time.monotonic() - start)
        try:
            if plan.slice_s is not None:
                trial = run_in_slices(command, folder, plan.slice_s, remaining_s, report)
            else:
                trial = run_with_kills(
                    command,
                    folder,
                    baseline,
                    plan.kills,
                    random.Random(plan.seed),
                    remaining_s,
                    report,
                )
        except CheckFailed as error:
            report.clear_line()
            is_unverified = "slices" in str(error) or "takes longer" in str(error)
            verdict = "not verified" if is_unverified else "NOT the same"
            print(f"{verdict}: {error}\nkept: {folder}")
            return EXIT_NOT_VERIFIED if is_unverified else EXIT_DIFFERENT
    except BaseException:
        report.clear_line()
        print(f"interrupted; the runs so far are in {folder}")
        raise
    report.clear_line()
    print(_format_costs(baseline, trial))
    comparison = compare_run_folders(baseline.home, trial.home)
    if comparison.differences:
        finding = _add_suspect_lines(explain_differences(comparison), settings)
        print(f"{finding.format_text()}\n  runs      {folder}")
        return EXIT_DIFFERENT
    if not trial.interruptions:
        shutil.rmtree(folder, ignore_errors=True)
        print(
            "not verified: the same, but it ended before it was interrupted; use another --seed, shorter --slices, or "
            "a longer pipeline"
        )
        return EXIT_NOT_VERIFIED
    print(_format_verdict(comparison, trial))
    if plan.keep_runs:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_EQUAL


def _describe_interruptions(plan: VerificationPlan) -> str:
    """Describe how the second run is interrupted."""
    if plan.slice_s is not None:
        return f"stopped by SIGTERM after each {plan.slice_s:g} s"
    return f"killed {plan.kills} times" if plan.kills > 1 else "killed once"


def _build_isolation_overrides(settings: PipelineSettings) -> list[str]:
    """Return overrides that isolate the runs: the user's stores are not touched, and no approval is awaited."""
    overrides = ["tracking.uri=null"]
    if settings.stages.promote is not None:
        overrides.append("stages.promote.approve=auto")
    return overrides


def _report_failed_baseline(message: str, settings: PipelineSettings, folder: Path) -> int:
    if UNSEEDED_MESSAGE in message:
        names = [environment.name for _, environment in settings.list_environment_blocks()]
        suspects = find_suspect_lines(names)
        print(
            "NOT deterministic: the environment's opening messages\n"
            f"  what      {message.splitlines()[-1].strip()}\n"
            + "".join(f"            {suspect}\n" for suspect in suspects)
            + "  remedy    draw from random.Random(f'{level}/{seed}') created in the episode\n"
            f"  runs      {folder}"
        )
        return EXIT_DIFFERENT
    shorter = " ".join(f"--set {override}" for override in _suggest_shorter_settings(settings))
    advice = ""
    if "takes longer" in message and shorter:
        advice = f"\nto verify a shorter pipeline: {shorter}"
    print(f"not verified: {message}{advice}\nkept: {folder}")
    return EXIT_NOT_VERIFIED


def _suggest_shorter_settings(settings: PipelineSettings) -> list[str]:
    """Suggest settings that make the pipeline short."""
    overrides = []
    for stage in list_stage_names():
        block = getattr(settings.stages, stage)
        if block is None:
            continue
        fields = {field.name for field in dataclasses.fields(block)} & _SHORT_VALUES.keys()
        for name in sorted(fields):
            value = getattr(block, name)
            if value is None or value > _SHORT_VALUES[name]:
                overrides.append(f"stages.{stage}.{name}={_SHORT_VALUES[name]}")
    return overrides


def _add_suspect_lines(finding: ResumeFinding, settings: PipelineSettings) -> ResumeFinding:
    code = finding.cause.code
    if not code:
        return finding
    suspects = find_suspect_lines(_list_import_paths(code, settings))
    return dataclasses.replace(finding, suspects=suspects)


def _list_import_paths(code: str, settings: PipelineSettings) -> list[str]:
    if code != ENVIRONMENT_CODE:
        return [code]
    return list(list_environment_code(settings.environment.name, settings.environment.options))


def _format_verdict(comparison: RunComparison, trial: VerificationRun) -> str:
    return (
        f"the same to the last bit: {comparison.files} files ({comparison.bytes / 1e6:.1f} MB) of "
        f"{len(comparison.stages)} stages and {comparison.points} points of their metrics, after "
        f"{len(trial.interruptions)} interruptions"
    )


def _format_costs(uninterrupted: VerificationRun, trial: VerificationRun) -> str:
    """Format the cost of the interruptions: repeated work, and starting."""
    lines = []
    for number, interruption in enumerate(trial.interruptions, start=1):
        where = f"in {interruption.stage}" if interruption.stage else "between stages"
        line = f"  {number:>3}  {interruption.description} {where}"
        if interruption.iterations:
            line += f", {interruption.iterations} iterations repeated ({interruption.lost_seconds:.1f} s)"
        if interruption.restart_seconds is not None:
            line += f", progress {interruption.restart_seconds:.1f} s after the restart"
        lines.append(line)
    num_repeated = sum(interruption.iterations for interruption in trial.interruptions)
    lost = sum(interruption.lost_seconds for interruption in trial.interruptions)
    extra = trial.seconds - uninterrupted.seconds
    lines.append(
        f"interrupted run: {trial.seconds:.1f} s in {len(trial.interruptions) + 1} processes, {extra:+.1f} s "
        f"({extra / uninterrupted.seconds:+.0%}); {num_repeated} repeated iterations take {lost:.1f} s of it "
        f"({lost / max(trial.seconds, 1e-9):.1%} of all), the rest is starting and stopping"
    )
    return "\n".join(lines)
