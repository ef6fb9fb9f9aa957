"""`posttrain plan`: needs of each stage before it runs; simulation of the policy stage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli import arguments_to_settings as loading
from flows.cli.visible import visible
from rl_core.errors import DataError, SettingsError

if TYPE_CHECKING:
    from flows.planning.cluster_layout import ClusterLayout
    from rl_core.settings.cluster_rates import ClusterRates
    from tasks.config import PipelineSettings

__all__ = ["plan"]


def plan(arguments: argparse.Namespace) -> int:
    """Print what each stage needs, or simulate the policy stage."""
    if arguments.simulate:
        return _simulate(arguments)
    return _resources(arguments)


def _resources(arguments: argparse.Namespace) -> int:
    """Memory, work and time of every stage on a machine or on GPUs."""
    from flows.planning.plan_target import Lengths, target_gpus, target_machine
    from rl_core.settings.machine import MachineSettings

    machine = None
    if arguments.machine is not None:
        from flows.runtime.settings_files import read_settings_file

        machine, _ = read_settings_file(MachineSettings, arguments.machine, shipped_name=arguments.machine)
    if isinstance(arguments.gpus, int):
        raise SettingsError(f"--gpus: {arguments.gpus} of which kind? Write {arguments.gpus}xH200 (or add --simulate)")
    target = target_machine(machine) if arguments.gpus is None else target_gpus(arguments.gpus)
    if arguments.gpus is not None:  # the plan is for another machine than this one, which may have no GPU
        arguments.set = [*arguments.set, "model.device=auto"]
    settings = loading.load(arguments, import_code=False)
    lengths = Lengths(arguments.row_tokens, arguments.prompt_tokens, arguments.completion_tokens, arguments.rows)

    from flows.planning.fitting_changes import changes_for, fits
    from flows.planning.resource_report import plan_record, plan_text
    from flows.planning.stage_plans import plan_pipeline

    found = plan_pipeline(settings, target, lengths)
    if not found.stages:
        raise SettingsError("plan: no stage of the configuration trains or plays a language model")
    lacking = [one for one in found.stages if not fits(one, target)]
    changes = {one.name: changes_for(one, settings, target, lengths) for one in lacking}
    if arguments.json or arguments.format == "json":
        print(json.dumps(plan_record(found, target, changes), indent=2))
    else:
        print(visible(plan_text(found, target, changes)))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    """Simulate the policy stage in several layouts, and print them beside the synchronous one."""
    from flows.planning.cluster_study import compare_shares, compare_workers
    from flows.planning.plan_report import plan_rows, plan_table
    from flows.planning.simulation import check_simpy

    if arguments.machine is not None or isinstance(arguments.gpus, str):
        given = "--machine" if arguments.machine is not None else f"--gpus {arguments.gpus}"
        raise SettingsError(f"{given}: --simulate takes --gpus N, a number, and --rates FILE")

    check_simpy()
    settings = loading.load(arguments, import_code=False)
    layout = _layout(settings, arguments)
    rates, source = _rates(settings, arguments)
    bounds = tuple(dict.fromkeys(arguments.staleness))
    if arguments.gpus is not None:
        found = compare_shares(layout, rates, arguments.gpus, staleness=bounds, iterations=arguments.iterations)
        what = f"{arguments.gpus} GPUs"
    else:
        workers = tuple(dict.fromkeys(arguments.workers))
        found = compare_workers(layout, rates, workers, staleness=bounds, iterations=arguments.iterations)
        what = f"{len(workers)} numbers of workers"
    if arguments.json or arguments.format == "json":
        print(json.dumps({"rates": source, "layouts": plan_rows(found)}, indent=2))
        return 0
    title = f"{settings.name}: {what}, {layout.prompts} x {layout.group_size} rollouts an iteration"
    print(visible(plan_table(found, title)))
    print(visible(f"rates: {source}"))
    return 0


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

        found, _ = read_settings_file(ClusterRates, arguments.rates, shipped_name=arguments.rates)
        return found, str(arguments.rates)
    from tasks.tracking.journal import read_metrics

    advice = "run it once (`posttrain run`), or name a file of durations with --rates"
    folders = Path(settings.output, settings.name, "stages", "policy").glob("*/metrics.jsonl")
    finished = [path for path in folders if (path.parent / "manifest.json").is_file()]
    newest = max(finished, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise SettingsError(f"plan: no finished policy stage of {settings.name} in {settings.output}; {advice}")
    stage = settings.stages.policy
    assert stage is not None
    rollouts = stage.prompts_per_iteration * stage.group_size
    try:
        rates = rates_from_records(read_metrics(newest.parent), rollouts, stage.sampling.max_completion_tokens)
    except DataError as error:
        raise SettingsError(f"plan: {newest}: {error}") from error
    return rates, (
        f"measured in {newest.parent}; of the decoding time {ROW_SHARE:.0%} taken as growing with the rows, tools as "
        "answering at once (--rates FILE sets both)"
    )
