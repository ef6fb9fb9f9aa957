"""Parsers of the commands in `posttrain.cli.train_commands`. Standard library only.

Commands that make data and configurations, and that run pipelines and stages.

Each imports what it needs at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.stopping import schedule_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup as loading
from posttrain.cli.arguments import (
    add_allow_drift_option,
    add_command_parser,
    add_config_and_output_options,
    add_config_argument,
    add_json_option,
    add_quiet_option,
    add_stop_after_option,
    parse_duration,
    parse_positive_integer,
    parse_stage_name,
)
from rl_core.errors import SettingsError
from tasks import stage_registry
from tasks.stage_registry import list_stage_names

if TYPE_CHECKING:
    from flows.sweep.ray_trials import TrialResources
    from tasks.config import PipelineSettings


TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")  # of TRL
_STAGE_HELP = f"one of {', '.join(list_stage_names())}, or of the config's own"


def _add_init_parser(commands: Any) -> None:
    about = "write a commented starter config, environment and reward"
    parser = add_command_parser(commands, "init", about, ["init my_task"])
    parser.add_argument(
        "folder", metavar="FOLDER", help="a new folder; its name becomes that of the pipeline"
    )


def _add_convert_parser(commands: Any) -> None:
    examples = [
        "convert grpo.yaml --out mine.yaml",
        "convert sft.yaml --trainer sft",
        "convert ppo_trainer.yaml",
    ]
    about = "write a configuration of TRL or verl as ours, with comments on what has no equal"
    parser = add_command_parser(commands, "convert", about, examples)
    parser.add_argument(
        "file", metavar="FILE", help="YAML or JSON: names of a TRL config class, or verl's blocks"
    )
    parser.add_argument(
        "--trainer",
        choices=TRL_TRAINERS,
        default="",
        help="of TRL (default: by the names in the file)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write it into a new file (default: print it)"
    )


def _add_data_parser(commands: Any) -> None:
    examples = [
        "data rows.jsonl",
        "data pairs.csv --model Qwen/Qwen2.5-0.5B-Instruct",
        "data rows.jsonl --heldout h.jsonl",
    ]
    about = "show a data file: format, counts, lengths, duplicates, contradictions, examples with loss tokens marked"
    parser = add_command_parser(commands, "data", about, examples)
    parser.add_argument("file", metavar="FILE", help="JSONL, CSV or Parquet, or a folder of them")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or hub name whose tokenizer and chat template are used",
    )
    parser.add_argument("--heldout", metavar="FILE", help="report rows that this file has as well")
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("demonstrations", "preferences"),
        default="",
        help="default: by columns",
    )
    parser.add_argument(
        "--max-rows",
        type=parse_positive_integer,
        default=20_000,
        metavar="N",
        help="of each file (default: 20000)",
    )
    parser.add_argument(
        "--near",
        type=float,
        default=0.8,
        metavar="S",
        help="similarity of near copies, from 0 (off) to 1 (default: 0.8)",
    )


def _add_run_parser(commands: Any) -> None:
    parser = add_command_parser(
        commands,
        "run",
        "run a pipeline; stages finished with the same settings and data are skipped",
        [
            "run demo",
            "run demo --set stages.policy.learning_rate=1e-3 --set seed=1",
            "run demo --set stages.analyze=null --set 'stages.evaluate.levels=[easy, hard]'",
            "run gsm8k --set environment.options.path=train.jsonl",
        ],
    )
    add_config_argument(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="rerun all stages, finished ones included"
    )
    parser.add_argument(
        "--monitor", action="store_true", help="serve the live page for as long as the run takes"
    )
    parser.add_argument(
        "--replay-schedule",
        metavar="FILE",
        help="schedule.jsonl of a run with asynchronous rollouts: learn from the same tokens again, bit for bit",
    )
    add_stop_after_option(parser)
    add_allow_drift_option(parser)
    add_quiet_option(parser)


def _add_retrain_parser(commands: Any) -> None:
    examples = [
        "retrain demo",
        "retrain demo --force --reason 'tools have changed'",
        "retrain gsm8k --start base --set environment.options.path=train.jsonl",
    ]
    about = (
        "retrain if there is data new to the champion, and promote the result if it passes the gate"
    )
    parser = add_command_parser(commands, "retrain", about, examples)
    add_config_argument(parser)
    parser.add_argument(
        "--start",
        choices=("champion", "base"),
        help="initial model: the champion, or the configuration's model (default: its retrain.start)",
    )
    parser.add_argument("--force", action="store_true", help="also without new data")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin an interrupted retraining's unfinished stage anew",
    )
    add_allow_drift_option(parser)
    parser.add_argument(
        "--reason", default="", help="origin of the request; stored with the versions"
    )
    add_quiet_option(parser)


def _add_validate_parser(commands: Any) -> None:
    examples = ["validate demo", "validate demo --set stages.policy.group_size=16 --show"]
    parser = add_command_parser(
        commands, "validate", "check a configuration without running anything", examples
    )
    add_config_argument(parser)
    parser.add_argument(
        "--show", action="store_true", help="print all settings, defaults included, as YAML"
    )
    parser.add_argument(
        "--import-code",
        action="store_true",
        help="import the code that it names by import path (environment, rewards, loss), which runs those modules, "
        "and check options, signatures and levels with it",
    )


def _add_stage_parser(commands: Any) -> None:
    examples = [
        "stage prepare_data demo",
        "stage policy demo --model outputs/my-sft-model",
        "stage sft demo --set stages.sft.epochs=1 --fresh",
    ]
    about = "run one stage; its inputs come from finished stages, or those run first"
    parser = add_command_parser(commands, "stage", about, examples)
    parser.add_argument("name", metavar="NAME", type=parse_stage_name, help=_STAGE_HELP)
    add_config_argument(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="start from this model folder, hub name or models:/NAME@ALIAS",
    )
    parser.add_argument("--fresh", action="store_true", help="rerun the stage even if finished")
    add_allow_drift_option(parser)
    add_quiet_option(parser)


def _add_why_parser(commands: Any) -> None:
    examples = ["why demo", "why policy demo", "why sft demo --set stages.sft.epochs=2"]
    about = "say why stages were run or not, and what changed since"
    parser = add_command_parser(commands, "why", about, examples)
    parser.add_argument(
        "name",
        metavar="STAGE",
        type=parse_stage_name,
        nargs="?",
        help=f"one stage, with earlier runs of it; {_STAGE_HELP}",
    )
    add_config_argument(parser)
    add_json_option(parser)


def _add_profile_parser(commands: Any) -> None:
    examples = ["profile demo", "profile demo --stage sft --iterations 20", "profile demo --json"]
    about = "profile a few iterations of a training stage by phase"
    parser = add_command_parser(commands, "profile", about, examples)
    add_config_argument(parser)
    parser.add_argument(
        "--stage", metavar="NAME", type=parse_stage_name, help="default: the last training stage"
    )
    parser.add_argument(
        "--iterations",
        "-n",
        metavar="N",
        type=_parse_profile_iterations,
        default=8,
        help="how many (default: 8)",
    )
    add_json_option(parser)
    add_quiet_option(parser)


def _parse_profile_iterations(text: str) -> int:
    """Number of iterations to profile; the first is warm-up."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer of at least 2: the first iteration is warm-up"
        )
    return int(text)


