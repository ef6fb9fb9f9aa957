"""`posttrain plan`: needs of each stage before it runs; simulation of the policy stage."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli import arguments_to_settings as loading
from flows.runtime.status_line import StatusLine
from flows.runtime.visible import visible
from rl_core.errors import CorruptError, DataError, SettingsError
from rl_core.storage.manifest import read_manifest

if TYPE_CHECKING:
    from flows.planning.cluster_layout import ClusterLayout
    from rl_core.settings.cluster_rates import ClusterRates
    from tasks.config import PipelineSettings

__all__ = ["plan"]

_WORKERS, _BOUNDS = (1, 2, 4), (0, 1, 4)
_MOST_GPUS = 10_000  # an idle one costs simulated events, too
_COUNTED = 10  # iterations after the warm-up, at the least


def plan(arguments: argparse.Namespace) -> int:
    """Print what each stage needs, or simulate the policy stage."""
    if arguments.simulate:
        return _simulate(arguments)
    return _resources(arguments)


def _resources(arguments: argparse.Namespace) -> int:
    """Memory, work and time of every stage on a machine or on GPUs."""
    from flows.planning.plan_target import Lengths, target_gpus, target_machine
    from rl_core.settings.machine import MachineSettings

    _refuse_given(arguments, ("rates", "workers", "staleness", "cores", "iterations"), "--simulate is needed, too")
    machine = None
    if arguments.machine is not None:
        from flows.runtime.settings_files import read_settings_file

        machine, _ = read_settings_file(MachineSettings, arguments.machine)
    if isinstance(arguments.gpus, int):
        raise SettingsError(f"--gpus: {arguments.gpus} of which kind? Write {arguments.gpus}xH200 (or add --simulate)")
    gpus = None if arguments.gpus is None else target_gpus(arguments.gpus)
    if gpus is not None:  # the plan is for another machine than this one, which may have no GPU
        arguments.set = [*arguments.set, "model.device=auto"]
    settings = loading.load(arguments, import_code=False)
    _refuse_unknown_model(settings)
    target = target_machine(machine) if gpus is None else gpus
    lengths = Lengths(arguments.row_tokens, arguments.prompt_tokens, arguments.completion_tokens, arguments.rows)

    from flows.planning.fitting_changes import changes_for, fits
    from flows.planning.resource_report import plan_record, plan_text
    from flows.planning.stage_plans import plan_pipeline
    from flows.runtime.terminal_text import fitted

    found = plan_pipeline(settings, target, lengths)
    if not found.stages:
        raise SettingsError("plan: no stage of the configuration trains or plays a language model")
    lacking = [one for one in found.stages if not fits(one, target)]
    changes = {one.name: changes_for(one, settings, target, lengths) for one in lacking}
    if arguments.json or arguments.format == "json":
        print(json.dumps(plan_record(found, target, changes), indent=2))
    else:
        print(fitted(visible(plan_text(found, target, changes))))
    return 0


def _refuse_unknown_model(settings: PipelineSettings) -> None:
    """Refuse a model whose config cannot be read, before this machine is measured and libraries are imported."""
    if (settings.model.path or "").startswith("models:"):
        raise SettingsError(
            f"model.path: {settings.model.path} is in the registry; name its folder with --set model.path=..."
        )
    loading.check_base_model(settings)


def _simulate(arguments: argparse.Namespace) -> int:
    """Simulate the policy stage in several layouts, and print them beside the synchronous one."""
    from flows.planning.cluster_study import compare_shares, compare_workers
    from flows.planning.plan_report import counted, plan_rows, plan_table
    from flows.planning.simulation import check_simpy

    if arguments.machine is not None or isinstance(arguments.gpus, str):
        given = "--machine" if arguments.machine is not None else f"--gpus {arguments.gpus}"
        raise SettingsError(f"{given}: --simulate takes --gpus N, a number, and --rates FILE")
    lengths = ("row_tokens", "prompt_tokens", "completion_tokens", "rows")
    _refuse_given(arguments, lengths, "--simulate takes the lengths from --rates FILE, or from a finished stage")
    if arguments.gpus is not None:
        _refuse_given(arguments, ("workers", "cores"), "--gpus compares shares of GPUs, each with a process of its own")
        if arguments.gpus > _MOST_GPUS:
            raise SettingsError(f"--gpus: {arguments.gpus:,}: at most {_MOST_GPUS:,} are simulated")
    check_simpy()
    settings = loading.load(arguments, import_code=False)
    layout = _layout(settings, arguments)
    rates, source = _rates(settings, arguments)
    bounds = tuple(dict.fromkeys(arguments.staleness or _BOUNDS))
    iterations = _iterations(arguments.iterations, max(bounds))
    progress = StatusLine(sys.stderr)
    if arguments.gpus is not None:
        found = compare_shares(
            layout, rates, arguments.gpus, staleness=bounds, iterations=iterations, progress=progress
        )
        what = f"{arguments.gpus} GPUs"
    else:
        workers = tuple(dict.fromkeys(arguments.workers or _WORKERS))
        found = compare_workers(layout, rates, workers, staleness=bounds, iterations=iterations, progress=progress)
        what = f"{counted(workers[0], 'worker')}" if len(workers) == 1 else f"{len(workers)} numbers of workers"
    progress.clear()
    if arguments.json or arguments.format == "json":
        print(json.dumps({"rates": source, "layouts": plan_rows(found)}, indent=2))
        return 0
    title = f"{settings.name}: {what}, {layout.prompts} x {layout.group_size} rollouts an iteration"
    print(visible(plan_table(found, title)))
    print(visible(f"rates: {source}"))
    return 0


def _refuse_given(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse options that would change nothing. Raises: SettingsError for the first that was given."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise SettingsError(f"--{name.replace('_', '-')}: {reason}")


def _iterations(given: int | None, bound: int) -> int:
    """Iterations to simulate. Raises: SettingsError where too few are left after the warm-up."""
    from flows.planning.simulation import warm_up_of

    least = warm_up_of(bound) + bound + 1
    if given is None:
        rounds = max(3, math.ceil(_COUNTED / (bound + 1)))  # whole ones: as many batches may end at once
        return warm_up_of(bound) + rounds * (bound + 1)
    if given < least:
        raise SettingsError(
            f"--iterations: {given} tell no speed with --staleness {bound}: {bound + 1} batches begin at once, their "
            f"shortest rollouts are learned from first, and {warm_up_of(bound)} iterations are left out for that; "
            f"simulate at least {least}"
        )
    return given


def _layout(settings: PipelineSettings, arguments: argparse.Namespace) -> ClusterLayout:
    """Batch and schedule that the policy stage names. Raises: SettingsError where there is no such stage."""
    from flows.planning.cluster_layout import ClusterLayout

    stage = settings.stages.policy
    if stage is None:
        raise SettingsError("plan: the configuration has no stage policy, whose rollouts would be simulated")
    return ClusterLayout(
        prompts=stage.prompts_per_iteration, group_size=stage.group_size, slots=stage.sampling.slots,
        partial=stage.rollouts.partial, rejoin=stage.sampling.rejoin, cores=arguments.cores,
    )  # fmt: skip


def _rates(settings: PipelineSettings, arguments: argparse.Namespace) -> tuple[ClusterRates, str]:
    """Durations, and their source in words. Raises: SettingsError where nothing was measured."""
    from flows.planning.measured_rates import ROW_SHARE, rates_from_records
    from rl_core.settings.cluster_rates import ClusterRates

    if arguments.rates is not None:
        from flows.runtime.settings_files import read_settings_file

        found, _ = read_settings_file(ClusterRates, arguments.rates)
        return found, str(arguments.rates)
    from tasks.tracking.journal import read_metrics

    folder, stage = _newest_measured(settings)
    try:
        rates = rates_from_records(
            read_metrics(folder), stage["prompts_per_iteration"] * stage["group_size"],
            stage["sampling"]["max_completion_tokens"],
        )  # fmt: skip
    except DataError as error:
        raise SettingsError(f"plan: {folder}: {error}") from error
    return rates, (
        f"measured in {folder}; of the decoding time {ROW_SHARE:.0%} taken as growing with the rows, tools as "
        "answering at once (--rates FILE sets both)"
    )


def _newest_measured(settings: PipelineSettings) -> tuple[Path, dict[str, Any]]:
    """Folder and settings of the newest finished policy stage that one worker sampled, in turns with the updates.

    Raises: SettingsError where there is none.
    """
    home = Path(settings.output, settings.name, "stages", "policy")
    alone: list[tuple[float, Path, dict[str, Any]]] = []
    others: list[tuple[float, Path, dict[str, Any]]] = []
    for path in home.glob("*/metrics.jsonl"):
        with contextlib.suppress(CorruptError):  # not finished, or damaged
            stage = read_manifest(path.parent)["settings"]
            rollouts = stage.get("rollouts", {})
            is_alone = rollouts.get("count", 1) == 1 and not rollouts.get("max_staleness", 0)
            (alone if is_alone else others).append((path.stat().st_mtime, path.parent, stage))
    if not alone:
        found = f"no finished policy stage of {settings.name} in {settings.output}"
        if others:
            found += " that one worker sampled in turns with the updates, which tells the durations of its parts"
        raise SettingsError(f"plan: {found}; run it once (`posttrain run`), or name a file of durations with --rates")
    _, folder, stage = max(alone, key=lambda one: one[0])
    return folder, stage
