"""Command `posttrain convert`: convert a configuration of TRL or verl."""

from __future__ import annotations

import argparse
import shlex

from rl_core.errors import SettingsError

TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")

EXAMPLES = (
    "convert grpo.yaml --to mine.yaml",
    "convert sft.yaml --trainer sft",
    "convert ppo_trainer.yaml",
    "convert --names gradient",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="YAML or JSON: names of a TRL config class, or verl's blocks",
    )
    parser.add_argument(
        "--names",
        metavar="PART",
        nargs="?",
        const="",
        help="print the equivalents of all names of TRL and verl that contain PART, also of those that have none",
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
    """Convert a configuration of TRL or verl; print or write it. With `--names`, print equivalents of names."""
    if (arguments.names is None) == (arguments.file is None):
        raise SettingsError("convert: name a FILE, or look names up with --names PART")
    if arguments.names is not None:
        return _print_names(arguments.names)
    from rl_core.storage.atomic_files import create_file_once
    from tasks.config.convert import convert_config
    from tasks.config.yaml_loader import read_yaml

    text = convert_config(read_yaml(arguments.file).data, arguments.file, arguments.trainer)
    if arguments.to is None:
        print(text, end="")
        return 0
    if not create_file_once(arguments.to, text):
        raise SettingsError(f"{arguments.to}: exists already; name a new file")
    path = shlex.quote(str(arguments.to))
    print(f"{arguments.to}: written; check it: posttrain validate {path}")
    return 0


def _print_names(part: str) -> int:
    from rl_core.settings.framework_aliases import list_trl_aliases, list_verl_aliases

    frameworks = {"TRL": list_trl_aliases(), "verl": list_verl_aliases()}
    is_known = False
    for framework, aliases in frameworks.items():
        for alias in aliases:
            names = [name for name in alias.names if part.lower() in name.lower()]
            if not names:
                continue
            is_known = True
            trainers = f" ({', '.join(alias.trainers)})" if alias.trainers else ""
            paths = ", ".join(alias.resolve_paths(None)) or "no equivalent"
            difference = "" if alias.difference == "same" else f": {alias.difference}"
            print(f"{framework} {', '.join(names)}{trainers} -> {paths}{difference}")
    if not is_known:
        raise SettingsError(f"convert --names: no name of TRL or verl contains '{part}'")
    return 0