def _add_resume_parser(commands: Any) -> None:
    examples = ["resume", "resume demo", "resume 'demo · 2026-11-21 14:00:00'"]
    about = "resume a killed, stopped or failed run with its own settings, from its last checkpoint"
    parser = add_command_parser(commands, "resume", about, examples)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name or id of the run, or its pipeline (default: the newest unfinished run)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin the unfinished stage anew, without its checkpoint",
    )
    add_allow_drift_option(parser)
    add_config_and_output_options(parser)
    add_stop_after_option(parser)
    add_quiet_option(parser)


def _add_verify_resume_parser(commands: Any) -> None:
    examples = [
        "verify-resume demo --set stages.policy.iterations=8 --set stages.sft.max_steps=60",
        "verify-resume my_task/config.yaml --kills 10 --seed 1",
        "verify-resume my_task/config.yaml --slices 60    (SIGTERM every 60 s, as a scheduler sends it)",
    ]
    about = (
        "run a pipeline in one piece, and again while killing it; compare the bytes and name what depends on chance; "
        "exits with 0 if they are equal, 1 if they differ, 2 if that was not found out"
    )
    parser = add_command_parser(commands, "verify-resume", about, examples)
    add_config_argument(parser)
    parser.add_argument(
        "--kills",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="interruptions by SIGKILL (default: 5)",
    )
    parser.add_argument(
        "--slices",
        type=parse_duration,
        metavar="SECONDS",
        help="stop by SIGTERM after every SECONDS instead",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the moments and fault points of the kills (default: 0)",
    )
    parser.add_argument(
        "--minutes",
        type=parse_duration,
        default=60.0,
        metavar="M",
        help="limit for everything; half for the first run (default: 60). Settings are shortened by --set alone",
    )
    parser.add_argument("--keep", action="store_true", help="keep both runs also if they are equal")


