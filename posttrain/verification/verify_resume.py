"""`posttrain verify-resume`: whether a user's pipeline gives the same bytes however often it is interrupted."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_NOT_VERIFIED = 0, 1, 2  # exit codes
# Settings of any stage that make it short, as a proposal.
_SHORT_VALUES = {
    "num_demonstrations": 500,
    "episodes": 20,
    "iterations": 8,
    "max_steps": 30,
    "num_pairs": 60,
}
UNSEEDED_MESSAGE = "began with different messages"  # of the error for two episodes of one seed


@dataclass(frozen=True)
class VerificationPlan:
    """Options of a verification."""

    kills: int = 5
    slice_s: float | None = None  # run it in slices of so many seconds instead
    seed: int = 0  # of the moments and fault points
    minutes: float = 60.0  # for everything
    keep_runs: bool = False  # keep both runs also if they are equal


def verify_resume(
    config: str, overrides: Sequence[str], settings: PipelineSettings, plan: VerificationPlan
) -> int:
    """Run the pipeline in one piece and interrupted, compare what was published, and print the verdict.

    Returns: exit code: 0 equal, 1 they differ, 2 not verified.
    """
    output = Path(settings.output).resolve()
    unused = (output / f"verify-{number}" for number in itertools.count(1))
    folder = make_folder(next(path for path in unused if not path.exists()))
    report = StatusLine()
    command = PipelineCommand(
        config, [*overrides, *_build_isolation_overrides(settings)], settings.name
    )
    began, limit_s = time.monotonic(), plan.minutes * 60
    print(
        f"{settings.name}: in one piece, then {_describe_interruptions(plan)}; at most {plan.minutes:g} min\nfiles    {folder}",
        flush=True,
    )
    try:
        try:
            whole = run_uninterrupted(command, folder, limit_s / 2, report)
        except CheckFailed as error:
            report.clear_line()
            return _report_failed_baseline(str(error), settings, folder)
        report.print_line(f"run in one piece: {whole.seconds:.1f} s")
        left_s = limit_s - (time.monotonic() - began)
        try:
            if plan.slice_s is not None:
                trial = run_in_slices(command, folder, plan.slice_s, left_s, report)
            else:
                trial = run_with_kills(
                    command, folder, whole, plan.kills, random.Random(plan.seed), left_s, report
                )
        except CheckFailed as error:
            report.clear_line()
            refused = "slices" in str(error) or "takes longer" in str(error)
            print(f"{'not verified' if refused else 'NOT the same'}: {error}\nkept: {folder}")
            return EXIT_NOT_VERIFIED if refused else EXIT_DIFFERENT
    except BaseException:
        report.clear_line()
        print(f"interrupted; what was run is in {folder}")
        raise
    report.clear_line()
    print(_format_costs(whole, trial))
    comparison = compare_run_folders(whole.home, trial.home)
    if comparison.differences:
        print(
            f"{_add_suspect_lines(explain_differences(comparison), settings).format_text()}\n  runs      {folder}"
        )
        return EXIT_DIFFERENT
    if not trial.interruptions:
        shutil.rmtree(folder, ignore_errors=True)
        print(
            "not verified: the same, but it ended before it was interrupted; take another --seed, shorter --slices, or "
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
    """The second run in words."""
    if plan.slice_s is not None:
        return f"stopped by SIGTERM after each {plan.slice_s:g} s"
    return f"killed {plan.kills} times" if plan.kills > 1 else "killed once"


def _build_isolation_overrides(settings: PipelineSettings) -> list[str]:
    """A registry and a decision of its own: nothing of the user's stores is touched, and nobody is waited for."""
    own = ["tracking.uri=null"]
    if settings.stages.promote is not None:
        own.append("stages.promote.approve=auto")
    return own


def _report_failed_baseline(message: str, settings: PipelineSettings, folder: Path) -> int:
    if UNSEEDED_MESSAGE in message:
        suspects = find_suspect_lines([settings.environment.name])
        print(
            "NOT deterministic: the environment's opening messages\n"
            f"  what      {message.splitlines()[-1].strip()}\n"
            + "".join(f"            {suspect}\n" for suspect in suspects)
            + "  remedy    draw from random.Random(f'{level}/{seed}') made in the episode\n"
            f"  runs      {folder}"
        )
        return EXIT_DIFFERENT
    shorter = " ".join(f"--set {override}" for override in _suggest_shorter_settings(settings))
    advice = (
        f"\nto verify a shorter pipeline: {shorter}"
        if "takes longer" in message and shorter
        else ""
    )
    print(f"not verified: {message}{advice}\nkept: {folder}")
    return EXIT_NOT_VERIFIED


def _suggest_shorter_settings(settings: PipelineSettings) -> list[str]:
    """Settings that make the pipeline short, as a proposal."""
    found = []
    for stage in list_stage_names():
        block = getattr(settings.stages, stage)
        fields = (
            {field.name for field in dataclasses.fields(block)} & _SHORT_VALUES.keys()
            if block is not None
            else ()
        )
        for name in sorted(fields):
            present = getattr(block, name)
            if present is None or present > _SHORT_VALUES[name]:
                found.append(f"stages.{stage}.{name}={_SHORT_VALUES[name]}")
    return found


def _add_suspect_lines(finding: ResumeFinding, settings: PipelineSettings) -> ResumeFinding:
    code = finding.cause.code
    return (
        replace(finding, suspects=find_suspect_lines(_list_import_paths(code, settings)))
        if code
        else finding
    )


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
    """Costs of the interruptions: work done again, and starting."""
    lines = []
    for number, cut in enumerate(trial.interruptions, start=1):
        where = f" in {cut.stage}" if cut.stage else " between stages"
        repeated = (
            f", {cut.iterations} iterations done again ({cut.lost_seconds:.1f} s)"
            if cut.iterations
            else ""
        )
        restart = (
            f", going on {cut.restart_seconds:.1f} s after the restart"
            if cut.restart_seconds is not None
            else ""
        )
        lines.append(f"  {number:>3}  {cut.description}{where}{repeated}{restart}")
    again = sum(cut.iterations for cut in trial.interruptions)
    lost = sum(cut.lost_seconds for cut in trial.interruptions)
    more = trial.seconds - uninterrupted.seconds
    lines.append(
        f"interrupted run: {trial.seconds:.1f} s in {len(trial.interruptions) + 1} processes, {more:+.1f} s "
        f"({more / uninterrupted.seconds:+.0%}); {again} iterations done again take {lost:.1f} s of it "
        f"({lost / max(trial.seconds, 1e-9):.1%} of all), the rest is starting and stopping"
    )
    return "\n".join(lines)
