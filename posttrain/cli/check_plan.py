"""Command `posttrain check plan`: resources of each stage before it runs; simulation of the policy stage."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import StatusLine, escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_data_options, parse_positive_integer
from posttrain.cli.tables import print_requested_data
from rl_core.errors import CorruptError, DataError, SettingsError
from rl_core.storage.manifest import read_manifest

if TYPE_CHECKING:
    from posttrain.planning.simulation_inputs import ClusterLayout
    from rl_core.settings.planning import ClusterRates
    from tasks.config import PipelineSettings

_DEFAULT_WORKERS = (1, 2, 4)
_DEFAULT_STALENESS_BOUNDS = (0, 1, 4)
_MAX_SIMULATED_GPUS = 10_000  # even an idle GPU costs simulated events
_MIN_COUNTED_ITERATIONS = 10  # after the warm-up

EXAMPLES = (
    "check plan demo --machine machine.yaml",
    "check plan grpo.yaml --gpus 8xH200 --row-tokens 600 --completion-tokens 900",
    "check plan grpo.yaml --gpus H100 --json",
    "check plan demo --simulate",
    "check plan demo --simulate --workers 1,2,4 --staleness 0,1,4",
    "check plan grpo.yaml --simulate --gpus 64 --rates rates.yaml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--gpus",
        type=_parse_gpus_option,
        metavar="GPUS",
        help="number and kind, as 8xH200 or A100; with --simulate a number, whose shares for rollouts are compared",
    )
    hardware.add_argument(
        "--machine",
        metavar="FILE",
        help="speeds that `posttrain check machine --calibrate` measured (default: this machine's memory, no times)",
    )
    _add_length_options(parser)
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="discrete-event simulation of trainers, workers and weight updates",
    )
    parser.add_argument(
        "--rates",
        metavar="FILE",
        help="with --simulate: YAML with the durations of one worker and one trainer (default: those of the newest "
        "finished policy stage of this configuration)",
    )
    parser.add_argument(
        "--workers",
        type=_parse_integer_list,
        metavar="LIST",
        help="with --simulate, without --gpus (default: 1,2,4)",
    )
    parser.add_argument(
        "--staleness",
        type=_parse_staleness_bounds,
        metavar="LIST",
        help="with --simulate: bounds (default: 0,1,4)",
    )
    parser.add_argument(
        "--cores",
        type=parse_positive_integer,
        metavar="N",
        help="with --simulate, without --gpus: cores that all processes share (default: no limit)",
    )
    parser.add_argument(
        "--iterations",
        type=parse_positive_integer,
        metavar="N",
        help="with --simulate: iterations to simulate (default: 12, more for a larger --staleness)",
    )
    add_data_options(parser)


def _add_length_options(parser: argparse.ArgumentParser) -> None:
    """Add the mean lengths, which a configuration does not contain."""
    longest = "(default: of a sample, or the longest that the settings allow)"
    parser.add_argument(
        "--row-tokens",
        type=parse_positive_integer,
        metavar="N",
        help=f"mean tokens of a row of data {longest}",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=parse_positive_integer,
        metavar="N",
        help=f"mean tokens of a prompt {longest}",
    )
    parser.add_argument(
        "--completion-tokens",
        type=parse_positive_integer,
        metavar="N",
        help=f"mean tokens of a rollout after its prompt {longest}",
    )
    parser.add_argument(
        "--rows",
        type=parse_positive_integer,
        metavar="N",
        help="rows of the data, if its files do not say",
    )


def _parse_gpus_option(text: str) -> int | str:
    """Parse a number of GPUs, or a number and kind that is looked up later."""
    return parse_positive_integer(text) if text.isdecimal() else text


def _parse_integer_list(text: str) -> tuple[int, ...]:
    """Parse positive integers, separated by commas."""
    return tuple(parse_positive_integer(part.strip()) for part in text.split(","))


def _parse_staleness_bounds(text: str) -> tuple[int, ...]:
    """Parse integers from 0 to 64, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= 64 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be integers from 0 to 64, separated by commas"
        )
    return tuple(int(part) for part in parts)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the resources of each stage, or simulate the policy stage."""
    if arguments.simulate:
        return _print_simulation(arguments)
    return _print_resource_plan(arguments)


def _print_resource_plan(arguments: argparse.Namespace) -> int:
    """Print memory, work and time of every stage on a machine or on GPUs."""
    from posttrain.planning.target import PlanLengths, build_machine_target, parse_gpu_target
    from rl_core.settings.planning import MachineSettings

    _refuse_unused_options(
        arguments,
        ("rates", "workers", "staleness", "cores", "iterations"),
        "needs --simulate",
    )
    machine = None
    if arguments.machine is not None:
        from posttrain.settings_files import read_settings_file

        machine, _ = read_settings_file(MachineSettings, arguments.machine)
    if isinstance(arguments.gpus, int):
        raise SettingsError(
            f"--gpus: {arguments.gpus} of which kind? Write {arguments.gpus}xH200 (or add --simulate)"
        )
    gpus = None if arguments.gpus is None else parse_gpu_target(arguments.gpus)
    if gpus is not None:  # this machine may have none
        arguments.set = [*arguments.set, "model.device=auto"]
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    _refuse_unreadable_model(settings)
    target = build_machine_target(machine) if gpus is None else gpus
    lengths = PlanLengths(
        arguments.row_tokens, arguments.prompt_tokens, arguments.completion_tokens, arguments.rows
    )

    from flows.runtime.progress import wrap_to_terminal
    from posttrain.planning.pipeline_plan import plan_pipeline
    from posttrain.planning.resource_report import (
        build_plan_record,
        find_fitting_changes,
        fits_target,
        format_plan,
    )
    from posttrain.planning.sampled_lengths import sample_lengths

    lengths = sample_lengths(settings, lengths)
    plan = plan_pipeline(settings, target, lengths)
    if not plan.stages:
        raise SettingsError("plan: no stage of the configuration trains or plays a language model")
    changes = {
        stage.name: find_fitting_changes(stage, settings, target, lengths)
        for stage in plan.stages
        if not fits_target(stage, target)
    }
    record = build_plan_record(plan, target, changes)
    if not print_requested_data(arguments, record, record["stages"]):
        print(wrap_to_terminal(escape_control_characters(format_plan(plan, target, changes))))
    return 0


def _refuse_unreadable_model(settings: PipelineSettings) -> None:
    """Refuse a model without a readable config before this machine is measured and libraries are imported."""
    if (settings.model.path or "").startswith("models:"):
        raise SettingsError(
            f"model.path: {settings.model.path} is in the registry; name its folder with --set model.path=..."
        )
    run_setup.refuse_unknown_base_model(settings)


def _print_simulation(arguments: argparse.Namespace) -> int:
    """Simulate the policy stage in several layouts and print them next to the synchronous one."""
    from posttrain.planning.layout_comparison import (
        build_layout_rows,
        compare_gpu_shares,
        compare_worker_counts,
        format_count,
        format_layout_table,
    )
    from posttrain.planning.policy_stage_simulation import require_simpy

    if arguments.machine is not None or isinstance(arguments.gpus, str):
        option = "--machine" if arguments.machine is not None else f"--gpus {arguments.gpus}"
        raise SettingsError(f"{option}: --simulate takes --gpus N, a number, and --rates FILE")
    length_options = ("row_tokens", "prompt_tokens", "completion_tokens", "rows")
    _refuse_unused_options(
        arguments,
        length_options,
        "--simulate reads the lengths from --rates FILE, or from a finished stage",
    )
    if arguments.gpus is not None:
        _refuse_unused_options(
            arguments,
            ("workers", "cores"),
            "--gpus compares shares of GPUs, each with a separate process",
        )
        if arguments.gpus > _MAX_SIMULATED_GPUS:
            raise SettingsError(
                f"--gpus: {arguments.gpus:,}: at most {_MAX_SIMULATED_GPUS:,} are simulated"
            )
    require_simpy()
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    layout = _build_layout(settings, arguments)
    rates, source = _load_rates(settings, arguments)
    bounds = tuple(dict.fromkeys(arguments.staleness or _DEFAULT_STALENESS_BOUNDS))
    iterations = _resolve_iterations(arguments.iterations, max(bounds))
    progress = StatusLine(sys.stderr)
    if arguments.gpus is not None:
        layouts = compare_gpu_shares(
            layout,
            rates,
            arguments.gpus,
            staleness=bounds,
            iterations=iterations,
            progress=progress,
        )
        subject = f"{arguments.gpus} GPUs"
    else:
        workers = tuple(dict.fromkeys(arguments.workers or _DEFAULT_WORKERS))
        layouts = compare_worker_counts(
            layout, rates, workers, staleness=bounds, iterations=iterations, progress=progress
        )
        subject = f"{len(workers)} numbers of workers"
        if len(workers) == 1:
            subject = format_count(workers[0], "worker")
    progress.clear_line()
    rows = build_layout_rows(layouts)
    if print_requested_data(arguments, {"rates": source, "layouts": rows}, rows):
        return 0
    title = (
        f"{settings.name}: {subject}, {layout.prompts} x {layout.group_size} rollouts an iteration"
    )
    print(escape_control_characters(format_layout_table(layouts, title)))
    print(escape_control_characters(f"rates: {source}"))
    return 0


def _refuse_unused_options(
    arguments: argparse.Namespace, names: Sequence[str], reason: str
) -> None:
    """Refuse options that would change nothing. Raises: SettingsError for the first one that is set."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise SettingsError(f"--{name.replace('_', '-')}: {reason}")