PARSERS: dict[str, Callable[[Any], None]] = {
    "init": _add_init_parser,
    "convert": _add_convert_parser,
    "data": _add_data_parser,
    "run": _add_run_parser,
    "retrain": _add_retrain_parser,
    "validate": _add_validate_parser,
    "stage": _add_stage_parser,
    "why": _add_why_parser,
    "profile": _add_profile_parser,
    "resume": _add_resume_parser,
    "verify-resume": _add_verify_resume_parser,
}


def run_init_command(arguments: argparse.Namespace) -> int:
    """Write a starter config, environment and reward."""
    from posttrain.cli.prepare_commands import write_starter_project

    print(write_starter_project(Path(arguments.folder)))
    return 0


def run_convert_command(arguments: argparse.Namespace) -> int:
    """Print or write a configuration of TRL or verl as ours."""
    from rl_core.storage.atomic_files import create_file_once
    from tasks.config.convert import convert_config
    from tasks.config.yaml_loader import read_yaml

    text = convert_config(read_yaml(arguments.file).data, arguments.file, arguments.trainer)
    if arguments.out is None:
        print(text, end="")
        return 0
    if not create_file_once(arguments.out, text):
        raise SettingsError(f"{arguments.out}: is there already; name a new file")
    print(f"{arguments.out}: written; check it: posttrain validate {arguments.out}")
    return 0


def run_data_command(arguments: argparse.Namespace) -> int:
    """Print a report on a data file."""
    from posttrain.cli.data_report import describe_data_file

    options: dict[str, Any] = {}
    if arguments.model is not None:
        from rl_core.data.chat import ChatRenderer
        from rl_core.models import causal_lm
        from rl_core.settings import ModelSettings

        settings = ModelSettings(path=arguments.model)
        renderer = ChatRenderer(causal_lm.load_tokenizer(arguments.model, settings), settings)
        options = {
            "renderer": renderer,
            "context": causal_lm.read_context_length(arguments.model, settings),
        }
    heldout = Path(arguments.heldout) if arguments.heldout else None
    told = describe_data_file(
        Path(arguments.file),
        kind=arguments.kind,
        heldout_path=heldout,
        max_rows=arguments.max_rows,
        near_duplicate_threshold=arguments.near,
        **options,
    )
    print(escape_control_characters(told))
    return 0


