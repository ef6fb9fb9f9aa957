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

from flows.runtime.status_line import StatusLine
from flows.verification.differences import RunComparison, compare_runs
from flows.verification.findings import ENVIRONMENT, ResumeFinding, explain
from flows.verification.suspects import suspects_in
from flows.verification.trials import Command, Trial, run_killed, run_sliced, run_whole
from rl_core.environments import named_code
from rl_core.errors import CheckFailed
from rl_core.storage.single_files import make_folder
from tasks.config import PipelineSettings
from tasks.stage_registry import names

__all__ = ["EQUAL", "Plan", "REFUSED", "verify"]

EQUAL, DIFFERENT, REFUSED = 0, 1, 2  # exit codes
# Settings of any stage that make it short, as a proposal.
_SHORT = {"num_demonstrations": 500, "episodes": 20, "iterations": 8, "max_steps": 30, "num_pairs": 60}
UNSEEDED = "began with different messages"  # of the error for two episodes of one seed


@dataclass(frozen=True)
class Plan:
    """Options of a verification."""

    kills: int = 5
    slice_s: float | None = None  # run it in slices of so many seconds instead
    seed: int = 0  # of the moments and fault points
    minutes: float = 60.0  # for everything
    keep: bool = False  # keep both runs also if they are equal


def verify(config: str, overrides: Sequence[str], settings: PipelineSettings, plan: Plan) -> int:
    """Run the pipeline in one piece and interrupted, compare what was published, and print the verdict.

    Returns: exit code: 0 equal, 1 they differ, 2 not verified.
    """
    output = Path(settings.output).resolve()
    unused = (output / f"verify-{number}" for number in itertools.count(1))
    folder = make_folder(next(path for path in unused if not path.exists()))
    report = StatusLine()
    command = Command(config, [*overrides, *_own_overrides(settings)], settings.name)
    began, limit_s = time.monotonic(), plan.minutes * 60
    print(f"{settings.name}: in one piece, then {_interrupted(plan)}; at most {plan.minutes:g} min\nfiles    {folder}",
          flush=True)  # fmt: skip
    try:
        try:
            whole = run_whole(command, folder, limit_s / 2, report)
        except CheckFailed as error:
            report.clear()
            return _whole_failed(str(error), settings, folder)
        report.line(f"run in one piece: {whole.seconds:.1f} s")
        left_s = limit_s - (time.monotonic() - began)
        try:
            if plan.slice_s is not None:
                trial = run_sliced(command, folder, plan.slice_s, left_s, report)
            else:
                trial = run_killed(command, folder, whole, plan.kills, random.Random(plan.seed), left_s, report)
        except CheckFailed as error:
            report.clear()
            refused = "slices" in str(error) or "takes longer" in str(error)
            print(f"{'not verified' if refused else 'NOT the same'}: {error}\nkept: {folder}")
            return REFUSED if refused else DIFFERENT
    except BaseException:
        report.clear()
        print(f"interrupted; what was run is in {folder}")
        raise
    report.clear()
    print(_costs(whole, trial))
    comparison = compare_runs(whole.home, trial.home)
    if comparison.differences:
        print(f"{_with_suspects(explain(comparison), settings).text()}\n  runs      {folder}")
        return DIFFERENT
    if not trial.interruptions:
        shutil.rmtree(folder, ignore_errors=True)
        print(
            "not verified: the same, but it ended before it was interrupted; take another --seed, shorter --slices, or "
            "a longer pipeline"
        )
        return REFUSED
    print(_equal(comparison, trial))
    if plan.keep:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return EQUAL


def _interrupted(plan: Plan) -> str:
    """The second run in words."""
    if plan.slice_s is not None:
        return f"stopped by SIGTERM after each {plan.slice_s:g} s"
    return f"killed {plan.kills} times" if plan.kills > 1 else "killed once"


def _own_overrides(settings: PipelineSettings) -> list[str]:
    """A registry and a decision of its own: nothing of the user's stores is touched, and nobody is waited for."""
    own = ["tracking.uri=null"]
    if settings.stages.promote is not None:
        own.append("stages.promote.approve=auto")
    return own


def _whole_failed(said: str, settings: PipelineSettings, folder: Path) -> int:
    if UNSEEDED in said:
        suspects = suspects_in([settings.environment.name])
        print(
            "NOT deterministic: the environment's opening messages\n"
            f"  what      {said.splitlines()[-1].strip()}\n"
            + "".join(f"            {suspect}\n" for suspect in suspects)
            + "  remedy    draw from random.Random(f'{level}/{seed}') made in the episode\n"
            f"  runs      {folder}"
        )
        return DIFFERENT
    shorter = " ".join(f"--set {override}" for override in _shorter(settings))
    advice = f"\nto verify a shorter pipeline: {shorter}" if "takes longer" in said and shorter else ""
    print(f"not verified: {said}{advice}\nkept: {folder}")
    return REFUSED


def _shorter(settings: PipelineSettings) -> list[str]:
    """Settings that make the pipeline short, as a proposal."""
    found = []
    for stage in names():
        block = getattr(settings.stages, stage)
        fields = {field.name for field in dataclasses.fields(block)} & _SHORT.keys() if block is not None else ()
        for name in sorted(fields):
            present = getattr(block, name)
            if present is None or present > _SHORT[name]:
                found.append(f"stages.{stage}.{name}={_SHORT[name]}")
    return found


def _with_suspects(finding: ResumeFinding, settings: PipelineSettings) -> ResumeFinding:
    code = finding.part.code
    return replace(finding, suspects=suspects_in(_named(code, settings))) if code else finding


def _named(code: str, settings: PipelineSettings) -> list[str]:
    if code != ENVIRONMENT:
        return [code]
    return list(named_code(settings.environment.name, settings.environment.options))


def _equal(comparison: RunComparison, trial: Trial) -> str:
    return (
        f"the same to the last bit: {comparison.files} files ({comparison.bytes / 1e6:.1f} MB) of "
        f"{len(comparison.stages)} stages and {comparison.points} points of their metrics, after "
        f"{len(trial.interruptions)} interruptions"
    )


def _costs(whole: Trial, trial: Trial) -> str:
    """Costs of the interruptions: work done again, and starting."""
    lines = []
    for number, cut in enumerate(trial.interruptions, start=1):
        where = f" in {cut.stage}" if cut.stage else " between stages"
        repeated = f", {cut.iterations} iterations done again ({cut.lost_seconds:.1f} s)" if cut.iterations else ""
        restart = f", going on {cut.restart_seconds:.1f} s after the restart" if cut.restart_seconds is not None else ""
        lines.append(f"  {number:>3}  {cut.how}{where}{repeated}{restart}")
    again = sum(cut.iterations for cut in trial.interruptions)
    lost = sum(cut.lost_seconds for cut in trial.interruptions)
    more = trial.seconds - whole.seconds
    lines.append(
        f"interrupted run: {trial.seconds:.1f} s in {len(trial.interruptions) + 1} processes, {more:+.1f} s "
        f"({more / whole.seconds:+.0%}); {again} iterations done again take {lost:.1f} s of it "
        f"({lost / max(trial.seconds, 1e-9):.1%} of all), the rest is starting and stopping"
    )
    return "\n".join(lines)