def _resolve_iterations(requested: int | None, bound: int) -> int:
    """Return the number of iterations to simulate. Raises: SettingsError if the warm-up leaves too few."""
    from posttrain.planning.policy_stage_simulation import count_warm_up_iterations

    warm_up = count_warm_up_iterations(bound)
    minimum = warm_up + bound + 1
    if requested is None:
        # Whole rounds, because bound + 1 batches may end together.
        rounds = max(3, math.ceil(_MIN_COUNTED_ITERATIONS / (bound + 1)))
        return warm_up + rounds * (bound + 1)
    if requested < minimum:
        raise SettingsError(
            f"--iterations: {requested} are too few with --staleness {bound}: {bound + 1} batches begin together, "
            f"their shortest rollouts are learned from first, and {warm_up} iterations are left out for that; "
            f"simulate at least {minimum}"
        )
    return requested


def _build_layout(settings: PipelineSettings, arguments: argparse.Namespace) -> ClusterLayout:
    """Build the layout from the batch and schedule of the policy stage. Raises: SettingsError without one."""
    from posttrain.planning.simulation_inputs import ClusterLayout

    stage = settings.stages.policy
    if stage is None:
        raise SettingsError(
            "plan: the configuration has no policy stage whose rollouts could be simulated"
        )
    return ClusterLayout(
        prompts=stage.prompts_per_iteration,
        group_size=stage.group_size,
        slots=stage.sampling.slots,
        partial=stage.rollouts.partial,
        rejoin=stage.sampling.rejoin,
        cores=arguments.cores,
    )