def run_pipeline_command(arguments: argparse.Namespace) -> int:
    """Run the pipeline of a configuration."""
    schedule_sigterm(arguments.stop_after)
    if arguments.replay_schedule is not None:
        arguments.set = [
            *arguments.set,
            f"stages.policy.rollouts.replay_schedule={arguments.replay_schedule}",
        ]
    settings = loading.load_pipeline_settings(arguments, check_servers=True)
    loading.refuse_bad_rows(settings)
    loading.refuse_unknown_base_model(settings)
    loading.configure_prefect(settings)
    with loading.print_banner_and_start_prefect(
        settings, quiet=arguments.quiet, fresh=arguments.fresh
    ):
        from flows.post_training import run_pipeline
        from posttrain.cli.monitor_process import serve_monitor_page

    with serve_monitor_page(Path(settings.output), arguments.monitor):
        result = run_pipeline(
            settings,
            fresh=arguments.fresh,
            quiet=arguments.quiet,
            allow_drift=arguments.allow_drift,
            changed=arguments.set,
        )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def run_sweep_command(arguments: argparse.Namespace) -> int:
    """Run trials of a configuration and choose the best."""
    schedule_sigterm(arguments.stop_after)
    from flows.sweep.plan import SweepPlan, resolve_metric
    from flows.sweep.search import parse_set_options

    overrides, dimensions = parse_set_options(arguments.set)
    if not dimensions and arguments.seeds == 1:
        raise SettingsError(
            "nothing varies: give --set KEY=A,B,C or KEY=LOW..HIGH:POINTS, or --seeds N"
        )
    plan = SweepPlan(
        config=arguments.config,
        overrides=tuple(overrides),
        dimensions=tuple(dimensions),
        method=arguments.method,
        trials=arguments.trials,
        seeds=arguments.seeds,
        seed_stage=arguments.seed_stage,
        metric=arguments.metric or "success",
        minimize=arguments.minimize,
        finalists=arguments.finalists,
        is_remote=arguments.ray is not None,
    )
    base = plan.load_base_settings()
    plan = dataclasses.replace(plan, metric=resolve_metric(arguments.metric, base))
    loading.refuse_bad_rows(base)
    loading.refuse_unknown_base_model(base)
    loading.configure_prefect(base)
    from posttrain.cli.run_setup import format_sweep_banner

    with loading.print_banner_and_start_prefect(
        base, quiet=arguments.quiet, banner=format_sweep_banner(plan, base)
    ):
        from flows.sweep.sweep_flow import run_sweep

    result = run_sweep(
        plan,
        parallel=arguments.parallel,
        gate=not arguments.no_gate,
        quiet=arguments.quiet,
        ray=arguments.ray,
        resources=_parse_trial_resources(arguments),
    )
    print(escape_control_characters(result.text))
    if result.pipeline is not None:
        print(escape_control_characters(result.pipeline.format_table()))
    return 0 if result.ok else 1


def _parse_trial_resources(arguments: argparse.Namespace) -> TrialResources | None:
    """Resources of a trial on Ray; None = no cluster was asked for."""
    from flows.sweep.ray_trials import TrialResources

    if arguments.ray is None:
        for name in ("trial_cpus", "trial_gpus"):
            if getattr(arguments, name) is not None:
                raise SettingsError(
                    f"--{name.replace('_', '-')}: is of a Ray cluster; name it with --ray"
                )
        return None
    return TrialResources(cpus=arguments.trial_cpus or 1, gpus=arguments.trial_gpus)


def run_retrain_command(arguments: argparse.Namespace) -> int:
    """Retrain on new data, from the champion, with promotion through the gate."""
    settings = loading.load_pipeline_settings(arguments, check_servers=True)
    loading.refuse_bad_rows(settings)
    loading.configure_prefect(settings)
    with loading.print_banner_and_start_prefect(
        settings, quiet=arguments.quiet, fresh=True
    ):  # on other episodes than before
        from flows.retrain import run_retraining

    result = run_retraining(
        settings,
        start=arguments.start,
        force=arguments.force,
        reason=arguments.reason,
        quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
        fresh=arguments.fresh,
    )
    if result.pipeline is not None:
        print(escape_control_characters(result.pipeline.format_table()))
    print(escape_control_characters(result.message))
    return 0 if result.pipeline is None or result.pipeline.ok else 1


