"""Command `posttrain convert`: convert a configuration of TRL or verl."""

from __future__ import annotations

import argparse

from rl_core.errors import SettingsError

TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")

EXAMPLES = (
    "convert grpo.yaml --out mine.yaml",
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
    parser.add_argument(
        "--out", metavar="FILE", help="write it into a new file (default: print it)"
    )


def run_command(arguments: argparse.Namespace) -> int:
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