def _load_rates(
    settings: PipelineSettings, arguments: argparse.Namespace
) -> tuple[ClusterRates, str]:
    """Return the durations and a description of their source. Raises: SettingsError if nothing was measured."""
    from posttrain.planning.simulation_inputs import DEFAULT_ROW_SHARE, estimate_cluster_rates
    from rl_core.settings.planning import ClusterRates

    if arguments.rates is not None:
        from posttrain.settings_files import read_settings_file

        rates, _ = read_settings_file(ClusterRates, arguments.rates)
        return rates, str(arguments.rates)
    from tasks.tracking.journal import read_metrics

    folder, stage = _find_newest_measured_stage(settings)
    try:
        rates = estimate_cluster_rates(
            read_metrics(folder),
            stage["prompts_per_iteration"] * stage["group_size"],
            stage["sampling"]["max_completion_tokens"],
        )
    except DataError as error:
        raise SettingsError(f"plan: {folder}: {error}") from error
    return rates, (
        f"measured in {folder}; of the decoding time {DEFAULT_ROW_SHARE:.0%} taken as growing with the rows, tools as "
        "answering at once (--rates FILE sets both)"
    )


def _find_newest_measured_stage(settings: PipelineSettings) -> tuple[Path, dict[str, Any]]:
    """Return folder and settings of the newest finished policy stage with one synchronous worker.

    Only in such a stage do the metrics give the durations of its parts. Raises: SettingsError if there is none.
    """
    home = Path(settings.output, settings.name, "stages", "policy")
    synchronous: list[tuple[float, Path, dict[str, Any]]] = []
    has_other = False
    for path in home.glob("*/metrics.jsonl"):
        with contextlib.suppress(CorruptError):  # unfinished or damaged
            stage = read_manifest(path.parent)["settings"]
            rollouts = stage.get("rollouts", {})
            if rollouts.get("count", 1) == 1 and not rollouts.get("max_staleness", 0):
                synchronous.append((path.stat().st_mtime, path.parent, stage))
            else:
                has_other = True
    if not synchronous:
        problem = f"no finished policy stage of {settings.name} in {settings.output}"
        if has_other:
            problem += " with one synchronous worker, whose metrics give the durations of its parts"
        raise SettingsError(
            f"plan: {problem}; run it once (`posttrain run`), or name a file of durations with --rates"
        )
    _, folder, stage = max(synchronous, key=lambda candidate: candidate[0])
    return folder, stage
