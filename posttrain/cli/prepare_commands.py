"""Commands that prepare a run: `init`, `convert`, `data`, `validate`.

Handlers import what they need when they are called, so that `posttrain --help` starts quickly.
"""

from __future__ import annotations

import argparse
import keyword
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_command_parser,
    add_config_argument,
    parse_positive_integer,
)
from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, write_text_atomic
from tasks.shipped import locate_templates

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

TEMPLATE_FILES = ("config.yaml", "environment.py", "reward.py")
TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")


def _add_init_parser(commands: Any) -> None:
    summary = "write a commented starter config, environment and reward"
    parser = add_command_parser(commands, "init", summary, ["init my_task"])
    parser.add_argument(
        "folder", metavar="FOLDER", help="a new folder; its name becomes that of the pipeline"
    )


def run_init_command(arguments: argparse.Namespace) -> int:
    """Write a starter config, environment and reward."""
    print(write_starter_project(Path(arguments.folder)))
    return 0


def write_starter_project(folder: Path) -> str:
    """Write the files into a new or empty folder; return the next commands.

    The folder's name becomes that of the pipeline and of a Python package, so it must be an identifier.
    Raises: SettingsError for an invalid name, or if one of the files exists already.
    """
    name = folder.resolve().name
    if len(name) > 64:
        raise SettingsError(
            f"{name[:64]}...: is too long a name; at most 64 letters, digits and underscores"
        )
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise SettingsError(
            f"{folder}: '{name}' cannot be imported by Python; use letters, digits and underscores, as in my_task"
        )
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder}: is a file; name a new folder")
    existing = [file for file in TEMPLATE_FILES if os.path.lexists(folder / file)]
    if existing:
        raise SettingsError(
            f"{folder}: has {', '.join(existing)} already, which would be overwritten; name a new folder"
        )
    make_folder(folder)
    for file in TEMPLATE_FILES:
        text = (locate_templates() / file).read_text(encoding="utf-8").replace("@FOLDER@", name)
        write_text_atomic(folder / file, text.replace("FOLDER/config.yaml", f"{name}/config.yaml"))
    parent = folder.resolve().parent
    lines = [f"{folder}: wrote {', '.join(TEMPLATE_FILES)}"]
    if parent != Path.cwd():
        lines.append(f"cd {parent}")
    return "\n".join([*lines, f"posttrain run {name}/config.yaml"])


def _add_convert_parser(commands: Any) -> None:
    examples = [
        "convert grpo.yaml --out mine.yaml",
        "convert sft.yaml --trainer sft",
        "convert ppo_trainer.yaml",
    ]
    summary = (
        "convert a configuration of TRL or verl, with comments on settings that have no equivalent"
    )
    parser = add_command_parser(commands, "convert", summary, examples)
    parser.add_argument(
        "file", metavar="FILE", help="YAML or JSON: names of a TRL config class, or verl's blocks"
    )
    parser.add_argument(
        "--trainer",
        choices=TRL_TRAINERS,
        default="",
        help="trainer of TRL (default: detected by the names in the file)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write it into a new file (default: print it)"
    )


def run_convert_command(arguments: argparse.Namespace) -> int:
    """Convert a configuration of TRL or verl; print or write it."""
    from rl_core.storage.atomic_files import create_file_once
    from tasks.config.convert import convert_config
    from tasks.config.yaml_loader import read_yaml

    text = convert_config(read_yaml(arguments.file).data, arguments.file, arguments.trainer)
    if arguments.out is None:
        print(text, end="")
        return 0
    if not create_file_once(arguments.out, text):
        raise SettingsError(f"{arguments.out}: exists already; name a new file")
    print(f"{arguments.out}: written; check it: posttrain validate {arguments.out}")
    return 0


def _add_data_parser(commands: Any) -> None:
    examples = [
        "data rows.jsonl",
        "data pairs.csv --model Qwen/Qwen2.5-0.5B-Instruct",
        "data rows.jsonl --heldout h.jsonl",
    ]
    summary = "show a data file: format, counts, lengths, duplicates, contradictions, examples with loss tokens marked"
    parser = add_command_parser(commands, "data", summary, examples)
    parser.add_argument("file", metavar="FILE", help="JSONL, CSV or Parquet, or a folder of them")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or hub name whose tokenizer and chat template are used",
    )
    parser.add_argument("--heldout", metavar="FILE", help="report rows that this file also has")
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("demonstrations", "preferences"),
        default="",
        help="default: detected by the columns",
    )
    parser.add_argument(
        "--max-rows",
        type=parse_positive_integer,
        default=20_000,
        metavar="N",
        help="rows read of each file (default: 20000)",
    )
    parser.add_argument(
        "--near",
        type=float,
        default=0.8,
        metavar="S",
        help="similarity of near copies, from 0 (off) to 1 (default: 0.8)",
    )


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
    report = describe_data_file(
        Path(arguments.file),
        kind=arguments.kind,
        heldout_path=heldout,
        max_rows=arguments.max_rows,
        near_duplicate_threshold=arguments.near,
        **options,
    )
    print(escape_control_characters(report))
    return 0


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


def run_validate_command(arguments: argparse.Namespace) -> int:
    """Check a configuration and print a summary of its pipeline."""
    settings = run_setup.load_pipeline_settings(
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
    is_unimported = bool(code) and not arguments.import_code
    if is_unimported:
        from rl_core.user_code.digest import digest_user_code

        try:
            digest_user_code(list_code_paths(settings))  # locates the code without running it
        except SettingsError as error:
            raise SettingsError(f"{arguments.config}: {error}") from error
    omission = ", but for code that was not imported" if is_unimported else ""
    lines = [
        f"{arguments.config}: fine{omission}",
        f"  pipeline  {settings.name} (settings {digest_settings(settings)})",
        f"  stages    {' -> '.join(settings.stages.active)}",
        f"  model     {_describe_model_source(settings)}",
        *(f"  data      {line}" for line in data),
    ]
    if _needs_environment(settings):
        lines.append(f"  acts in   {settings.environment.name}")
    if code:
        state = "found, not imported: --import-code" if is_unimported else "imported"
        lines.append(f"  code      {code} ({state})")
    lines.append(f"  writes to {Path(settings.output).absolute() / settings.name}")
    for line in lines:
        print(_wrap_summary_line(escape_control_characters(line)))
    return 0


def _wrap_summary_line(line: str) -> str:
    """Wrap a line of the summary between words if it is wider than the terminal."""
    from posttrain.cli.tables import detect_terminal_columns

    columns = detect_terminal_columns()
    if columns is None or len(line) <= max(36, columns):
        return line
    return textwrap.fill(
        line,
        max(36, columns),
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _describe_model_source(settings: PipelineSettings) -> str:
    path = settings.model.path
    if path is None:
        return f"preset {settings.model.preset}, from scratch"
    if path.startswith("models:"):
        return f"{path} (registered; looked up when it runs)"
    if Path(path).is_dir():
        return path
    return f"{path} (no folder here, so a Hugging Face name; looked up when it runs)"


def _needs_environment(settings: PipelineSettings) -> bool:
    """Return whether a stage plays episodes or calls the environment's demonstrator."""
    stages = settings.stages
    data = stages.prepare_data
    independent = {"prepare_data"}
    if data is not None and data.demonstrations:
        independent.add("sft")
    if data is not None and data.preferences:
        independent |= {"preference", "reward_model"}
    return bool(set(stages.active) - independent)


PARSERS: dict[str, Callable[[Any], None]] = {
    "init": _add_init_parser,
    "convert": _add_convert_parser,
    "data": _add_data_parser,
    "validate": _add_validate_parser,
}
