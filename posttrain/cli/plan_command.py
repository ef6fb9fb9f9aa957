"""Parser of `posttrain plan`. Standard library only.

`posttrain plan`: needs of each stage before it runs; simulation of the policy stage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import StatusLine, escape_control_characters
from posttrain.cli import run_setup as loading
from posttrain.cli.arguments import (
    add_command_parser,
    add_config_argument,
    add_json_option,
    parse_positive_integer,
)
from rl_core.errors import CorruptError, DataError, SettingsError
from rl_core.storage.manifest import read_manifest

if TYPE_CHECKING:
    from posttrain.planning.simulation_inputs import ClusterLayout
    from rl_core.settings.planning import ClusterRates
    from tasks.config import PipelineSettings


def _add_plan_parser(commands: Any) -> None:
    examples = [
        "plan demo --machine machine.yaml",
        "plan grpo.yaml --gpus 8xH200 --row-tokens 600 --completion-tokens 900",
        "plan grpo.yaml --gpus H100 --format json",
        "plan demo --simulate",
        "plan demo --simulate --workers 1,2,4 --staleness 0,1,4",
        "plan grpo.yaml --simulate --gpus 64 --rates rates.yaml",
    ]
    about = "memory, work and hours of each stage before it runs; with --simulate rollout workers or a cluster"
    parser = add_command_parser(commands, "plan", about, examples)
    add_config_argument(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--gpus",
        type=_parse_gpus_option,
        metavar="GPUS",
        help="number and kind, as 8xH200 or A100; with --simulate a number, whose shares for rollouts are compared",
    )
    where.add_argument(
        "--machine",
        metavar="FILE",
        help="speeds that `posttrain doctor --calibrate` measured (default: this machine's memory, no times)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
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
        help="with --simulate: simulated (default: 12, more for a larger --staleness)",
    )
    add_json_option(parser, "as --format json")


def _add_length_options(parser: argparse.ArgumentParser) -> None:
    """Mean lengths, which a configuration does not tell."""
    longest = "(default: the longest that the settings allow)"
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
        help="rows of the data, where its files do not tell them",
    )


def _parse_gpus_option(text: str) -> int | str:
    """A number of GPUs, or their number and kind, which is looked up later."""
    return parse_positive_integer(text) if text.isdecimal() else text


def _parse_integer_list(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    return tuple(parse_positive_integer(part.strip()) for part in text.split(","))


def _parse_staleness_bounds(text: str) -> tuple[int, ...]:
    """Integers from 0 to 64, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= 64 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be integers from 0 to 64, separated by commas"
        )
    return tuple(int(part) for part in parts)


PARSERS = {"plan": _add_plan_parser}


_DEFAULT_WORKERS, _DEFAULT_STALENESS_BOUNDS = (1, 2, 4), (0, 1, 4)
_MAX_SIMULATED_GPUS = 10_000  # an idle one costs simulated events, too
_MIN_COUNTED_ITERATIONS = 10  # iterations after the warm-up, at the least


def run_plan_command(arguments: argparse.Namespace) -> int:
    """Print what each stage needs, or simulate the policy stage."""
    if arguments.simulate:
        return _print_simulation(arguments)
    return _print_resource_plan(arguments)