def run_validate_command(arguments: argparse.Namespace) -> int:
    """Check a configuration and print a summary of its pipeline."""
    settings = loading.load_pipeline_settings(
        arguments, import_code=arguments.import_code, check_servers=True
    )
    from tasks.config import digest_settings, dump_settings, list_code_paths
    from tasks.config.machine_checks import describe_checked_files

    if arguments.show:
        import yaml

        print(yaml.safe_dump(dump_settings(settings), sort_keys=False, allow_unicode=True), end="")
        return 0
    data = describe_checked_files(settings)
    code = ", ".join(list_code_paths(settings))
    if code and not arguments.import_code:
        from rl_core.user_code import digest_user_code

        try:
            digest_user_code(list_code_paths(settings))  # each is found, none is run
        except SettingsError as error:
            raise SettingsError(f"{arguments.config}: {error}") from error
    left_out = ", but for code that was not imported" if code and not arguments.import_code else ""
    lines = [
        f"{arguments.config}: fine{left_out}",
        f"  pipeline  {settings.name} (settings {digest_settings(settings)})",
        f"  stages    {' -> '.join(settings.stages.active)}",
        f"  model     {_describe_model_source(settings)}",
        *(f"  data      {line}" for line in data),
    ]
    if _needs_environment(settings):
        lines.append(f"  acts in   {settings.environment.name}")
    if code:
        lines.append(
            f"  code      {code} ({'found, not imported: --import-code' if left_out else 'imported'})"
        )
    lines.append(f"  writes to {Path(settings.output).absolute() / settings.name}")
    for line in lines:
        print(_wrap_summary_line(escape_control_characters(line)))
    return 0


