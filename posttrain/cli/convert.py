"""Command `posttrain convert`: convert a configuration of TRL or verl."""

from __future__ import annotations

import argparse

from rl_core.errors import SettingsError

TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")

EXAMPLES = (
    "convert grpo.yaml --to mine.yaml",
    "convert sft.yaml --trainer sft",
    "convert ppo_trainer.yaml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "file", metavar="FILE", help="YAML or JSON: names of a TRL config class, or verl's blocks"
    )
    parser.add_argument(
        "--trainer",
        choices=TRL_TRAINERS,
        default="",
        help="trainer of TRL (default: detected by the names in the file)",
    )
    parser.add_argument("--to", metavar="FILE", help="write it into a new file (default: print it)")
    parser.add_argument("--out", dest="to", help=argparse.SUPPRESS)  # its name in the last release


def run_command(arguments: argparse.Namespace) -> int:
    """Convert a configuration of TRL or verl; print or write it."""
    from rl_core.storage.atomic_files import create_file_once
    from tasks.config.convert import convert_config
    from tasks.config.yaml_loader import read_yaml

    text = convert_config(read_yaml(arguments.file).data, arguments.file, arguments.trainer)
    if arguments.to is None:
        print(text, end="")
        return 0
    if not create_file_once(arguments.to, text):
        raise SettingsError(f"{arguments.to}: exists already; name a new file")
    print(f"{arguments.to}: written; check it: posttrain validate {arguments.to}")
    return 0