def _print_resource_plan(arguments: argparse.Namespace) -> int:
    """Memory, work and time of every stage on a machine or on GPUs."""
    from posttrain.planning.target import PlanLengths, build_machine_target, parse_gpu_target
    from rl_core.settings.planning import MachineSettings

    _refuse_unused_options(
        arguments,
        ("rates", "workers", "staleness", "cores", "iterations"),
        "--simulate is needed, too",
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
    if gpus is not None:  # the plan is for another machine than this one, which may have no GPU
        arguments.set = [*arguments.set, "model.device=auto"]
    settings = loading.load_pipeline_settings(arguments, import_code=False)
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

    found = plan_pipeline(settings, target, lengths)
    if not found.stages:
        raise SettingsError("plan: no stage of the configuration trains or plays a language model")
    lacking = [one for one in found.stages if not fits_target(one, target)]
    changes = {one.name: find_fitting_changes(one, settings, target, lengths) for one in lacking}
    if arguments.json or arguments.format == "json":
        print(json.dumps(build_plan_record(found, target, changes), indent=2))
    else:
        print(wrap_to_terminal(escape_control_characters(format_plan(found, target, changes))))
    return 0


def _refuse_unreadable_model(settings: PipelineSettings) -> None:
    """Refuse a model whose config cannot be read, before this machine is measured and libraries are imported."""
    if (settings.model.path or "").startswith("models:"):
        raise SettingsError(
            f"model.path: {settings.model.path} is in the registry; name its folder with --set model.path=..."
        )
    loading.refuse_unknown_base_model(settings)


def _print_simulation(arguments: argparse.Namespace) -> int:
    """Simulate the policy stage in several layouts, and print them beside the synchronous one."""
    from posttrain.planning.layout_comparison import (
        build_layout_rows,
        compare_gpu_shares,
        compare_worker_counts,
        format_count,
        format_layout_table,
    )
    from posttrain.planning.simulation import require_simpy

    if arguments.machine is not None or isinstance(arguments.gpus, str):
        given = "--machine" if arguments.machine is not None else f"--gpus {arguments.gpus}"
        raise SettingsError(f"{given}: --simulate takes --gpus N, a number, and --rates FILE")
    lengths = ("row_tokens", "prompt_tokens", "completion_tokens", "rows")
    _refuse_unused_options(
        arguments,
        lengths,
        "--simulate takes the lengths from --rates FILE, or from a finished stage",
    )
    if arguments.gpus is not None:
        _refuse_unused_options(
            arguments,
            ("workers", "cores"),
            "--gpus compares shares of GPUs, each with a process of its own",
        )
        if arguments.gpus > _MAX_SIMULATED_GPUS:
            raise SettingsError(
                f"--gpus: {arguments.gpus:,}: at most {_MAX_SIMULATED_GPUS:,} are simulated"
            )
    require_simpy()
    settings = loading.load_pipeline_settings(arguments, import_code=False)
    layout = _build_layout(settings, arguments)
    rates, source = _load_rates(settings, arguments)
    bounds = tuple(dict.fromkeys(arguments.staleness or _DEFAULT_STALENESS_BOUNDS))
    iterations = _resolve_iterations(arguments.iterations, max(bounds))
    progress = StatusLine(sys.stderr)
    if arguments.gpus is not None:
        found = compare_gpu_shares(
            layout,
            rates,
            arguments.gpus,
            staleness=bounds,
            iterations=iterations,
            progress=progress,
        )
        what = f"{arguments.gpus} GPUs"
    else:
        workers = tuple(dict.fromkeys(arguments.workers or _DEFAULT_WORKERS))
        found = compare_worker_counts(
            layout, rates, workers, staleness=bounds, iterations=iterations, progress=progress
        )
        what = (
            f"{format_count(workers[0], 'worker')}"
            if len(workers) == 1
            else f"{len(workers)} numbers of workers"
        )
    progress.clear_line()
    if arguments.json or arguments.format == "json":
        print(json.dumps({"rates": source, "layouts": build_layout_rows(found)}, indent=2))
        return 0
    title = f"{settings.name}: {what}, {layout.prompts} x {layout.group_size} rollouts an iteration"
    print(escape_control_characters(format_layout_table(found, title)))
    print(escape_control_characters(f"rates: {source}"))
    return 0


def _refuse_unused_options(
    arguments: argparse.Namespace, names: Sequence[str], reason: str
) -> None:
    """Refuse options that would change nothing. Raises: SettingsError for the first that was given."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise SettingsError(f"--{name.replace('_', '-')}: {reason}")


def _resolve_iterations(requested: int | None, bound: int) -> int:
    """Iterations to simulate. Raises: SettingsError where too few are left after the warm-up."""
    from posttrain.planning.simulation import count_warm_up_iterations

    least = count_warm_up_iterations(bound) + bound + 1
    if requested is None:
        rounds = max(
            3, math.ceil(_MIN_COUNTED_ITERATIONS / (bound + 1))
        )  # whole ones: as many batches may end at once
        return count_warm_up_iterations(bound) + rounds * (bound + 1)
    if requested < least:
        raise SettingsError(
            f"--iterations: {requested} tell no speed with --staleness {bound}: {bound + 1} batches begin at once, their "
            f"shortest rollouts are learned from first, and {count_warm_up_iterations(bound)} iterations are left out for that; "
            f"simulate at least {least}"
        )
    return requested


def _build_layout(settings: PipelineSettings, arguments: argparse.Namespace) -> ClusterLayout:
    """Batch and schedule that the policy stage names. Raises: SettingsError where there is no such stage."""
    from posttrain.planning.simulation_inputs import ClusterLayout

    stage = settings.stages.policy
    if stage is None:
        raise SettingsError(
            "plan: the configuration has no stage policy, whose rollouts would be simulated"
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
    """Durations, and their source in words. Raises: SettingsError where nothing was measured."""
    from posttrain.planning.simulation_inputs import DEFAULT_ROW_SHARE, estimate_cluster_rates
    from rl_core.settings.planning import ClusterRates

    if arguments.rates is not None:
        from posttrain.settings_files import read_settings_file

        found, _ = read_settings_file(ClusterRates, arguments.rates)
        return found, str(arguments.rates)
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
        raise SettingsError(
            f"plan: {found}; run it once (`posttrain run`), or name a file of durations with --rates"
        )
    _, folder, stage = max(alone, key=lambda one: one[0])
    return folder, stage