def _wrap_summary_line(line: str) -> str:
    """A line of the summary wrapped between words, where it is too long for the terminal; else whole."""
    from posttrain.cli.runs_table import detect_terminal_columns

    columns = detect_terminal_columns()
    if columns is None or len(line) <= max(36, columns):
        return line
    indent = " " * 12
    return textwrap.fill(
        line,
        max(36, columns),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _describe_model_source(settings: PipelineSettings) -> str:
    path = settings.model.path
    if path is None:
        return f"preset {settings.model.preset}, from scratch"
    if path.startswith("models:"):
        return f"{path} (registered; looked up when it runs)"
    return (
        path
        if Path(path).is_dir()
        else f"{path} (no folder here, so a Hugging Face name; looked up when it runs)"
    )


def _needs_environment(settings: PipelineSettings) -> bool:
    """True if some stage plays episodes or asks the environment's demonstrator."""
    stages = settings.stages
    data = stages.prepare_data
    own = {"prepare_data"}
    if data is not None and data.demonstrations:
        own.add("sft")
    if data is not None and data.preferences:
        own |= {"preference", "reward_model"}
    return bool(set(stages.active) - own)


def run_profile_command(arguments: argparse.Namespace) -> int:
    """Print the time profile of a stage."""
    settings = loading.load_pipeline_settings(arguments, check_servers=True)
    name = _resolve_profiled_stage(arguments.stage, settings)
    loading.refuse_unknown_base_model(settings)
    loading.configure_prefect(settings)
    quiet = arguments.quiet or arguments.json
    active = settings.stages.active
    with loading.print_banner_and_start_prefect(
        settings, quiet=quiet, stages=active[: active.index(name) + 1], fresh=True
    ):
        from posttrain.cli.time_profile import (
            build_profile_record,
            format_profile_table,
            profile_stage,
        )

    records = profile_stage(settings, name, arguments.iterations, quiet=quiet)
    print(
        json.dumps(build_profile_record(name, records), indent=1)
        if arguments.json
        else format_profile_table(name, records)
    )
    return 0


def _resolve_profiled_stage(name: str | None, settings: PipelineSettings) -> str:
    """A training stage of the configuration; None = its last one. Raises: SettingsError without it."""
    there = [
        stage for stage in stage_registry.list_training_stages() if stage in settings.stages.active
    ]
    if not there:
        raise SettingsError("there is no training stage to profile")
    if name is not None and name not in there:
        raise SettingsError(
            f"the configuration has no stage '{name}' to profile, only {', '.join(there)}"
        )
    return name or there[-1]


def run_stage_command(arguments: argparse.Namespace) -> int:
    """Run one stage."""
    settings = loading.load_pipeline_settings(arguments, check_servers=True)
    if arguments.name not in settings.stages.active:
        missing = stage_registry.describe_unknown_stage(arguments.name, settings.stages.active)
        raise SettingsError(f"{arguments.config}: {missing}")
    loading.refuse_bad_rows(settings)
    if arguments.model is None:
        loading.refuse_unknown_base_model(settings)
    else:
        loading.refuse_unknown_models(settings, arguments.model)
    loading.configure_prefect(settings)
    from tasks.pipeline.run_options import select_settings_up_to

    part = select_settings_up_to(settings, arguments.name, arguments.model)
    with loading.print_banner_and_start_prefect(part, quiet=arguments.quiet, fresh=arguments.fresh):
        from flows.single_stage import run_stage

    result = run_stage(
        settings,
        arguments.name,
        model=arguments.model,
        fresh=arguments.fresh,
        quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
    )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def run_why_command(arguments: argparse.Namespace) -> int:
    """Say why stages were run or not."""
    given = arguments.config
    if (
        arguments.name is None
        and given in stage_registry.list_stage_names()
        and not Path(given).exists()
    ):
        raise SettingsError(
            f"{given} is a stage; name the configuration, too, as in `posttrain why {given} demo`"
        )
    settings = loading.load_pipeline_settings(arguments, import_code=False)
    if settings.stages.own:
        settings = loading.load_pipeline_settings(
            arguments
        )  # what their settings are, and where they stand, says their code
    from flows.runtime.progress import wrap_to_terminal
    from posttrain.cli.stage_explanations import explain_pipeline, explain_stage

    found = (
        explain_stage(settings, arguments.name) if arguments.name else explain_pipeline(settings)
    )
    print(
        json.dumps(found.to_record(), indent=1)
        if arguments.json
        else wrap_to_terminal(found.format_text())
    )
    return 0


def run_resume_command(arguments: argparse.Namespace) -> int:
    """Resume an interrupted run."""
    schedule_sigterm(arguments.stop_after)
    chosen = loading.load_optional_settings(arguments)
    output = Path(chosen.output if chosen else arguments.output)
    loading.refuse_unreadable_folder(output)
    from posttrain.cli.resumable_runs import find_resumable_run, load_recorded_settings

    record = find_resumable_run(output, arguments.run)
    settings = load_recorded_settings(record, output)
    loading.configure_prefect(settings)
    print(
        escape_control_characters(f"going on with '{record.name}', which is {record.status}"),
        flush=True,
    )
    with loading.print_banner_and_start_prefect(settings, quiet=arguments.quiet):
        from flows.post_training import run_pipeline

    result = run_pipeline(
        settings,
        only=record.only,
        models=record.evaluated_models,
        quiet=arguments.quiet,
        started=record.started,
        allow_drift=arguments.allow_drift,
        restart=arguments.fresh,
    )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def run_verify_resume_command(arguments: argparse.Namespace) -> int:
    """Compare a run in one piece with an interrupted one."""
    settings = loading.load_pipeline_settings(arguments, check_servers=True)
    loading.refuse_unknown_base_model(settings)
    from posttrain.verification.verify_resume import VerificationPlan, verify_resume

    plan = VerificationPlan(
        arguments.kills, arguments.slices, arguments.seed, arguments.minutes, arguments.keep
    )
    return verify_resume(arguments.config, arguments.set, settings, plan)
